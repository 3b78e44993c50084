import MeSPCore

/// The state of an app's scene: in front, about to leave or partly covered, or in the background.
public enum AppScene: String, Sendable, CaseIterable { case active, inactive, background }

/// The external conditions of a run: the app's scene, and the device's temperature, battery and memory. `SystemMonitor` reads them from the system.
@MainActor public protocol DeviceMonitor: AnyObject, Sendable {
    var scene: AppScene { get }
    var thermalState: ThermalState { get }
    /// The state of the battery; nil if there is none, or if it is unknown.
    var battery: Battery? { get }
    /// The number of bytes that the process may still allocate; nil if there is no limit.
    var availableMemory: Int? { get }
    /// Closures to call at each event, immediately and in order.
    var observers: [(DeviceEvent) -> Void] { get set }
}

public enum DeviceEvent: Sendable {
    /// The scene, the thermal state or the battery has changed.
    case change
    /// The system runs short of memory.
    case memoryWarning
}
