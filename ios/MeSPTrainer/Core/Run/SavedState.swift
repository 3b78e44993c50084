import Foundation
import MLX
import MeSPAdapters
import MeSPBundle
import MeSPFiles
import MeSPSentences

/// The state from which a run is resumed: `state.safetensors` in its output folder.
package struct SavedState: Codable {
    private static let format = 2
    private var format = Self.format
    var step = 0
    var evaluated: Int?
    var first: Float?
    /// The lowest held-out loss so far, and the number of evaluations after it.
    var best: Float?
    var evaluationsSinceBest = 0
    /// The length of `metrics.jsonl` when this state was saved, in bytes. A resumed run drops later lines.
    var logBytes: UInt64 = 0
    var plan: Plan
    var settings: RunSettings
    var sources: Sources

    package init(step: Int = 0, plan: Plan, settings: RunSettings, sources: Sources) {
        (self.step, self.plan, self.settings, self.sources) = (step, plan, settings, sources)
    }

    /// Digests of a run's weights and data.
    package struct Sources: Codable {
        let weights: String
        let data: [String: String]

        package init(weights: String, data: [String: String]) { (self.weights, self.data) = (weights, data) }

        init(_ bundle: ModelBundle, _ settings: RunSettings) throws {
            func folder(_ path: String?) throws -> String? {
                try path.flatMap { try bundle.dataDigest(in: URL(fileURLWithPath: $0)) }
            }
            let data = [
                "train": try bundle.dataDigest("train"),
                "valid": settings.valBatches > 0 ? try bundle.dataDigest("valid") : nil,
                "test": settings.test ? try bundle.dataDigest("test") : nil,
                "replay": try folder(settings.replay), "general": try folder(settings.general),
            ]
            self.init(weights: bundle.manifest.weightsDigest, data: data.compactMapValues { $0 })
        }
    }

    package typealias Loaded = (state: SavedState, plan: Plan?, vectors: Safetensors)

    static func url(in folder: URL) -> URL { folder.appendingPathComponent("state.safetensors") }

    static func damaged(in folder: URL) -> MeSPError {
        MeSPError(
            "\(url(in: folder).path) is damaged; start the run again in another folder.", .damaged(url(in: folder)))
    }

    private var isValid: Bool {
        (0...RunSettings.maxSteps).contains(step) && (0...step).contains(evaluated ?? 0)
            && (0...step + 1).contains(evaluationsSinceBest) && (try? settings.check()) != nil
    }

    package func save(_ trainer: Trainer, in folder: URL) throws {
        let json = String(decoding: try JSONEncoder.snakeCase.encode(self), as: UTF8.self)
        let url = Self.url(in: folder)
        try explaining {
            // Each array is confirmed before its bytes are written.
            try MLXErrors.repeating(confirms: false, beforeRetry: trainer.work.wait) {
                let tensors = try Self.vectors(of: trainer).map { name, vector in
                    NewTensor(name: name, shape: vector.shape, dtype: vector.dtype) { vector }
                }
                try writeSafetensors(tensors, metadata: ["state": json], seal: true, isInBackup: false, to: url)
            }
        } as: {
            "Cannot save \(url.path): \($0)."
        }
    }

    static func device(of settings: RunSettings) -> Backend? {
        guard settings.resume, let tensors = try? Safetensors(url(in: URL(fileURLWithPath: settings.output))),
            let json = try? RunSettings.completed(in: Data((tensors.metadata["state"] ?? "").utf8))
        else { return nil }
        return try? JSONDecoder.snakeCase.decode(SavedState.self, from: json).settings.device
    }

    /// Reads the state that a run with these settings saved in `folder`.
    ///
    /// - Returns: the state, the run's plan, and the trainer's vectors by name; nil if there is no state. The plan is nil if a setting on which it
    ///   depends has changed.
    /// - Throws: `MeSPError` if the state is damaged, has another format, or differs from `settings` in a setting that must not change.
    package static func load(from folder: URL, _ settings: RunSettings) throws -> Loaded? {
        let url = url(in: folder)
        guard FileManager.default.fileExists(atPath: url.path) else { return nil }
        struct Version: Decodable {
            let format: Int
        }
        guard let tensors = try? Safetensors(url),
            let json = try? RunSettings.completed(in: Data((tensors.metadata["state"] ?? "").utf8)),
            let version = try? JSONDecoder().decode(Version.self, from: json)
        else { throw damaged(in: folder) }
        // A sealed file that is not intact is damaged, whatever format it names. Files of format 1 have no seal.
        guard version.format == Self.format || (tensors.isSealed && !tensors.isIntact) else {
            throw MeSPError(
                "\(url.path) was saved by another version of the trainer, in format \(version.format) and not \(Self.format); start the run again in another folder."
            )
        }
        guard tensors.isIntact, let saved = try? JSONDecoder.snakeCase.decode(SavedState.self, from: json),
            saved.isValid
        else { throw damaged(in: folder) }

        var same = saved.settings
        same.takeChanges(from: settings)
        guard same == settings else {
            throw MeSPError("The run in \(folder.path) had other settings; resume it with those it was started with.")
        }
        let samePlan =
            saved.settings.memoryLimitMb == settings.memoryLimitMb && saved.settings.offload == settings.offload
            && saved.settings.order == settings.order
            && settings.device ?? saved.settings.device == saved.settings.device
        return (saved, samePlan ? saved.plan : nil, tensors)
    }
}

extension SavedState {
    func check(_ sources: Sources, in folder: URL) throws {
        guard self.sources.weights == sources.weights else {
            throw MeSPError(
                "The bundle's weights are not those that the run in \(folder.path) was started with; resume it with its own bundle, or start a new run."
            )
        }
        let names = ["train", "valid", "test", "replay", "general"]
        guard let changed = names.first(where: { self.sources.data[$0] != sources.data[$0] }) else { return }
        throw MeSPError(
            "The \(changed) data has changed since the run in \(folder.path) was started; start a new run, with --adapters \(folder.appendingPathComponent("adapters").path) to continue from its adapters."
        )
    }
}

// MARK: - A trainer's vectors

extension SavedState {
    package static func vectors(of trainer: Trainer) throws -> [String: MLXArray] {
        var vectors = [String: MLXArray]()
        let (model, optimizer) = (trainer.model, trainer.updates.optimizer)
        for block in model.lora.trained {
            vectors["lora.\(block)"] = try model.lora.vectors.read(block)
            vectors["first.\(block)"] = try optimizer.first?.read(block)
            vectors["second.\(block)"] = try optimizer.second?.read(block)
        }
        return vectors.merging(trainer.reference.vectors) { $1 }
    }

    /// Replaces a trainer's vectors by those of `vectors`, such as a saved state's. After an error, the trainer must not be used.
    package static func restore(_ trainer: Trainer, _ vectors: (_ name: String) -> MLXArray?) throws {
        func vector(_ name: String, like current: MLXArray) throws -> MLXArray {
            guard let vector = vectors(name), vector.shape == current.shape, vector.dtype == current.dtype else {
                throw MeSPError("The saved state is of another model or rank; start the run again in another folder.")
            }
            return vector
        }
        let (model, updates) = (trainer.model, trainer.updates)
        try trainer.work.repeating {
            if model.settings.objective?.hasReference == true { try trainer.reference.restore(vectors) }
            for block in model.lora.trained {
                try model.lora.vectors.write(vector("lora.\(block)", like: model.lora.vectors.read(block)), block)
                if let first = try updates.optimizer.first?.read(block) {
                    try updates.optimizer.first?.write(vector("first.\(block)", like: first), block)
                }
                if let second = try updates.optimizer.second?.read(block) {
                    try updates.optimizer.second?.write(vector("second.\(block)", like: second), block)
                }
            }
        }
    }
}
