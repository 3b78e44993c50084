import MLX
import MeSPAdapters
import MeSPBundle

/// The backward pass over some tokens, or some segments of a sequence, at a time.
extension Block {
    /// Returns the gradient of the trained LoRA parameters, and replaces dy by dx.
    ///
    /// - Parameters:
    ///   - intermediates: consumed, so that each array is freed after its last use
    ///   - wantsDx: whether to compute dx. If false, `d` is d_x_mid afterwards.
    ///   - dShared: the sum of the gradients of shared keys and values, `[kv_heads, T, head_dim]` each. A block that attends to another block's keys
    ///     and values adds to the sum. The block that computes these keys and values adds the sum to its own gradients.
    /// - Returns: the gradient of the trained LoRA parameters, flat and in float32; without numbers if none is wanted. This gradient and `d` are
    ///   evaluated.
    package func structuredBackward(
        x: MLXArray, _ intermediates: consuming Intermediates, d: inout MLXArray, wantsDx: Bool,
        dShared: inout MixerState.KeyValues?
    ) -> MLXArray {
        let shape = x.shape
        let x = x.reshaped([shape[1], shape[2]])
        var gradients = LoRAGradients()
        d = d.reshaped([shape[1], shape[2]]).asType(.float32)
        mlpBackward(intermediates, d: &d, &gradients)
        mixerBackward(x: x, consume intermediates, d: &d, wantsDx: wantsDx, &gradients, dShared: &dShared)
        d = d.reshaped(shape).asType(x.dtype)
        guard wanted != .none else {
            eval(d)
            return MLXArray.zeros([0])
        }
        dora?.turn(&gradients)
        let gradient = layout.packed(gradients)
        eval(d, gradient)
        return gradient
    }

    /// - Parameter d: dy `[T, hidden]`, replaced by d_x_mid
    private func mlpBackward(
        _ intermediates: borrowing Intermediates, d: inout MLXArray, _ gradients: inout LoRAGradients
    ) {
        let intermediates = copy intermediates
        schedule.replaceByTokens(&d) { rows, dy in
            var own = LoRAGradients()
            let dMid = from(rows.lowerBound).mlpBackward(intermediates, rows, dy: dy, &own)
            gradients.add(own)
            return schedule.phase(dMid, gradients).0
        }
    }

    /// A long sequence is processed in segments, from the last to the first.
    ///
    /// - Parameter d: d_x_mid `[T, hidden]`, replaced by dx if `wantsDx`
    private func mixerBackward(
        x: MLXArray, _ intermediates: consuming Intermediates, d: inout MLXArray, wantsDx: Bool,
        _ gradients: inout LoRAGradients, dShared: inout MixerState.KeyValues?
    ) {
        var carried = CarriedGradients()
        guard !intermediates.segments.isEmpty else {
            let dx = mixerBackward(
                x: x, consume intermediates, dMid: d, wantsDx: wantsDx, &carried, &gradients, dShared: &dShared)
            if let dx { d = dx }
            return
        }
        let mixerOut = intermediates.mixerOut
        var segments = intermediates.segments
        _ = consume intermediates
        while let segment = segments.popLast() {
            var own = LoRAGradients()
            let x = x[segment.rows]
            let dx = from(segment.rows.lowerBound).mixerBackward(
                x: x, recompute(segment, x, mixerOut: mixerOut?[segment.rows]), dMid: d[segment.rows],
                wantsDx: wantsDx, &carried, &own, dShared: &dShared)
            gradients.add(own)
            schedule.part(gradients)
            if let dx { replace(segment.rows, of: &d, by: dx) }
            Memory.clearCache()
        }
    }
}
