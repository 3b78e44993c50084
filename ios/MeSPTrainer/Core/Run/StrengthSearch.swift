import Foundation

/// Chooses the strength s of a run's adapters, W + s · α / r · A B, so that a text they were not trained on stays about as likely as
/// before (`docs/method.md`, "Forgetting").
///
/// Training ends where held-out loss is flat in s, and the loss on other text rises about with s²: a smaller s loses little of the task and
/// most of the forgetting.
struct StrengthSearch {
    /// The most that the perplexity of the general text may rise, in percent.
    let limit: Double
    /// The loss on the general text with the adapters at a strength, nats a token; at 0 the base model's.
    let general: (_ strength: Float) throws -> Float
    /// The held-out loss with the adapters at a strength, nats a token.
    let heldOut: (_ strength: Float) throws -> Float

    struct Result: Equatable {
        /// 1 for the adapters as they were trained, 0 where none are kept.
        var strength: Float
        var heldOut: Float
        /// The loss on the general text of the base model, and with the adapters at this strength.
        var generalBefore: Float
        var generalAfter: Float
    }

    /// Bisection ends when the strength is known to 2⁻⁴.
    private static let bisections = 4
    /// The factor between strengths that are tried below the highest that keeps to the limit.
    private static let step: Float = 0.75

    /// The highest strength that keeps to the limit, or as adapters may have been trained too far a lower one, for as long as held-out loss
    /// falls.
    ///
    /// - Parameter before: the held-out loss that the run began with. Where no strength has a lower one, none is kept.
    func result(before: Float) throws -> Result {
        let base = try general(0)
        let none = Result(strength: 0, heldOut: before, generalBefore: base, generalAfter: base)
        guard let (strength, after) = try highest(below: base + Float(log1p(limit / 100))) else { return none }
        var best = Result(strength: strength, heldOut: try heldOut(strength), generalBefore: base, generalAfter: after)
        while true {
            let lower = best.strength * Self.step
            let loss = try heldOut(lower)
            guard loss < best.heldOut else { break }
            best = Result(strength: lower, heldOut: loss, generalBefore: base, generalAfter: try general(lower))
        }
        return best.heldOut < before ? best : none
    }

    /// The highest strength whose loss on the general text is at most `most`, and that loss; nil where none above 2⁻⁴ is.
    private func highest(below most: Float) throws -> (strength: Float, loss: Float)? {
        let whole = try general(1)
        if whole <= most { return (1, whole) }
        var (low, high) = (0 as Float, 1 as Float)
        var found: (Float, Float)?
        for _ in 0..<Self.bisections {
            let middle = (low + high) / 2
            let loss = try general(middle)
            if loss <= most { (low, found) = (middle, (middle, loss)) } else { high = middle }
        }
        return found
    }
}
