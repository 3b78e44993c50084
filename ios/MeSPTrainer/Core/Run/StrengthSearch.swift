import Foundation

/// Chooses the strength s of a run's adapters, an additional factor of their output, so that the model forgets little (`docs/method.md`,
/// "Forgetting").
///
/// - Parameters:
///   - limit: the maximum rise of the general text's perplexity, in percent.
///   - general: returns the loss on the general text with the adapters at a strength, in nats per token; at strength 0 this is the base model's loss.
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

/// Returns the highest strength whose loss on the general text is at most `most`, and that loss. Bisection finds the strength to within 2⁻⁴. Returns
/// nil if no strength that bisection tries is within the limit.
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
