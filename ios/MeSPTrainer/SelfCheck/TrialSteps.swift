import Foundation
import MeSPBundle
import MeSPCore

/// Training steps for counting or measuring. They write no log, saved state or adapters. They train on the first sequence of examples in the bundle's
/// data. If the data is plain text or preferences, or if there is none, they train on meaningless tokens.
package final class TrialSteps {
    package let planner: Planner
    package let plan: Plan
    private let trainer: Trainer
    private let example: Example
    private var number = 0

    /// Prepares the steps.
    ///
    /// - Parameters:
    ///   - settings: the settings of a run. Their output folder is not used.
    /// - Throws: `MeSPError`, as a run does at its start.
    package init(_ settings: RunSettings, plan: (Planner) throws -> Plan = { try $0.plan() }) throws {
        try settings.check()
        let bundle = try ModelBundle(
            url: URL(fileURLWithPath: settings.bundle), device: settings.device, checksums: false)
        try bundle.manifest.check(settings)
        planner = Planner(bundle.manifest, settings)
        self.plan = try plan(planner)
        let folder = FileManager.default.temporaryDirectory
        let plan = self.plan
        trainer = try bundle.withDevice {
            try Trainer(bundle: bundle, settings: settings, plan: plan, folder: folder)
        }
        let tokens = (0...settings.seqLen).map { Int32($0 % bundle.architecture.vocabSize) }
        example =
            try Self.example(bundle, settings) ?? Example(tokens: tokens, counted: Array(0..<settings.seqLen))
    }

    private static func example(_ bundle: ModelBundle, _ settings: RunSettings) throws -> Example? {
        guard let stream = try bundle.tokens("train"), stream.hasExamples, !stream.hasPreferences else { return nil }
        let packs = stream.packsExamples && settings.method.takesPacked
        let sequences = stream.sequences(lengths: [settings.seqLen], packed: packs)
        return sequences.count > 0 ? sequences[0] : nil
    }

    package var hasExperts: Bool { trainer.model.bundle.architecture.hasExperts }

    /// Takes a step with the settings' number of sequences. With an objective, the step has one sequence.
    package func step(atBlock: @escaping () -> Void = {}) throws {
        trainer.work.atBlock = atBlock
        let settings = trainer.model.settings
        let examples = Array(
            repeating: example,
            count: settings.objective == nil ? settings.batchSize * settings.gradAccumulationSteps : 1)
        try trainer.model.bundle.withDevice {
            _ =
                settings.dpClip == nil || settings.objective != nil
                ? try takeStep(trainer, [SequenceLoss(examples)], number: number)
                : try trainer.privateStep(examples.map { SequenceLoss([$0]) }, SecretKey(), number: number)
        }
        number += 1
    }
}
