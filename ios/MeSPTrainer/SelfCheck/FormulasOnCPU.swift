import MLX
import MeSPAdapters
import MeSPBundle
import MeSPCore

/// Computes a block and the head by the formulas, on the CPU in float32. The self-check compares the device's results with these results.
struct FormulasOnCPU {
    let bundle: ModelBundle
    let schedule: Schedule

    func outputs(_ index: Int, _ block: Block, _ x: MLXArray) throws -> BlockOutputs {
        try onCPU(index, block) { block in
            let outputs = block.outputs(x.asType(.float32))
            eval(outputs.list)
            return outputs
        }
    }

    /// Returns the gradient of a block's LoRA parameters, `[P]`, and changes d from dy to dx. Both are evaluated.
    ///
    /// - Parameter dShared: the gradients of shared keys and values, by the index of the block that computes them.
    func backward(
        _ index: Int, _ block: Block, _ x: MLXArray, _ intermediates: Intermediates,
        d: inout MLXArray, dShared: inout [Int: MixerState.KeyValues]
    ) throws -> MLXArray {
        let owner = bundle.architecture.keysOf(index) ?? index
        return try onCPU(index, block) { block in
            block.structuredBackward(
                x: x.asType(.float32), intermediates, d: &d, wantsDx: true, dShared: &dShared[owner])
        }
    }

    /// Returns the sum of the losses in nats, and its gradient `[1, T, hidden]` multiplied by `scale`.
    func lossAndGradient(_ y: MLXArray, _ example: Example, scale: Float) throws -> (loss: MLXArray, dy: MLXArray) {
        try withHead { head in
            let (loss, dy) = head.lossAndGradient(
                y.asType(.float32), targets: Array(example.targets), counted: example.counted, scale: scale,
                atBoundary: {})
            eval(loss, dy)
            return (loss, dy)
        }
    }

    /// Returns the mean loss of all targets, summed in float64.
    func loss(_ y: MLXArray, _ example: Example) throws -> Double {
        try withHead { head in
            let losses = head.scores(
                y.squeezed(axis: 0).asType(.float32), targets: Array(example.targets), atBoundary: {}
            ).losses
            return try losses.numbers(Float.self).reduce(0) { $0 + Double($1) } / Double(example.counted.count)
        }
    }

    private func withHead<R>(_ body: (CrossEntropyHead) throws -> R) throws -> R {
        try Device.withDefaultDevice(.cpu) {
            try bundle.withHead { packed in
                try body(
                    CrossEntropyHead(
                        weights: packed.onCPU, architecture: bundle.architecture, schedule: schedule))
            }
        }
    }

    private func onCPU<R>(_ index: Int, _ block: Block, _ body: (Block) throws -> R) throws -> R {
        try Device.withDefaultDevice(.cpu) {
            try bundle.withBlock(index) { weights in
                var onCPU = block
                (onCPU.weights, onCPU.schedule) = (weights.onCPU, schedule)
                return try body(onCPU)
            }
        }
    }
}
