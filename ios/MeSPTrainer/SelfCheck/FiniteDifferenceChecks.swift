import Foundation
import MLX
import MeSPAdapters
import MeSPBundle
import MeSPCore

/// Compares gradients with finite differences of the loss. This is independent of the formulas for derivatives.
extension CheckSuite {
    /// The tolerance of the relative error. Rounding the losses to float32 causes errors of up to 10⁻⁴.
    private static let differenceTolerance = 5e-4

    /// The number of targets. The rounding errors of their losses average out.
    private static let differenceTokens = 64

    /// Compares the slope of the loss along a gradient with the norm of the gradient, for each module's A and B in the last blocks. The slope comes
    /// from four values of the loss:
    ///
    ///     f′ ≈ (8 (f(h) − f(−h)) − (f(2h) − f(−2h))) / 12h
    ///
    /// - Parameter derivatives: the bundle whose backward pass is checked. It has the same weights. nil for the bundle of the self-check.
    func compareGradientsWithDifferences(of derivatives: ModelBundle? = nil) throws -> Finding {
        guard !architecture.hasExperts else {
            throw Skipped(reason: "The model mixes experts, and the loss jumps where a token chooses others.")
        }
        let trainer = try makeTrainer(fewBlocks(.mesp))
        let (model, blocks) = (trainer.model, trainer.model.lora.trained)
        let forward = cpu(length: Self.differenceTokens)
        let backward = cpu(of: derivatives, length: Self.differenceTokens)
        let example = example(Self.differenceTokens)

        var inputs = [Int: MLXArray]()
        // The input is float32. A bfloat16 input would round the side inputs, and the loss would change in steps.
        var x = try model.embed(example).asType(.float32)
        let context = try model.makeContext(example, x0: x)
        try addKeysAndValues(before: blocks[0], x, model, context)
        /// Returns the outputs of a block with the parameters `lora`. `lora` also determines the keys and values that the block shares with later
        /// blocks.
        func outputs(_ block: Int, _ x: MLXArray, _ lora: MLXArray) throws -> BlockOutputs {
            try forward.outputs(block, makeBlock(block, x, lora, model, context), x)
        }
        for block in blocks {
            try atBlock()
            inputs[block] = x
            x = try outputs(block, x, model.lora.parameters(block)).y
        }
        var (_, d) = try forward.lossAndGradient(x, example, scale: 1 / Float(Self.differenceTokens))

        let end = ContinuousClock.now + .seconds(20 * settings.seconds)
        var errors = [String: Double]()
        var dShared = [Int: MixerState.KeyValues]()
        for block in blocks.reversed() where errors.isEmpty || ContinuousClock.now < end {
            guard let x = inputs[block] else { continue }
            let lora = try model.lora.parameters(block)
            let intermediates = try outputs(block, x, lora).intermediates
            let gradient = tamper(
                "gradients.differences",
                try backward.backward(
                    block, makeBlock(block, x, lora, model, context), x, intermediates, d: &d, dShared: &dShared))
            func loss(_ changed: MLXArray) throws -> Double {
                var y = try outputs(block, x, changed).y
                for later in block + 1..<model.blocks.upperBound {
                    y = try outputs(later, y, model.lora.parameters(later)).y
                }
                return try forward.loss(y, example)
            }
            for part in model.lora.layouts[block].parts where errors.isEmpty || ContinuousClock.now < end {
                try atBlock()
                let error = try differenceError(gradient * part.mask, lora, size: try norm(lora * part.mask), loss)
                errors[part.name] = error.isFinite ? max(errors[part.name] ?? 0, error) : .nan
            }
        }
        return compare(
            "The gradients of \(fewBlocks) blocks", with: "the slopes of the loss",
            errors.map { Measurement($0, $1) }.sorted { $0.name < $1.name }, tolerance: Self.differenceTolerance)
    }

    /// Returns the relative difference between the norm of a gradient and the slope of the loss along the gradient.
    ///
    /// - Parameter size: the maximum of h. The parameters are moved by up to 2h.
    private func differenceError(
        _ gradient: MLXArray, _ lora: MLXArray, size: Float, _ loss: (MLXArray) throws -> Double
    ) throws -> Double {
        let slope = try norm(gradient)
        let h = min(Self.differenceInLoss / slope, size)
        func f(_ steps: Float) throws -> Double {
            let moved = lora + (steps * h / slope) * gradient
            eval(moved)
            return try loss(moved)
        }
        let difference = try (8 * (f(1) - f(-1)) - (f(2) - f(-2))) / (12 * Double(h))
        return abs(difference - Double(slope)) / Double(slope)
    }

    private func norm(_ x: MLXArray) throws -> Float { try x.square().sum().sqrt().number(Float.self) }

    /// The intended change of the loss at the distance h, in nats.
    private static let differenceInLoss: Float = 0.005
}

extension LoRALayout {
    fileprivate var parts: [(name: String, mask: MLXArray)] {
        modules.flatMap { module in
            [("A", Float(1)), ("B", Float(0))].map { name, a in
                let matrices = modules.map { other in
                    let (inputs, outputs) = block.dimensions(other)
                    let isIt: Float = other == module ? 1 : 0
                    return LoRAMatrices(
                        a: MLXArray.full([inputs, rank], values: MLXArray(isIt * a)),
                        b: MLXArray.full([rank, outputs], values: MLXArray(isIt * (1 - a))))
                }
                return ("\(module.name).\(name)", packed(matrices))
            }
        }
    }
}
