import MLX
import MeSPAdapters

/// The short convolution mixer:  x_mid − x = out(c ∘ conv(b ∘ u)).
extension Block {
    func shortConvolution(
        _ mixerIn: MLXArray, _ sequences: [Range<Int>], _ states: inout [MixerState]
    ) -> MixerResult {
        let convolution = weights.shortConvolution
        let thirds = project(.in, mixerIn).split(parts: 3, axis: -1)
        let (b, c, u) = (thirds[0], thirds[1], thirds[2])
        let convOut = eachSequence(sequences, &states) { rows, state in
            guard case .shortConvolution(var tail, let count) = state else {
                preconditionFailure("another mixer's state")
            }
            let convOut = convolution(b: b[rows], u: u[rows], tail: &tail)
            state = .shortConvolution(tail: tail, count: count + rows.count)
            return convOut.asType(mixerIn.dtype)
        }
        return (
            .shortConvolution(b: b, c: c, u: u, convOut: convOut),
            linear(.out)(convolution.gated(convOut: convOut, c: c))
        )
    }

    func shortConvolutionBackward(
        _ intermediates: consuming Intermediates, dOut: MLXArray, _ gradients: inout LoRAGradients
    ) -> ProjectionGradients {
        let convolution = weights.shortConvolution
        let parts = partsBackward(convolution, consume intermediates, dOut: dOut, &gradients)
        return [.in: concatenated((0..<3).flatMap { i in parts.map { $0[i] } }, axis: -1)]
    }

    /// Returns the gradients of b, c and u, with an element for each range of features.
    private func partsBackward(
        _ convolution: CausalConvolution, _ intermediates: consuming Intermediates, dOut: MLXArray,
        _ gradients: inout LoRAGradients
    ) -> [[MLXArray]] {
        let (b, c, u, convOut) = intermediates.shortConvolution
        let dy = outputProjectionBackward(.out, convolution.gated(convOut: convOut, c: c), dy: dOut, &gradients)
        return schedule.rows(of: dy.T) { f in
            eachRecord(records(dy.dim(0))) { rows in
                let d = convolution.features(f).backward(
                    b: b[rows, f], c: c[rows, f], u: u[rows, f], convOut: convOut[rows, f], dy: dy[rows, f])
                return [d.db, d.dc, d.du]
            }
        }
    }
}
