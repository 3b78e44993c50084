/// A model's configuration: one description for all families, as the exporter read it from the model's
/// `config.json`. A block is a mixer and an MLP:
///
///     x_mid = x + norm(mixer(mixer_in)),  mixer_in = RMSNorm(x)                  norm where there are `postNorms`
///     y = x_mid + norm(down(act(gate(mlp_in)) ∘ up(mlp_in))),  mlp_in = RMSNorm(x_mid)
public struct Architecture: Decodable, Sendable, Equatable {
    /// The name of the family in `config.json`, for people.
    package let modelType: String
    package let hiddenSize: Int
    package let vocabSize: Int
    package let rmsNormEps: Float
    package let tieWordEmbeddings: Bool
    package let hiddenAct: Activation
    package let postNorms: Bool
    package let finalLogitSoftcapping: Float?
    /// The factor of the embedding.
    package let embeddingScale: Float
    /// The prefix of `.layers.N.` in the names of adapters, of mlx-lm and of PEFT.
    package let mlxPrefix: String
    package let hfPrefix: String
    /// The names of the linear layers with a bias.
    package let biases: [String]
    /// The mixers in the model.
    package let mixers: [Mixer]
    /// For each block the index of its mixer.
    package let layers: [Int]
    /// The MLPs in the model, which differ in their width, or in that some have experts.
    package let mlps: [MLP]
    /// For each block the index of its MLP.
    package let mlpLayers: [Int]
    /// Embeddings of the tokens for each layer; nil where the model has none.
    package let perLayer: PerLayerEmbedding?
    /// The linear layers that Hugging Face has in place of some of these; nil where it has none.
    package let hfModules: [JoinedModule]?

    public var numHiddenLayers: Int { layers.count }

    /// The linear layers by the short names that `RunSettings.projections` has, which are trained by default.
    package var projectionNames: [String] { unique(modules.map(\.shortName)) }
    /// All that `RunSettings.projections` may have.
    package var trainableNames: [String] { unique(trainable.map(\.shortName)) }
}

extension Architecture {
    /// The block with this index.
    package func block(_ index: Int) -> BlockShape {
        BlockShape(architecture: self, mixer: mixers[layers[index]], mlp: mlps[mlpLayers[index]])
    }

    /// A block of each kind.
    package var kinds: [BlockShape] { firstOfKinds.map(block) }

    /// The first block of each kind: of each pair of a mixer and an MLP that some block has.
    package var firstOfKinds: [Int] {
        unique(zip(layers, mlpLayers).map { [$0, $1] }).compactMap { kind in
            layers.indices.first { [layers[$0], mlpLayers[$0]] == kind }
        }
    }

    /// The width of the widest MLP, or expert.
    package var widestMLP: Int {
        mlps.map { max($0.intermediateSize, $0.experts?.intermediateSize ?? 0) }.max() ?? 0
    }

    /// Whether some block has experts.
    package var hasExperts: Bool { mlps.contains { $0.experts != nil } }

    /// The linear layers of all blocks, each once.
    package var modules: [Module] {
        unique(mixers.flatMap(\.modules)) + unique(mlps.flatMap(\.modules)) + (perLayer?.modules ?? [])
    }

    /// What may have adapters in some block: these, and then the experts' matrices.
    package var trainable: [Module] { modules + unique(mlps.flatMap { $0.experts?.modules ?? [] }) }

    /// The block whose keys and values a block takes; nil for one that has its own, or none.
    package func keysOf(_ block: Int) -> Int? {
        if case .attention(let mixer) = mixers[layers[block]] { mixer.keysOf } else { nil }
    }

    /// The blocks whose keys and values others take too.
    package var owners: Set<Int> { Set(layers.indices.compactMap(keysOf)) }

    /// Whether each block that takes another's keys and values takes those of one before it that has such.
    private var sharesKeys: Bool {
        layers.indices.allSatisfy { block in
            guard let owner = keysOf(block) else { return true }
            guard (0..<block).contains(owner), case .attention(let mixer) = mixers[layers[block]],
                case .attention(let its) = mixers[layers[owner]]
            else { return false }
            return its.keysOf == nil && mixer.gateDim == 0
                && (its.numKeyValueHeads, its.headDim) == (mixer.numKeyValueHeads, mixer.headDim)
        }
    }

    /// The most query heads of attention, 1 if there is none.
    package var attentionHeads: Int {
        mixers.map { if case .attention(let mixer) = $0 { mixer.numAttentionHeads } else { 1 } }.max() ?? 1
    }

    /// The most query heads that share a key-value head, 1 if there is no attention.
    package var headsPerKey: Int {
        mixers.map { if case .attention(let a) = $0 { a.numAttentionHeads / a.numKeyValueHeads } else { 1 } }.max() ?? 1
    }

    /// The most features that a mixer's output projection takes.
    package var mixerWidth: Int {
        mixers.map { $0.mixerWidth(hidden: hiddenSize) }.max() ?? hiddenSize
    }

    /// Whether some block leaves one state of all tokens to those that follow.
    package var isRecurrent: Bool {
        mixers.contains { if case .attention = $0 { false } else { true } }
    }

    /// Whether the sizes can be a model's, and every part of a block is there. No product of the sizes, here or in a plan, overflows.
    package var isConsistent: Bool {
        let widths = [hiddenSize, vocabSize]
        let factors = [embeddingScale, finalLogitSoftcapping].compactMap { $0 }
        return (1...(1 << 12)).contains(numHiddenLayers) && widths.allSatisfy { (1...(1 << 20)).contains($0) }
            && factors.allSatisfy { $0.isFinite && $0 > 0 } && mlps.allSatisfy(\.isConsistent)
            && mlpLayers.count == layers.count && mlpLayers.allSatisfy(mlps.indices.contains)
            && layers.allSatisfy(mixers.indices.contains) && mixers.allSatisfy { $0.isConsistent(hidden: hiddenSize) }
            && (hfModules ?? []).allSatisfy { layer in
                let parts = trainable.filter { layer.parts.contains($0.name) }
                return !layer.parts.isEmpty && layer.parts.allSatisfy(parts.map(\.name).contains)
                    && Set(parts.map(\.isStacked)).count == 1
            }
            && sharesKeys && perLayer.map { postNorms && (1...(1 << 12)).contains($0.size) } ?? true
            && kinds.allSatisfy(\.isWhole) && biases.allSatisfy(modules.map(\.name).contains)
    }
}

/// Without what came before.
private func unique<T: Equatable>(_ all: [T]) -> [T] {
    all.reduce(into: []) { if !$0.contains($1) { $0.append($1) } }
}
