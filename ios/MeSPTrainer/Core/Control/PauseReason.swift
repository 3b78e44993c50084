/// Why a run waits. Where several reasons hold, the first in this order is told.
public enum PauseReason: String, Sendable, CaseIterable {
    /// The person asked for it.
    case user
    /// The app is not in front: iOS ends an app that uses the GPU in the background.
    case away
    /// The system ran short of memory.
    case memory
    /// The device is too warm.
    case heat
    /// The battery is low and not charging.
    case battery

    /// The reason as a sentence.
    public var sentence: String {
        switch self {
        case .user: "Paused by hand."
        case .away: "The app is not in front; iOS allows no training in the background."
        case .memory: "The phone is short of memory."
        case .heat: "The phone is too warm."
        case .battery: "The battery is below 20% and not charging."
        }
    }
}
