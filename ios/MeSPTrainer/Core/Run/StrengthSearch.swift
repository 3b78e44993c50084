import Foundation

/// Chooses the strength s of a run's adapters, W + s · α / r · A B, so that a text that they were not trained on stays about as likely as before
/// (`docs/method.md`, "Forgetting"). The choice is the highest strength within the limit. As adapters may have been trained too far, the strength is
/// then lowered for as long as held-out loss falls.
///
/// At the end of training, held-out loss is nearly flat in s, while the loss on other text rises roughly with s². So a smaller s loses little of the
/// task and most of the forgetting.
///
/// - Parameters:
///   - step: the step of the record.
///   - limit: the most that the perplexity of the general text may rise, in percent.
///   - before: the held-out loss at the beginning of the run. If no strength has a lower loss, the strength is 0.
///   - general: returns the loss on the general text with the adapters at a strength, in nats per token; at strength 0 this is the base model's loss.
///   - heldOut: returns the held-out loss with the adapters at a strength, in nats per token.
func chosenStrength(
    step: Int, limit: Double, before: Float, general: (_ strength: Float) throws -> Float,
    heldOut: (_ strength: Float) throws -> Float
) throws -> LogRecord.Strength {
    let base = try general(0)
    func record(_ strength: Float, heldOut: Float, general: Float) -> LogRecord.Strength {
        .init(
            step: step, strength: strength, lossBefore: before, lossAfter: heldOut, generalBefore: base,
            generalAfter: general)
    }
    let none = record(0, heldOut: before, general: base)
    guard let (strength, after) = try highest(below: base + Float(log1p(limit / 100)), general) else { return none }
    var best = record(strength, heldOut: try heldOut(strength), general: after)
    while true {
        let lower = best.strength * 0.75
        let loss = try heldOut(lower)
        guard loss < best.lossAfter else { break }
        best = record(lower, heldOut: loss, general: try general(lower))
    }
    return best.lossAfter < before ? best : none
}

/// Returns the highest strength whose loss on the general text is at most `most`, and that loss. Bisection finds the strength to within 2⁻⁴. The
/// result is nil if no strength that bisection tries suffices.
private func highest(
    below most: Float, _ general: (_ strength: Float) throws -> Float
) throws -> (strength: Float, loss: Float)? {
    let whole = try general(1)
    if whole <= most { return (1, whole) }
    var (low, high) = (0 as Float, 1 as Float)
    var found: (Float, Float)?
    for _ in 0..<4 {
        let middle = (low + high) / 2
        let loss = try general(middle)
        if loss <= most { (low, found) = (middle, (middle, loss)) } else { high = middle }
    }
    return found
}
