import Foundation
import MLX
import MeSPBundle

/// LoRA training on a bundle, one block at a time. A trainer must not be used from several threads at once.
///
/// A step is the MeSP paper's algorithm. For a model of L blocks with the loss ℒ and the block inputs x₀, x₁, …:
///
///     forward     x₀ = embed(tokens),  xₗ₊₁ = blockₗ(xₗ),  keep only the inputs
///     head        ℒ, d = ∂ℒ/∂x_L
///     for l = L − 1 … 0:
///         recompute         the intermediates of block l, from xₗ
///         differentiate     g = the gradient of block l's LoRA matrices,  d ← ∂ℒ/∂xₗ
///         update            block l's LoRA matrices with g
///         free              everything but d
///
/// Updating within the backward pass is exact, as no earlier block reads block l's matrices. For several sequences, g is the sum of their gradients.
/// If a step needs all gradients before an update, for example to clip them, the updates follow the backward pass.
package final class Trainer {
    package let model: BlockwiseModel
    package let work: StepWork
    package let updates: Updates
    let reference: ReferenceModel
    let plan: Plan
    private let inputsFile: ArrayFile?
    /// The blocks that steps have updated so far.
    private var updated = Set<Int>()

    /// The dropout key of a step, and the number of its sequences so far; nil without dropout.
    var dropout: (key: DropoutKey, sequences: Int)?

    /// A sequence of a step, and the weight of its targets in the step's loss.
    package typealias WeightedExample = (example: Example, weight: Float)

    /// Performs one update from the sum of some losses.
    ///
    /// - Throws: for example `NotFinite`. Some blocks may already have been updated.
    package func step(_ losses: [some StepLoss], number: Int) throws -> StepResult {
        beginStep(number)
        let keys = try updates.randomKeys(number)
        let sink = updates.areSummed ? updates.makeSumSink() : updates.makeUpdateSink(number, keys)
        var result = StepResult()
        for loss in losses { try loss.backpropagate(self, into: sink, &result) }
        if updates.areSummed { result.gradientNorm = try updates.updateAll(number, keys, gradient: updates.sum) }
        return result
    }

    func beginStep(_ number: Int) {
        let settings = model.settings
        model.drawn = settings.drawBlocks(of: model.lora.trained, step: settings.firstStep + number)
        dropout =
            settings.dropout > 0
            ? (DropoutKey(rate: settings.dropout, seed: settings.seed)[settings.firstStep + number], 0) : nil
    }

    private func nextDropoutKey() -> DropoutKey? {
        defer { dropout?.sequences += 1 }
        return dropout.map { $0.key[$0.sequences] }
    }

    /// Performs one forward and backward pass of some sequences, which go through each block together.
    ///
    /// - Parameter sink: called with the gradient of each drawn block, summed over the sequences; it may change that block's parameters.
    /// - Throws: `NotFinite` if a loss is not finite; the sink has not been called then.
    package func backpropagate(_ weighted: [WeightedExample], into sink: GradientSink) throws -> Float {
        var sequences = try forward(weighted.map(\.example))
        var loss: Float = 0
        try model.bundle.withHead { _ in
            for (index, each) in weighted.enumerated() {
                let (sum, d) = try head(sequences[index].residual, each.example, weight: each.weight)
                loss += each.weight * sum
                sequences[index].residual = d
            }
        }
        try backward(&sequences, into: sink)
        return loss
    }

    /// Performs the forward pass, and keeps the block inputs from the first drawn block on.
    ///
    /// - Parameter waits: whether another sequence runs forward and backward before the backward pass of these sequences. If so, no intermediates are
    ///   kept.
    func forward(_ examples: [Example], waits: Bool = false) throws -> [BlockwiseModel.SequenceContext] {
        let sequences = try examples.enumerated().map { index, example in
            let sequence = try model.makeContext(example, x0: model.embed(example), dropout: nextDropoutKey())
            sequence.inputs = BlockArrays(
                count: model.blocks.count, file: inputsFile, place: waits ? index + 1 : index)
            return sequence
        }
        let firstKept = max(model.drawn[0], model.blocks.upperBound - (waits ? 0 : plan.keptBlocks))
        for block in model.blocks {
            let keeps = model.settings.method.readsIntermediates && block >= firstKept
            let weights = try model.bundle.openBlock(block)
            defer { weights.packed.close() }
            for sequence in sequences {
                if block >= model.drawn[0] { try sequence.inputs.write(sequence.residual, block) }
                (sequence.residual, sequence.kept[block]) =
                    try model.forward(block, weights, sequence, sequence.residual, keepsIntermediates: keeps)
            }
        }
        return sequences
    }

    func head(_ y: MLXArray, _ example: Example, weight: Float) throws -> (loss: Float, dy: MLXArray) {
        let (loss, dy) = try model.head.lossAndGradient(y, example, scale: weight)
        guard loss.isFinite else { throw try model.notFinite([example]) }
        return (loss, dy)
    }

    /// Performs the backward pass from the last block to the first drawn block.
    ///
    /// - Parameter sequences: the sequences, with the gradient of the last block's output as their residual; empty afterwards.
    func backward(_ sequences: inout [BlockwiseModel.SequenceContext], into sink: GradientSink) throws {
        for block in (model.drawn[0]..<model.blocks.upperBound).reversed() {
            let weights = try model.bundle.openBlock(block)
            defer { weights.packed.close() }
            var sum: MLXArray?
            for index in sequences.indices {
                try work.boundary()
                let start = work.now
                defer { work.add(since: start, to: \.backward) }
                let gradient = try differentiate(block, weights, sequences[index], addedTo: sum)
                if index < sequences.count - 1 {
                    sum = gradient
                } else if model.drawn.contains(block) {
                    try sink(block, gradient)
                }
                work.freeCache()
            }
        }
        sequences = []
        updated.formUnion(model.drawn)
        work.isWarm = work.isWarm || updated.count == model.lora.trained.count
        work.hasChanged = false
    }

    /// Returns the gradient of a block's trained parameters for a sequence, plus `sum`; without numbers if the block is not drawn. Replaces the
    /// sequence's residual dy by dx, if an earlier block is drawn.
    ///
    /// If a GPU fails, the gradient is computed again. Therefore the block's input and dy are kept until the gradient is confirmed.
    private func differentiate(
        _ block: Int, _ weights: BlockWeights, _ sequence: BlockwiseModel.SequenceContext, addedTo sum: MLXArray?
    ) throws -> MLXArray {
        let x = try sequence.inputs.take(block)
        var intermediates = sequence.kept.removeValue(forKey: block)
        let areKept = intermediates != nil
        // Gradients of shared keys and values are stored under the block that computes the keys and values.
        let owner = model.bundle.architecture.keysOf(block) ?? block
        var dShared = sequence.gradients.removeValue(forKey: owner)
        let held = MLXErrors.areLate ? (sequence.residual, dShared) : nil
        let isAutomatic = model.settings.method == .mebp
        let gradient = try work.repeating(isBounded: !isAutomatic) {
            if let held { (sequence.residual, dShared) = held }
            let formulas = try model.makeBlock(block, weights, model.lora.parameters(block), sequence, x)
            var gradient: MLXArray
            if isAutomatic {
                gradient = try model.automaticGradient(block, formulas, x, d: &sequence.residual, dShared: &dShared)
            } else {
                let recomputed = try intermediates.take() ?? model.recompute(block, formulas, x, all: areKept)
                gradient = formulas.structuredBackward(
                    x: x, consume recomputed, d: &sequence.residual, wantsDx: block > model.drawn[0],
                    dShared: &dShared)
            }
            if let sum {
                gradient = sum + gradient
                eval(gradient)
            }
            return gradient
        }
        if owner >= model.drawn[0] { sequence.gradients[owner] = dShared }
        return gradient
    }

    package init(bundle: ModelBundle, settings: RunSettings, plan: Plan, folder: URL) throws {
        let arrays = try TrainingArrays(bundle, settings, plan, in: folder)
        (self.plan, inputsFile) = (plan, arrays.inputsFile)
        work = StepWork(bundle, settings, plan)
        model = BlockwiseModel(bundle, settings, arrays, work)
        bundle.maps.areKept = plan.keepsMaps
        updates = Updates(of: model, arrays)
        reference = ReferenceModel(start: arrays.start)
    }

    var writtenBytes: Int { (inputsFile?.written ?? 0) + updates.writtenBytes }
}
