/// A model's configuration, in one form for all families. The exporter derives the configuration from the model's `config.json`. A block is a mixer
/// and an MLP:
///
///     x_mid = x + norm(mixer(mixer_in)),  mixer_in = RMSNorm(x)                  norm where there are `postNorms`
///     y = x_mid + norm(down(act(gate(mlp_in)) ∘ up(mlp_in))),  mlp_in = RMSNorm(x_mid)
public struct Architecture: Decodable, Sendable, Equatable {
    /// The name of the family in `config.json`, which messages show.
    package let modelType: String
    package let hiddenSize: Int
    package let vocabSize: Int
    package let rmsNormEps: Float
    package let tieWordEmbeddings: Bool
    package let hiddenAct: Activation
    package let postNorms: Bool
    package let finalLogitSoftcapping: Float?
    /// The factor by which the embeddings of tokens are multiplied.
    package let embeddingScale: Float
    /// The part before `.layers.N.` in the names of mlx-lm's adapters; `hfPrefix` is this part in the names of PEFT's adapters.
    package let mlxPrefix: String
    package let hfPrefix: String
    /// The names of the linear layers with a bias.
    package let biases: [String]
    /// The mixers in the model.
    package let mixers: [Mixer]
    /// The index of each block's mixer.
    package let layers: [Int]
    /// The MLPs in the model, which differ in width or in their experts.
    package let mlps: [MLP]
    /// The index of each block's MLP.
    package let mlpLayers: [Int]
    /// The embeddings of tokens for each layer; nil if the model has none.
    package let perLayer: PerLayerEmbedding?
    /// The linear layers of Hugging Face's model that join several linear layers of a block; nil if the model has no such layers.
    package let hfModules: [JoinedModule]?

    public var numHiddenLayers: Int { layers.count }

    /// The short names of the linear layers, which are trained by default. `RunSettings.projections` has these names.
    package var projectionNames: [String] { unique(modules.map(\.shortName)) }
    /// All names that `RunSettings.projections` may have.
    package var trainableNames: [String] { unique(trainable.map(\.shortName)) }
}

extension Architecture {
    /// Returns the block with this index.
    package func block(_ index: Int) -> BlockShape {
        BlockShape(architecture: self, mixer: mixers[layers[index]], mlp: mlps[mlpLayers[index]])
    }

    /// One block of each kind.
    package var kinds: [BlockShape] { firstOfKinds.map(block) }

    /// The index of the first block of each kind. A kind is a pair of a mixer and an MLP.
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

    /// The linear layers of all blocks, without duplicates.
    package var modules: [Module] {
        unique(mixers.flatMap(\.modules)) + unique(mlps.flatMap(\.modules)) + (perLayer?.modules ?? [])
    }

    /// The modules that may have adapters in some block: the linear layers, then the experts' matrices.
    package var trainable: [Module] { modules + unique(mlps.flatMap { $0.experts?.modules ?? [] }) }

    /// Returns the block whose keys and values a block shares; nil if the block has its own keys and values, or has none.
    package func keysOf(_ block: Int) -> Int? {
        if case .attention(let mixer) = mixers[layers[block]] { mixer.keysOf } else { nil }
    }

    /// The blocks whose keys and values other blocks share.
    package var owners: Set<Int> { Set(layers.indices.compactMap(keysOf)) }

    /// Whether each block with shared keys and values takes them from an earlier block with keys and values of the same size.
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

    /// The largest number of query heads of a block, or 1 without attention.
    package var attentionHeads: Int {
        mixers.map { if case .attention(let mixer) = $0 { mixer.numAttentionHeads } else { 1 } }.max() ?? 1
    }

    /// The largest number of query heads that share a key-value head, or 1 without attention.
    package var headsPerKey: Int {
        mixers.map { if case .attention(let a) = $0 { a.numAttentionHeads / a.numKeyValueHeads } else { 1 } }.max() ?? 1
    }

    /// The largest number of input features of a mixer's output projection.
    package var mixerWidth: Int {
        mixers.map { $0.mixerWidth(hidden: hiddenSize) }.max() ?? hiddenSize
    }

    /// Whether some block is recurrent: one state summarizes all earlier tokens.
    package var isRecurrent: Bool {
        mixers.contains { if case .attention = $0 { false } else { true } }
    }

    /// Whether the sizes are within bounds, and every block has all its parts. Within these bounds no product of sizes overflows, here or in a plan.
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

/// Returns the elements in their order, without duplicates.
private func unique<T: Equatable>(_ all: [T]) -> [T] {
    all.reduce(into: []) { if !$0.contains($1) { $0.append($1) } }
}
