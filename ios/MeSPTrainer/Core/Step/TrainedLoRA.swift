import Foundation
import MLX
import MeSPAdapters
import MeSPBundle
import MeSPFiles
import MeSPSentences

extension RunSettings {
    /// Returns the layout of each block with the modules that the run trains. Untrained blocks have no modules.
    func layouts(of architecture: Architecture) -> [LoRALayout] {
        let modules =
            projections.map { names in architecture.trainable.filter { names.contains($0.shortName) } }
            ?? architecture.modules
        let first = architecture.numHiddenLayers - (numLayers ?? architecture.numHiddenLayers)
        return architecture.layers.indices.map {
            LoRALayout(
                block: architecture.block($0), rank: rank, modules: $0 < first ? [] : modules, freezesA: freezeA,
                hasMagnitudes: dora)
        }
    }

    /// If A is frozen, the folder may contain only B. A is then derived from the seed.
    func loadAdapters(from folder: URL, of bundle: ModelBundle) throws -> LoadedAdapters {
        let trainsExperts = layouts(of: bundle.architecture).contains { $0.modules.contains(where: \.isStacked) }
        return try MeSPAdapters.loadAdapters(
            from: folder, architecture: bundle.architecture, withExperts: trainsExperts, onlyB: freezeA
        ) { layout, block in
            layout.initial(
                seed: seed, block: block,
                magnitudes: layout.hasMagnitudes ? try bundle.magnitudes(block, layout) : nil)
        }
    }
}

extension ModelBundle {
    fileprivate func magnitudes(_ block: Int, _ layout: LoRALayout) throws -> MLXArray {
        try withBlock(block) { $0.squaredNorms(layout).sqrt() }
    }
}

/// The LoRA parameters of a run: one flat vector `[P]` for each block that has any, in float32 or bfloat16.
package final class TrainedLoRA {
    let bundle: ModelBundle
    private let settings: RunSettings
    let work: StepWork
    package let layouts: [LoRALayout]
    /// The indices of the trained blocks, ascending; at least one.
    package let trained: [Int]
    package var vectors: BlockArrays
    /// The squared norms of the rows of W, for each block with parameters; nil without DoRA.
    private let squaredNorms: BlockArrays?
    var strength: Float = 1
    /// The factor of the adapters' output: s · α / rank, or s · α / √rank with rsLoRA.
    package var scale: Float { strength * settings.scale }

    init(_ bundle: ModelBundle, _ settings: RunSettings, _ arrays: TrainingArrays, _ work: StepWork) {
        (self.bundle, self.settings, self.work) = (bundle, settings, work)
        (vectors, squaredNorms) = (arrays.lora, arrays.squaredNorms)
        let layouts = settings.layouts(of: bundle.architecture)
        self.layouts = layouts
        trained = layouts.indices.filter { layouts[$0].count > 0 }
    }

    package func parameters(_ block: Int) throws -> MLXArray {
        guard layouts[block].count > 0 else { return MLXArray.zeros([0]) }
        let stored = try vectors.read(block)
        return stored.asType(.float32)
    }

    func baseParameters(_ block: Int) throws -> MLXArray {
        guard let squares = try squaredNorms?.read(block) else { return MLXArray.zeros([layouts[block].count]) }
        return layouts[block].base(sqrt(squares))
    }

    func dora(_ block: Int, _ weights: BlockWeights, _ lora: MLXArray, norms: MLXArray? = nil) throws -> DoRA? {
        guard layouts[block].count > 0, let squares = try squaredNorms?.read(block) else { return nil }
        let schedule = work.schedule(length: settings.seqLen)
        return DoRA(
            lora, layouts[block],
            norms: norms ?? schedule.norms(weights, lora, layouts[block], scale: scale, squares: squares))
    }

    func adapters() throws -> LoadedAdapters {
        let lora = try layouts.indices.map { block in
            try work.confirmed {
                var lora = try parameters(block)
                if squaredNorms != nil {
                    lora = try bundle.withBlock(block) { weights in
                        let scaled = try dora(block, weights, lora)?.scaled ?? lora
                        eval(scaled)
                        return scaled
                    }
                }
                return layouts[block].whole(lora)
            }
        }
        return LoadedAdapters(rank: settings.rank, scale: scale, lora: lora, layouts: layouts.map(\.whole))
    }

    // MARK: - Files

    func load(from folder: URL) throws {
        try work.repeating {
            try take(settings.loadAdapters(from: folder, of: bundle), of: folder)
        }
    }

    private func take(_ adapters: LoadedAdapters, of folder: URL) throws {
        guard adapters.rank == settings.rank else {
            throw MeSPError(
                "The adapters in \(folder.path) have rank \(adapters.rank), and the run has \(settings.rank); choose the adapters' rank."
            )
        }
        guard abs(adapters.scale - scale) <= 1e-6 * abs(adapters.scale) else {
            throw MeSPError(
                "The adapters in \(folder.path) are scaled by \(adapters.scale), the run's by \(scale); set alpha to \(settings.alpha * adapters.scale / scale)."
            )
        }
        guard adapters.layouts.contains(where: \.hasMagnitudes) == settings.dora else {
            throw MeSPError(
                settings.dora
                    ? "The adapters in \(folder.path) are LoRA's and have no magnitudes, which DoRA trains; leave dora out."
                    : "The adapters in \(folder.path) are DoRA's, and a run without dora would lose their magnitudes; set dora."
            )
        }
        for (block, vector) in adapters.lora.enumerated() {
            let (layout, its) = (layouts[block], adapters.layouts[block])
            for module in its.modules where !layout.modules.contains(module) {
                guard try isBase(its, module, vector, block) else {
                    throw MeSPError(
                        "The adapters in \(folder.path) include \(module.shortName) in block \(block), which this run does not train and would lose; train it too."
                    )
                }
            }
            guard layout.count > 0 else { continue }
            try vectors.write(layout.part(of: vector, in: its).asType(settings.loraDtype.dtype), block)
        }
    }

    private func isBase(_ layout: LoRALayout, _ module: Module, _ vector: MLXArray, _ block: Int) throws -> Bool {
        let matrices = layout.matrices(module, in: vector)
        guard try matrices.b.abs().max().number(Float.self) == 0 else { return false }
        guard let m = matrices.m else { return true }
        let own = LoRALayout(block: layout.block, rank: layout.rank, modules: [module], hasMagnitudes: true)
        let lengths = try bundle.magnitudes(block, own)
        // Rounding the norms of W's rows to bfloat16 changes them by at most 2⁻⁸ of their size.
        return try (m - lengths).abs().max().number(Float.self) <= lengths.max().number(Float.self) / 256
    }

    func save(to folder: URL) throws {
        let modules = bundle.architecture.trainable.filter { module in
            layouts.contains { $0.modules.contains(module) }
        }
        // Each array is confirmed before its bytes are written.
        try MLXErrors.repeating(confirms: false, beforeRetry: work.wait) {
            try saveAdapterFolder(
                bundle.architecture, rank: settings.rank, blocks: trained[0]..<layouts.count, modules: modules,
                scale: settings.scale, model: bundle.manifest.model.id, strength: strength, dropout: settings.dropout,
                magnitudes: settings.dora ? bundle.magnitudes : nil, to: folder, lora: vectors.read)
        }
        try copyTerms(to: [folder, folder.appendingPathComponent("peft")])
    }

    private func copyTerms(to folders: [URL]) throws {
        for name in bundle.manifest.terms {
            guard let text = regularFile(bundle.url.appendingPathComponent(name)) else { continue }
            for place in folders.map({ $0.appendingPathComponent(name) })
            where !FileManager.default.fileExists(atPath: place.path) {
                try explaining {
                    try writeWhole(place) { try $0.write(contentsOf: text) }
                } as: {
                    "Cannot save \(place.path): \($0)."
                }
            }
        }
    }
}
