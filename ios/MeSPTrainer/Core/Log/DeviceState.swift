import Foundation

public enum ThermalState: String, Sendable, CaseIterable {
    case nominal, fair, serious, critical

    /// The device's current state; on Linux always `nominal`.
    package static var current: ThermalState {
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
    package var level: Float
    /// Whether the device is on a charger, even with a full battery.
    package var isCharging: Bool

    package init(level: Float, isCharging: Bool) {
        (self.level, self.isCharging) = (level, isCharging)
    }
}
