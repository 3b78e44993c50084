import MLX
import MeSPBundle

/// The cap on the gradient's norm, of the whole gradient (`maxGradNorm`) or of each example's (`dpClip`).
extension Updates {
    /// The factor of the gradient, min(1, limit / (‖g‖₂ + 10⁻⁶)), and ‖g‖₂ over all blocks.
    func computeClipping(to limit: Float, _ gradient: (_ block: Int) throws -> MLXArray) throws -> (
        factor: Float, norm: Float
    ) {
        let norm = try model.clock.repeating {
            let squares = try model.trained.reduce(Float(0)) { try $0 + gradient($1).square().sum().number(Float.self) }
            // Clipping would make zeros of the finite gradients, and spread what is not.
            if !squares.isFinite { for block in model.trained { try model.check(gradient(block), block) } }
            return squares.squareRoot()
        }
        return (min(1, limit / (norm + 1e-6)), norm)
    }
}
