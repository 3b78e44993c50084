import MeSPCore

/// The state of the app's scene, as in SwiftUI's `ScenePhase`.
public enum AppScene: String, Sendable, CaseIterable { case active, inactive, background }

/// The conditions on which the pauses of a run depend: the app's scene, and the device's temperature, battery and memory.
@MainActor public protocol DeviceMonitor: AnyObject, Sendable {
    var scene: AppScene { get }
    var thermalState: ThermalState { get }
    /// The state of the battery; nil if there is none, or if it is unknown.
    var battery: Battery? { get }
    /// Whether Low Power Mode is on.
    var isLowPower: Bool { get }
    /// The number of bytes that the process may still allocate, or nil without a limit.
    var availableMemory: Int? { get }
    /// Whether a run is in progress, which needs the state of the battery.
    var isInUse: Bool { get set }
    /// Closures to call at each event, in order.
    var observers: [(DeviceEvent) -> Void] { get set }
}

public enum DeviceEvent: Sendable {
    case change
    /// The system runs short of memory.
    case memoryWarning
}
