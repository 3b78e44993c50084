import Foundation
import MLX

/// Training steps on tokens that mean nothing or, of packed records, on the first of the data's sequences, to count or measure what one
/// takes. They leave nothing behind.
public final class Rehearsal {
    public let planner: Planner
    public let plan: Plan
    private let trainer: Trainer
    private let example: Example
    private var number = 0

    /// - Parameters:
    ///   - settings: their output is not used.
    ///   - plan: chooses the plan.
    /// - Throws: `MeSPError`, as a run would at its start.
    public init(_ settings: RunSettings, plan: (Planner) throws -> Plan = { try $0.plan() }) throws {
        try settings.check()
        let bundle = try ModelBundle(url: URL(fileURLWithPath: settings.bundle), checksums: false)
        try bundle.manifest.check(settings)
        planner = Planner(bundle.manifest, settings)
        self.plan = try plan(planner)
        let folder = FileManager.default.temporaryDirectory
        let plan = self.plan
        trainer = try bundle.withDevice {
            try Trainer(bundle: bundle, settings: settings, plan: plan, folder: folder)
        }
        let stream = settings.method == .mebp || !bundle.manifest.takesPacked ? nil : try bundle.tokens("train")
        if let stream, stream.packsExamples {
            // What a step takes depends on the records.
            example = stream.sequences(lengths: [settings.seqLen], packed: true)[0]
        } else {
            let tokens = (0...settings.seqLen).map { Int32($0 % bundle.architecture.vocabSize) }
            example = Example(tokens: tokens, counted: Array(0..<settings.seqLen))
        }
    }

    /// Whether the bundle's functions are for a GPU.
    public var isForGPU: Bool { trainer.model.bundle.device == .gpu }

    /// A step of the settings' batches; with an objective, of one sequence.
    ///
    /// - Parameter atBlock: called at each block boundary, where a run may pause.
    public func step(atBlock: @escaping () -> Void = {}) throws {
        trainer.clock.atBlock = atBlock
        let (settings, sequences) = (trainer.settings, trainer.settings.objective == nil)
        let batch = Array(repeating: example, count: sequences ? settings.batchSize : 1)
        let batches = Array(repeating: batch, count: sequences ? settings.gradAccumulationSteps : 1)
        try trainer.model.bundle.withDevice {
            _ =
                settings.dpClip == nil || !sequences
                ? try trainer.step(batches, number: number)
                : try trainer.step(drawn: batch, number: number, SecretKey())
        }
        number += 1
    }
}
