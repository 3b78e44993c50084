import MeSPCore

public enum AppScene: String, Sendable, CaseIterable { case active, inactive, background }

@MainActor public protocol DeviceMonitor: AnyObject, Sendable {
    var scene: AppScene { get }
    var thermalState: ThermalState { get }
    /// The state of the battery; nil if there is none, or if it is unknown.
    var battery: Battery? { get }
    var isLowPower: Bool { get }
    /// The number of bytes that the process may still allocate, or nil without a limit.
    var availableMemory: Int? { get }
    /// Whether a run is in progress, which needs the state of the battery.
    var isInUse: Bool { get set }
    var observers: [(DeviceEvent) -> Void] { get set }
}

public enum DeviceEvent: Sendable {
    case change
    case memoryWarning
}
