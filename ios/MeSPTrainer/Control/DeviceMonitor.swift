import MeSPCore

/// Where an app is: in front, about to leave or partly covered, or out of sight.
public enum AppScene: String, Sendable, CaseIterable { case active, inactive, background }

/// The conditions outside of a run that it depends on: the app's scene, and the device's temperature, battery and memory. `SystemMonitor` asks the system.
@MainActor public protocol DeviceMonitor: AnyObject, Sendable {
    var scene: AppScene { get }
    var thermalState: ThermalState { get }
    /// nil if there is no battery, or it is not known.
    var battery: Battery? { get }
    /// Bytes that the process may still take; nil if there is no limit.
    var availableMemory: Int? { get }
    /// To be called at each event, at once and in order.
    var observers: [(DeviceEvent) -> Void] { get set }
}

public enum DeviceEvent: Sendable {
    /// The scene, the thermal state or the battery is another.
    case change
    /// The system runs short of memory.
    case memoryWarning
}
