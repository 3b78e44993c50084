import MLX

/// MeBP: automatic differentiation of a block in plain operations, from its input.
final class AutomaticBackward {
    let model: BlockwiseModel
    /// For each block the function of its kind in plain operations, by the number of tokens.
    private var functions = [Int: [BlockFunction]]()

    init(_ model: BlockwiseModel) { self.model = model }

    /// - Parameters:
    ///   - x: the block's input `[1, T, hidden]`
    ///   - d: dy `[1, T, hidden]`, replaced by dx
    /// - Returns: the flat gradient of the LoRA parameters `[P]` in float32. It and d are evaluated.
    func callAsFunction(_ block: Int, _ x: MLXArray, d: inout MLXArray) throws -> MLXArray {
        let (model, lora) = (model, try model.parameters(block))
        let functions =
            try functions[x.dim(1)]
            ?? model.bundle.functions(\.plainFunctions, length: x.dim(1)).map { BlockFunction($0, isFused: false) }
        self.functions[x.dim(1)] = functions
        return try model.bundle.withBlock(block) { weights in
            (BundleDevice.self as any DefaultDevice.Type).set(model.bundle.device)
            var failure: (any Error)?
            let (_, gradients) = vjp(
                { primals in
                    do {
                        return try functions[block](.y, model.arguments(primals[0], primals[1], weights))
                    } catch {
                        failure = error
                        return [primals[0]]  // of y's shape
                    }
                }, primals: [x, lora], cotangents: [d])
            if let failure { throw failure }
            eval(gradients)
            d = gradients[0]
            return gradients[1]
        }
    }
}

/// C++'s default device, which is the GPU whatever Swift's is: `vjp` copies what it differentiates by there (transforms.cpp:337), and the
/// derivative of softmax subtracts there (primitives.cpp:5049). Only a deprecated function sets it, so it is called through a protocol.
private protocol DefaultDevice {
    static func set(_ device: Device)
}

private enum BundleDevice: DefaultDevice {
    @available(*, deprecated) static func set(_ device: Device) { Device.setDefault(device: device) }
}
