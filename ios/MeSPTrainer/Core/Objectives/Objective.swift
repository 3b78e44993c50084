/// The loss of a run on preference data, in place of the mean loss of the counted targets.
public enum Objective: String, Codable, Sendable, CaseIterable {
    /// Losses of a chosen and a rejected answer to a prompt: direct preference optimization,
    /// identity preference optimization, simple preference optimization, and odds ratio preference optimization.
    case dpo, ipo, simpo, orpo
    /// The loss of answers that are good or bad, by themselves: Kahneman-Tversky optimization.
    case kto

    /// Whether the data must be pairs of answers.
    var takesPairs: Bool { self != .kto }

    /// Whether answers are compared with π₀, the model as it was when the run began.
    var hasReference: Bool { self == .dpo || self == .ipo || self == .kto }
}
