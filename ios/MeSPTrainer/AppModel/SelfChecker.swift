import Foundation
import MeSPBundle
import MeSPControl
import MeSPCore
import MeSPSelfCheck
import MeSPSentences
import Observation

/// A self-check of this device. Each completed check extends the report and its file. The self-check pauses while the app is not active.
@MainActor @Observable public final class SelfChecker {
    public private(set) var report: SelfCheckReport?
    public private(set) var isRunning = false
    public private(set) var problem: Sentence?

    public var current: String? {
        guard isRunning, let report, report.checks.count < report.start.names.count else { return nil }
        return report.start.names[report.checks.count]
    }

    @ObservationIgnored private let monitor: any DeviceMonitor
    @ObservationIgnored private var gate = BoundaryGate()

    public init(monitor: any DeviceMonitor) {
        self.monitor = monitor
        monitor.observers.append { [weak self] _ in self?.update() }
    }

    /// Starts a self-check, unless one is in progress.
    ///
    /// - Parameter file: the report's file, written before the first check and after each check. If a check crashes the app, the file shows which.
    public func start(_ settings: SelfCheck.Settings, file: URL) {
        guard !isRunning else { return }
        (report, problem, isRunning) = (nil, nil, true)
        let gate = BoundaryGate()
        self.gate = gate
        update()
        let reports = gate.start("self-check", sending: SelfCheckReport.self) { send in
            try gate.pass { _ in }
            try SelfCheck(settings).run(atBlock: { try gate.pass { _ in } }) { report in
                try explaining {
                    try FileManager.default.createDirectory(
                        at: file.deletingLastPathComponent(), withIntermediateDirectories: true)
                    try report.json.write(to: file, options: .atomic)
                } as: {
                    "Cannot write \(file.lastPathComponent): \($0)."
                }
                send(report)
            }
        }
        Task {
            do {
                for try await report in reports { self.report = report }
            } catch is CancellationError {
                problem = "The self-check was stopped."
            } catch {
                problem = error.plainSentence
            }
            isRunning = false
        }
    }

    public func stop() { gate.stop() }

    private func update() { gate.pauseUnlessInFront(monitor) }
}
