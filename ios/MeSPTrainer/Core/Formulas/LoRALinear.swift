import MLX
import MeSPAdapters

/// A projection with its adapter, if it has one:  y = x Wᵀ + s (x A) B + b,  with the factor s of `BlockwiseModel.scale`.
struct LoRALinear {
    let weight: QuantizedMatrix
    let bias: MLXArray?
    let lora: LoRAMatrices?
    let scale: Float

    /// x `[T, in]` to y `[T, out]`, in float32.
    ///
    /// - Parameter machine: that takes some rows of W at a time; nil for all of them.
    func callAsFunction(_ x: MLXArray, machine: Machine? = nil) -> MLXArray {
        if let machine, machine.projectionRows < weight.rows {
            return concatenated(
                machine.each(of: weight.rows, size: machine.projectionRows) { outputs($0)(x) }, axis: -1)
        }
        var y = weight.apply(x, as: .float32)
        if let lora { y = addMM(y, matmul(x.asType(.float32), lora.a) * scale, lora.b) }
        return bias.map { y + $0 } ?? y
    }

    /// The projection to some of the outputs.
    func outputs(_ range: Range<Int>) -> LoRALinear {
        guard range.count < weight.rows else { return self }
        return LoRALinear(
            weight: weight.rows(range), bias: bias?[range],
            lora: lora.map { LoRAMatrices(a: $0.a, b: $0.b[0..., range]) }, scale: scale)
    }

    /// The projection from some of the inputs, whose bounds are multiples of the group size, without its bias. Over all inputs,
    /// what these give adds up to what the whole projection gives but for the bias.
    func inputs(_ range: Range<Int>) -> LoRALinear {
        LoRALinear(
            weight: weight.columns(range), bias: nil, lora: lora.map { LoRAMatrices(a: $0.a[range], b: $0.b) },
            scale: scale)
    }
}

extension LoRALinear {
    /// The derivative of a projection but for its bias. `h = x A` of its adapter is recomputed, never stored:
    ///
    ///     dx = dy W + s (dy Bᵀ) Aᵀ        dA = s xᵀ (dy Bᵀ)        dB = s (x A)ᵀ dy
    ///
    /// W is taken some rows at a time, so that no more of it is dequantized at once.
    /// - Parameters:
    ///   - wantsA: whether dA is wanted
    ///   - wantsDx: whether dx is wanted
    /// - Returns: dx `[T, in]`, added to the sum where there is one, and the gradients of A and B.
    func backward(
        _ x: MLXArray, dy: MLXArray, machine: Machine, wantsA: Bool, wantsDx: Bool, addedTo sum: MLXArray?
    ) -> (dx: MLXArray?, dA: MLXArray?, dB: MLXArray?) {
        let dyBT = lora.map { matmul(dy, $0.b.T) * scale }
        let dA = wantsA ? product(x.T, dyBT) : nil
        let dB = lora.map { matmul((matmul(x, $0.a) * scale).T, dy) }
        guard wantsDx else { return machine.part(nil, dA, dB) }
        var dx = product(dyBT, lora?.a.T, addedTo: sum)
        if let first = dx, lora != nil { dx = machine.inputs([first], after: [first, dA, dB].arrays)[0] }
        for rows in tiles(of: weight.rows, size: machine.projectionRows) {
            dx = machine.part(weight.rows(rows).applyTransposed(dy[0..., rows], addedTo: dx))
        }
        return (dx, dA, dB)
    }
}

/// sum + a b, or what there is of it: the sum where a or b is nil.
func product(_ a: MLXArray?, _ b: MLXArray?, addedTo sum: MLXArray? = nil) -> MLXArray? {
    guard let a, let b else { return sum }
    return sum.map { addMM($0, a, b) } ?? matmul(a, b)
}
