import MLX

extension BlockwiseModel {
    /// Computes a block's gradients from the block's input by automatic differentiation (MeBP).
    ///
    /// - Returns: the gradient of the trained LoRA parameters, flat and in float32. This gradient, `d` and `dShared` are evaluated.
    func automaticGradient(
        _ index: Int, _ block: Block, _ x: MLXArray, d: inout MLXArray, dShared: inout MixerState.KeyValues?
    ) throws -> MLXArray {
        let (layout, lora) = (block.layout, block.lora)
        let function = try self.function(index, x, \.plainFunctions)
        var lazy = block
        lazy.schedule = Schedule(bundle.processor)
        lazy.schedule.isLazy = true
        func plain(_ block: Block) -> any BlockForward { function.map { $0(block) } ?? block }
        // Shared keys and values are outputs of the block that computes them, and inputs of the other blocks that attend to them.
        let (taken, sum) = (block.shared, block.shared == nil ? dShared : nil)
        let dtype = x.dtype
        func gradients(
            cotangents: [MLXArray], of outputs: @escaping (_ pass: any BlockForward, _ x: MLXArray) throws -> [MLXArray]
        ) throws -> [MLXArray] {
            var failure: (any Error)?
            let (_, gradients) = Device.withGlobal(bundle.mlxDevice) {
                vjp(
                    { primals in
                        do {
                            var block = lazy
                            block.lora = layout.replacing(in: lora, trained: primals[1])
                            if taken != nil { block.shared = .init(keys: primals[2], values: primals[3]) }
                            return try Processor.withPlainCPU { try outputs(plain(block), primals[0]) }
                        } catch {
                            failure = error
                            return cotangents  // arrays in the outputs' shapes; `failure` is thrown below
                        }
                    }, primals: [x, layout.trained(in: lora)] + (taken.map { [$0.keys, $0.values] } ?? []),
                    cotangents: cotangents)
            }
            if let failure { throw failure }
            return gradients
        }
        // The first evaluation compiles GPU kernels. Evaluating one output at a time allows pauses between compilations.
        if !work.isWarm, differentiated.insert(bundle.kinds[index]).inserted {
            let pass = plain(lazy)
            for index in try 1..<pass.outputs(x).list.count {
                let output = try Device.withGlobal(bundle.mlxDevice) { try pass.outputs(x).list[index] }
                eval(output)
                work.pause()
                eval(try gradients(cotangents: [MLXArray.zeros(like: output)]) { [try $0.outputs($1).list[index]] })
                work.pause()
            }
        }
        let all = try gradients(cotangents: [d] + (sum.map { [$0.keys, $0.values] } ?? [])) { pass, x in
            guard sum != nil else { return [try pass.output(x)] }
            let outputs = try pass.outputs(x)
            let own = block.weights.keysAndValues(outputs.intermediates)
            return [outputs.y, own.keys, own.values]
        }
        if all.count > 2 {
            let own = all[2...].map { $0.asType(.float32) }
            dShared = .init(
                keys: dShared.map { $0.keys + own[0] } ?? own[0], values: dShared.map { $0.values + own[1] } ?? own[1])
        } else {
            dShared = nil
        }
        eval(all + (dShared.map { [$0.keys, $0.values] } ?? []))
        d = all[0].asType(dtype)
        return all[1]
    }
}
