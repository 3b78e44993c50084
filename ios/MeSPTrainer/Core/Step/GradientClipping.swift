import MLX
import MeSPBundle

/// Gradient clipping (`maxGradNorm`), and the clipping of each example's gradient (`dpClip`).
extension Updates {
    /// Returns the factor of the gradient, min(1, limit / (‖g‖₂ + 10⁻⁶)), and ‖g‖₂ over all blocks.
    func computeClipping(to limit: Float, _ gradient: (_ block: Int) throws -> MLXArray) throws -> (
        factor: Float, norm: Float
    ) {
        let norm = try model.work.repeating {
            let squares = try model.drawn.reduce(Float(0)) { try $0 + gradient($1).square().sum().number(Float.self) }
            // An infinite norm would scale finite gradients to zeros.
            if !squares.isFinite {
                for block in model.drawn where try !isFinite(gradient(block)) {
                    throw try model.notFinite(gradient: gradient(block), block)
                }
                throw NotFinite(what: "The norm of the gradient")
            }
            return squares.squareRoot()
        }
        return (min(1, limit / (norm + 1e-6)), norm)
    }
}
