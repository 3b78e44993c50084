import Foundation
import MLX
import MeSPAdapters
import MeSPBundle
import MeSPCore
import MeSPFiles
import MeSPSentences

extension CheckSuite {
    /// The tolerance of ‖a − b‖₂ / ‖b‖₂. In float32 it allows for another order of sums, and in bfloat16 for rounded activations.
    var tolerance: Double { bundle.dtype == .float32 ? 1e-4 : 0.05 }

    /// The number of last blocks that a check trains. It is small, so that the check also suits large models.
    var fewBlocks: Int { min(4, architecture.numHiddenLayers) }

    func fewBlocks(_ method: GradientMethod) -> RunSettings {
        var run = run(shortest)
        (run.method, run.numLayers) = (method, fewBlocks)
        return run
    }

    func cpu(of other: ModelBundle? = nil, length: Int? = nil) -> FormulasOnCPU {
        let length = length ?? shortest
        return FormulasOnCPU(
            bundle: other ?? bundle,
            // The whole sequence is one segment, because a block function returns all intermediates at once.
            schedule: Schedule.$segmentTokens.withValue(length) {
                Schedule(
                    architecture, group: bundle.featureGroup, length: length, bytes: 1 << 20, processor: .cpu)
            })
    }

    /// Returns a finding that passes if all errors are within the tolerance. NaN fails.
    func compare(
        _ what: Sentence, with other: Sentence, _ errors: [Measurement], tolerance: Double? = nil
    ) -> Finding {
        let tolerance = tolerance ?? self.tolerance
        let worst = errors.max { $0.value ?? .infinity < $1.value ?? .infinity }
        let isGood = errors.allSatisfy { $0.value ?? .infinity <= tolerance }
        func shown(_ error: Measurement) -> Sentence {
            error.value.map { "\(String(format: "%.1e", $0)) in \(error.name)" } ?? "not finite in \(error.name)"
        }
        let largest = worst.map(shown) ?? "none"
        let allowed = String(format: "%.0e", tolerance)
        return Finding(
            isGood ? .pass : .fail,
            isGood
                ? "\(what) are \(other): the largest relative error is \(largest), \(allowed) is allowed."
                : "\(what) are not \(other): the largest relative error is \(largest), \(allowed) is allowed.",
            errors)
    }

    func error(_ a: MLXArray, _ b: MLXArray) throws -> Double {
        let (a, b) = (a.asType(.float32), b.asType(.float32))
        return Double(try ((a - b).square().sum().sqrt() / b.square().sum().sqrt()).number(Float.self))
    }

    func worst(_ errors: [Double]) -> Double { errors.contains { !$0.isFinite } ? .nan : errors.max() ?? .nan }

    /// Returns the errors of the gradients of each module's A and B. Each is the largest error over the blocks.
    func errors(_ layouts: [LoRALayout], _ gradients: [Int: MLXArray], _ expected: [Int: MLXArray]) throws
        -> [Measurement]
    {
        try architecture.modules.flatMap { module -> [Measurement] in
            var (a, b) = ([Double](), [Double]())
            for (block, gradient) in gradients where layouts[block].modules.contains(module) {
                guard let right = expected[block] else { continue }
                let layout = layouts[block]
                let (ours, theirs) = (layout.matrices(module, in: gradient), layout.matrices(module, in: right))
                a.append(try error(ours.a, theirs.a))
                b.append(try error(ours.b, theirs.b))
            }
            return a.isEmpty
                ? [] : [Measurement("\(module.name).A", worst(a)), Measurement("\(module.name).B", worst(b))]
        }
    }

    private func gradients(_ trainer: Trainer) throws -> (loss: Float, gradients: [Int: MLXArray]) {
        let example = example(trainer.model.settings.seqLen)
        let weight = 1 / Float(example.counted.count)
        var gradients = [Int: MLXArray]()
        let loss = try trainer.backpropagate([(example: example, weight: weight)]) { gradients[$0] = $1 }
        return (loss, gradients)
    }

    // MARK: - Comparisons with other computations of the same numbers

    func checkBlockOutputs() throws -> Finding {
        let blocks = bundle.manifest.blocks.filter(\.hasFunctions).map { $0.layers[0] }
        let trainer = try makeTrainer(run(shortest))
        let model = trainer.model
        let x = try model.embed(example(shortest))
        func errors(_ block: Int, _ records: [Range<Int>]?, _ function: BlockFunction) throws -> [Measurement] {
            let lora = try model.lora.parameters(block)
            let whole = example(shortest)
            let example = Example(tokens: whole.tokens, counted: whole.counted, records: records)
            // Each block gets the embedding as its input. So the shared keys and values are also computed from the embedding.
            let context = try model.makeContext(example, x0: x)
            try addKeysAndValues(before: block, x, model, context)
            let formulas = try makeBlock(block, x, lora, model, context)
            let outputs = try bundle.withBlock(block) { weights in
                var mapped = formulas
                (mapped.weights, mapped.schedule) = (weights, Schedule(bundle.processor))
                let outputs = try function(mapped).outputs(x).list
                eval(outputs)
                return outputs
            }
            let expected = try cpu().outputs(block, formulas, x).list
            let names = BlockOutputs.names(of: architecture.block(block).mixer)
            return try zip(names, zip(outputs, expected)).map { name, pair in
                let name = "\(block).\(name)" + (records == nil ? "" : ".packed")
                return Measurement(name, try error(tamper("block.outputs", pair.0), pair.1))
            }
        }
        let packed = [0..<shortest / 3, shortest / 3..<shortest].filter { !$0.isEmpty }
        let found = try blocks.flatMap { block in
            try [nil, packed].flatMap { records in
                try function(block, x, model, records).map { try errors(block, records, $0) } ?? []
            }
        }
        guard !found.isEmpty else { throw Skipped(reason: "A run calls no functions of this bundle.") }
        return compare(
            "The outputs of the block function", with: "those of the formulas on the CPU", found)
    }

    private func function(
        _ block: Int, _ x: MLXArray, _ model: BlockwiseModel, _ records: [Range<Int>]?
    ) throws -> BlockFunction? {
        guard bundle.backend == .gpu else {
            return records == nil ? try model.function(block, x, \.plainFunctions) : nil
        }
        return try model.function(block, x, records == nil ? \.functions : \.packed)
    }

    func compareGradientsWithCPU() throws -> Finding {
        guard !architecture.hasExperts || bundle.backend == .cpu else {
            // Rounding on a GPU may change the choice of experts, and so the loss and the gradients.
            throw Skipped(reason: "The model mixes experts, and the loss jumps where a token chooses others.")
        }
        let trainer = try makeTrainer(fewBlocks(.mesp))
        let (loss, ours) = try gradients(trainer)
        let (sum, expected) = try gradientsOnCPU(trainer, inputOfTrained(trainer))
        let found = try errors(trainer.model.lora.layouts, ours.mapValues { tamper("gradients.cpu", $0) }, expected)
        return try compare(
            "The gradients of \(fewBlocks) blocks", with: "those of the formulas on the CPU",
            [Measurement("loss", error(MLXArray(loss), sum))] + found)
    }

    /// Makes a block with all its inputs besides x; its weights are no longer mapped. The context must have the shared keys and values of earlier
    /// blocks. If this block shares its keys and values with later blocks, they are added to the context.
    func makeBlock(
        _ block: Int, _ x: MLXArray, _ lora: MLXArray, _ model: BlockwiseModel,
        _ context: BlockwiseModel.SequenceContext
    ) throws -> Block {
        try bundle.withBlock(block) { try model.makeForwardBlock(block, $0, lora, context, x) }
    }

    private func output(
        _ block: Int, _ x: MLXArray, _ model: BlockwiseModel, _ context: BlockwiseModel.SequenceContext
    ) throws -> MLXArray {
        try bundle.withBlock(block) {
            try model.forward(block, $0, context, x).y
        }
    }

    func addKeysAndValues(
        before block: Int, _ x: MLXArray, _ model: BlockwiseModel, _ context: BlockwiseModel.SequenceContext
    ) throws {
        for owner in architecture.owners where owner < block {
            _ = try makeBlock(owner, x, model.lora.parameters(owner), model, context)
        }
    }

    func inputOfTrained(_ trainer: Trainer) throws -> (x: MLXArray, context: BlockwiseModel.SequenceContext) {
        let model = trainer.model
        var x = try model.embed(example(shortest))
        let context = try model.makeContext(example(shortest), x0: x)
        for block in 0..<trainer.model.lora.trained[0] {
            x = try output(block, x, model, context)
        }
        return (x, context)
    }

    func gradientsOnCPU(
        _ trainer: Trainer, _ input: (x: MLXArray, context: BlockwiseModel.SequenceContext)
    ) throws -> (loss: MLXArray, gradients: [Int: MLXArray]) {
        let (model, cpu, example) = (trainer.model, cpu(), example(shortest))
        var x = input.x
        var inputs = [Int: (x: MLXArray, block: Block)]()
        for block in trainer.model.lora.trained {
            try atBlock()
            let formulas = try makeBlock(block, x, model.lora.parameters(block), model, input.context)
            inputs[block] = (x, formulas)
            x = try cpu.outputs(block, formulas, x).y
        }
        let weight = 1 / Float(example.counted.count)
        var (sum, d) = try cpu.lossAndGradient(x, example, scale: weight)
        var gradients = [Int: MLXArray]()
        var dShared = [Int: MixerState.KeyValues]()
        for block in trainer.model.lora.trained.reversed() {
            try atBlock()
            guard let (x, formulas) = inputs.removeValue(forKey: block) else { continue }
            gradients[block] = try cpu.backward(
                block, formulas, x, cpu.outputs(block, formulas, x).intermediates, d: &d, dShared: &dShared)
        }
        return (sum * weight, gradients)
    }

    func compareGradientsWithMeBP() throws -> Finding {
        let trainer = try makeTrainer(fewBlocks(.mesp))
        let (loss, ours) = try gradients(trainer)
        let (expectedLoss, expected) = try gradients(self.makeTrainer(fewBlocks(.mebp)))
        let found = try errors(trainer.model.lora.layouts, ours.mapValues { tamper("gradients.mebp", $0) }, expected)
        return try compare(
            "The gradients of \(fewBlocks) blocks by MeSP", with: "those by automatic differentiation",
            [Measurement("loss", error(MLXArray(loss), MLXArray(expectedLoss)))] + found)
    }

    /// Checks the loss and its gradient for few targets. On a GPU, a product with few rows uses another kernel.
    func checkFewTargets() throws -> Finding {
        let trainer = try makeTrainer(run(shortest))
        let whole = example(shortest)
        let model = trainer.model
        let x = try model.embed(whole)
        let y = try output(0, x, model, model.makeContext(whole, x0: x))
        let errors = try [1, 2, 3].filter { $0 <= shortest }.flatMap { count in
            let few = Example(tokens: whole.tokens, counted: Array(shortest - count..<shortest))
            let (loss, dy) = try model.head.lossAndGradient(y, few, scale: 1)
            let (expectedLoss, expected) = try cpu().lossAndGradient(y, few, scale: 1)
            return try [
                Measurement("loss of \(count)", error(MLXArray(loss), expectedLoss)),
                Measurement("gradient of \(count)", error(tamper("head.few_targets", dy), expected)),
            ]
        }
        return compare(
            "Loss and gradient of one, two and three targets", with: "those of the formulas on the CPU", errors)
    }

    // MARK: - Comparisons of results with repeated results

    private func bits(_ array: MLXArray) throws -> Data { try array.withBytes { $0.withUnsafeBytes { Data($0) } } }

    /// Checks that repeated gradients are equal to the last bit. The check repeats a gradient up to `repeats` times. It stops earlier, after at least
    /// two repetitions, when its time is over.
    func repeatGradient() throws -> Finding {
        let trainer = try makeTrainer(fewBlocks(.mesp))
        let first = try gradients(trainer).gradients.mapValues(bits)
        let end = ContinuousClock.now + .seconds(20 * settings.seconds)
        var (done, different) = (0, 0)
        while done < settings.repeats, done < 2 || ContinuousClock.now < end {
            let second = try gradients(trainer).gradients.mapValues { try bits(tamper("repeats", $0)) }
            done += 1
            if second != first { different += 1 }
        }
        return Finding(
            different == 0 ? .pass : .fail,
            different == 0
                ? "\(done) repeats of a gradient are the same to the last bit."
                : "\(different) of \(done) repeats of a gradient differ.",
            [Measurement("repeats", Double(done)), Measurement("different", Double(different))])
    }

    /// Checks that a resumed run equals an uninterrupted run. A trainer takes three steps and saves its state after the second. Another trainer loads
    /// this state and takes the third step.
    func checkResume() throws -> Finding {
        var run = fewBlocks(.mesp)
        (run.optimizer, run.learningRate, run.output) = (.adamw8bit, 1e-3, "")
        let plan = try defaultPlan(run)
        let folder = Self.temporaryFolder.appendingPathComponent("resume.\(UUID().uuidString)")
        try makeNewFolder(folder)
        defer { try? FileManager.default.removeItem(at: folder) }
        func step(_ trainer: Trainer, _ number: Int) throws {
            _ = try trainer.step([SequenceLoss([example(shortest, number: number)])], number: number)
        }

        let straight = try makeTrainer(run, plan: plan)
        for number in 0..<3 {
            try step(straight, number)
            if number == 1 {
                let sources = SavedState.Sources(weights: "", data: [:])
                try SavedState(step: 2, plan: plan, settings: run, sources: sources).save(straight, in: folder)
            }
        }
        let resumed = try makeTrainer(run, plan: plan)
        guard let saved = try SavedState.load(from: folder, run) else {
            throw MeSPError("The saved state in \(folder.path) is not there.")
        }
        try SavedState.restore(resumed) { saved.vectors[$0] }
        try step(resumed, 2)
        let expected = try SavedState.vectors(of: straight).mapValues(bits)
        let different = try SavedState.vectors(of: resumed).filter { try bits(tamper("resume", $1)) != expected[$0] }
            .keys.sorted()
        return Finding(
            different.isEmpty ? .pass : .fail,
            different.isEmpty
                ? "A resumed run is the same to the last bit."
                : "A resumed run differs in \(different.joined(separator: ", ")).",
            [Measurement("vectors", Double(expected.count)), Measurement("different", Double(different.count))])
    }
}
