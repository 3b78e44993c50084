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
    /// - Returns: the gradient of the trained LoRA parameters, flat and in float32. It and d are evaluated.
    func callAsFunction(_ block: Int, _ x: MLXArray, _ lora: MLXArray, _ weights: BlockWeights, d: inout MLXArray)
        throws
        -> MLXArray
    {
        let layout = model.layouts[block]
        let functions =
            try functions[x.dim(1)]
            ?? model.bundle.functions(\.plainFunctions, length: x.dim(1)).map { BlockFunction($0, isFused: false) }
        self.functions[x.dim(1)] = functions
        let defaultDevice = DefaultDevice.self as any GlobalDevice.Type
        let before = defaultDevice.current
        defaultDevice.set(model.bundle.device)
        // `compile` asks for it too: on iOS nothing is fused while it is the CPU.
        defer { defaultDevice.set(before) }
        var failure: (any Error)?
        let (_, gradients) = vjp(
            { [model] primals in
                do {
                    let lora = layout.whole(layout.replacing(in: lora, trained: primals[1]))
                    let function = functions[block](lora: lora, scale: model.scale, weights: weights)
                    return [try function.output(primals[0])]
                } catch {
                    failure = error
                    return [primals[0]]  // of y's shape
                }
            }, primals: [x, layout.trained(in: lora)], cotangents: [d])
        if let failure { throw failure }
        eval(gradients)
        d = gradients[0]
        return gradients[1]
    }
}

/// C++ has a default device of its own, the GPU, which Swift's does not change. `vjp` runs two operations on it: the copies of its inputs
/// (transforms.cpp:337), and the subtraction in softmax's derivative (primitives.cpp:5049). Only deprecated functions read and set it, so
/// they are called through a protocol.
private protocol GlobalDevice {
    static var current: Device { get }
    static func set(_ device: Device)
}

private enum DefaultDevice: GlobalDevice {
    @available(*, deprecated) static var current: Device { Device() }
    @available(*, deprecated) static func set(_ device: Device) { Device.setDefault(device: device) }
}
