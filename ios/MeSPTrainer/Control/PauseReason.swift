import MeSPCore

/// Why a run waits. Where several reasons hold, the first in this order is told.
public enum PauseReason: String, Sendable, CaseIterable {
    /// The person asked for it.
    case user
    /// The app is not in front, and may not train where it is.
    case away
    /// The system ran short of memory.
    case memory
    /// The device is too warm.
    case heat
    /// The battery is low and not charging.
    case battery
    /// The night's time in the background is for a phone on its charger.
    case charger

    /// The reason as a sentence.
    public var sentence: Sentence {
        switch self {
        case .user: "Paused by hand."
        case .away: "The app is not in front, and iOS gives it no time to train."
        case .memory: "The phone is short of memory."
        case .heat: "The phone is too warm."
        case .battery: "The battery is below 20% and not charging."
        case .charger: "The phone is not on its charger."
        }
    }

    /// The event that ends the pause, as a sentence.
    public var remedy: Sentence {
        switch self {
        case .user: "Press Resume to continue."
        case .away: "Open the app to continue."
        case .memory: "Training continues when there is more."
        case .heat: "Training continues when it has cooled down."
        case .battery, .charger: "Connect the charger to continue."
        }
    }

    /// The reason and what ends it.
    public var advice: Sentence { "\(sentence). \(remedy)." }
}
