import MLX

extension BlockwiseModel {
    /// Computes a block's gradients from the block's input by automatic differentiation (MeBP).
    ///
    /// - Returns: the gradient of the trained LoRA parameters, flat and in float32. This gradient, `d` and `dShared` are evaluated.
    func automaticGradient(
        _ call: BlockCall, _ x: MLXArray, d: inout MLXArray, dShared: inout MixerState.KeyValues?
    ) throws -> MLXArray {
        let layout = layouts[call.index]
        let function = try self.function(call.index, x, \.plainFunctions)
        func plain(_ call: BlockCall) -> any BlockForward {
            var machine = Machine(bundle.processor)
            machine.isLazy = true
            return function.map { $0(call, layout, scale: scale) } ?? block(call, machine)
        }
        // Shared keys and values are outputs of the block that computes them, and inputs of the other blocks that attend to them.
        let (taken, sum) = (call.side.shared, call.side.shared == nil ? dShared : nil)
        let dtype = x.dtype
        func gradients(
            cotangents: [MLXArray], of outputs: @escaping (_ pass: any BlockForward, _ x: MLXArray) throws -> [MLXArray]
        ) throws -> [MLXArray] {
            var failure: (any Error)?
            let (_, gradients) = Device.withGlobal(bundle.mlxDevice) {
                vjp(
                    { primals in
                        do {
                            var call = call
                            call.lora = layout.replacing(in: call.lora, trained: primals[1])
                            if taken != nil { call.side.shared = .init(keys: primals[2], values: primals[3]) }
                            return try Processor.withPlainCPU { try outputs(plain(call), primals[0]) }
                        } catch {
                            failure = error
                            return cotangents  // arrays in the outputs' shapes; `failure` is thrown below
                        }
                    }, primals: [x, layout.trained(in: call.lora)] + (taken.map { [$0.keys, $0.values] } ?? []),
                    cotangents: cotangents)
            }
            if let failure { throw failure }
            return gradients
        }
        // The first evaluation compiles GPU kernels. Evaluating one output at a time allows pauses between compilations.
        if !isWarm, differentiated.insert(bundle.kinds[call.index]).inserted {
            let pass = plain(call)
            for index in try 1..<pass.outputs(x).list.count {
                let output = try Device.withGlobal(bundle.mlxDevice) { try pass.outputs(x).list[index] }
                eval(output)
                clock.pause()
                eval(try gradients(cotangents: [MLXArray.zeros(like: output)]) { [try $0.outputs($1).list[index]] })
                clock.pause()
            }
        }
        let all = try gradients(cotangents: [d] + (sum.map { [$0.keys, $0.values] } ?? [])) { pass, x in
            guard sum != nil else { return [try pass.output(x)] }
            let outputs = try pass.outputs(x)
            let own = call.weights.keysAndValues(outputs.intermediates)
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
