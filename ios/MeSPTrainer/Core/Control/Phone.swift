import Foundation

/// The place of an app: in front, about to leave or partly covered, or out of sight.
public enum AppScene: String, Sendable, CaseIterable { case active, inactive, background }

/// The thermal state of the device, as in `ProcessInfo.ThermalState`.
public enum ThermalState: String, Sendable, CaseIterable {
    case nominal, fair, serious, critical

    /// The device's present state; on Linux always `nominal`.
    public static var current: ThermalState {
        #if canImport(Darwin)
            switch ProcessInfo.processInfo.thermalState {
            case .fair: .fair
            case .serious: .serious
            case .critical: .critical
            default: .nominal
            }
        #else
            .nominal
        #endif
    }
}

public struct Battery: Codable, Sendable, Equatable {
    /// 0 to 1
    public var level: Float
    /// On the charger, also where it is full.
    public var isCharging: Bool

    public init(level: Float, isCharging: Bool) {
        (self.level, self.isCharging) = (level, isCharging)
    }
}

/// The device as `RunController` needs it. `SystemPhone` asks the system; tests have one of their own.
@MainActor public protocol Phone: AnyObject {
    var scene: AppScene { get }
    var thermalState: ThermalState { get }
    /// nil if there is no battery, or nobody knows.
    var battery: Battery? { get }
    /// Bytes that the process may still take; nil if there is no limit.
    var availableMemory: Int? { get }
    /// To be called at each event, at once and in order.
    var observers: [(PhoneEvent) -> Void] { get set }
}

public enum PhoneEvent: Sendable {
    /// The scene, the thermal state or the battery is another.
    case change
    /// The system runs short of memory.
    case memoryWarning
}
