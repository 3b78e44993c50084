import MLX

extension BlockwiseModel {
    /// MeBP: automatic differentiation of a block in plain operations, from its input.
    ///
    /// - Parameters:
    ///   - x: the block's input `[1, T, hidden]`
    ///   - beside: what the block takes besides x
    ///   - d: dy `[1, T, hidden]`, replaced by dx
    ///   - shared: as that of `Block.gradient`
    /// - Returns: the gradient of the trained LoRA parameters, flat and in float32. It and d are evaluated.
    func automaticGradient(
        _ block: Int, _ x: MLXArray, _ lora: MLXArray, _ weights: BlockWeights, _ beside: Beside, d: inout MLXArray,
        shared: inout MixerState.KeyValues?
    ) throws -> MLXArray {
        let layout = layouts[block]
        guard let function = try function(block, x, \.plainFunctions) else {
            preconditionFailure("block \(block) has no function")
        }
        var failure: (any Error)?
        // Keys and values are inputs of a block that takes another's, and outputs of one whose others took.
        let (taken, sum) = (beside.shared, beside.shared == nil ? shared : nil)
        let dtype = x.dtype
        let (_, gradients) = Device.withGlobal(bundle.device) {
            vjp(
                { primals in
                    do {
                        let lora = layout.whole(layout.replacing(in: lora, trained: primals[1]))
                        var beside = beside
                        if taken != nil { beside.shared = .init(keys: primals[2], values: primals[3]) }
                        let pass = function(lora: lora, scale: self.scale, weights: weights, beside: beside)
                        guard sum != nil else { return [try pass.output(primals[0])] }
                        let outputs = try pass.outputs(primals[0])
                        let lent = weights.keysAndValues(outputs.intermediates)
                        return [outputs.y, lent.keys, lent.values]
                    } catch {
                        failure = error
                        return [primals[0]] + (sum.map { [$0.keys, $0.values] } ?? [])  // of the outputs' shapes
                    }
                }, primals: [x, layout.trained(in: lora)] + (taken.map { [$0.keys, $0.values] } ?? []),
                cotangents: [d] + (sum.map { [$0.keys, $0.values] } ?? []))
        }
        if let failure { throw failure }
        if gradients.count > 2 {
            let own = gradients[2...].map { $0.asType(.float32) }
            shared = .init(
                keys: shared.map { $0.keys + own[0] } ?? own[0], values: shared.map { $0.values + own[1] } ?? own[1])
        } else {
            shared = nil
        }
        eval(gradients + (shared.map { [$0.keys, $0.values] } ?? []))
        d = gradients[0].asType(dtype)
        return gradients[1]
    }
}
