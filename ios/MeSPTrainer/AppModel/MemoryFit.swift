import MeSPBundle
import MeSPCore

public struct MemoryFit: Sendable, Equatable {
    public let predictedPeak: Int
    /// The memory that the app may still allocate, in bytes, or nil without a limit.
    public let available: Int?

    public var fits: Bool { available.map { predictedPeak <= $0 } ?? true }

    /// - Throws: `MeSPError` if the settings are invalid, the bundle does not support them, or no plan stays within `settings.memoryLimitMb`.
    public init(_ settings: RunSettings, _ manifest: Manifest, available: Int?) throws {
        try settings.check()
        try manifest.check(settings)
        let planner = Planner(manifest, settings)
        predictedPeak = planner.peak(try planner.plan())
        self.available = available
    }
}
