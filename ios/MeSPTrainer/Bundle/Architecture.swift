import MeSPFiles

/// A model's configuration, in one form for all model families. The exporter derives it from the model's `config.json`.
public struct Architecture: Decodable, Sendable, Equatable {
    package let modelType: String
    package let hiddenSize: Int
    package let vocabSize: Int
    package let rmsNormEps: Float
    package let tieWordEmbeddings: Bool
    package let hiddenAct: Activation
    package let postNorms: Bool
    package let finalLogitSoftcapping: Float?
    package let embeddingScale: Float
    /// The part of tensor names before `.layers.N.` in mlx-lm's adapters. `hfPrefix` is the same for PEFT.
    package let mlxPrefix: String
    package let hfPrefix: String
    package let biases: [String]
    package let mixers: [Mixer]
    package let layers: [Int]
    package let mlps: [MLP]
    package let mlpLayers: [Int]
    package let perLayer: PerLayerEmbedding?
    /// The layers and parameters of Hugging Face's model that concatenate the outputs of several modules of a block, or nil if there are none.
    package let hfModules: [JoinedModule]?

    public var numHiddenLayers: Int { layers.count }

    package var projectionNames: [String] { unique(modules.map(\.shortName)) }
    package var trainableNames: [String] { unique(trainable.map(\.shortName)) }
}

extension Architecture {
    package func block(_ index: Int) -> BlockShape {
        BlockShape(architecture: self, mixer: mixers[layers[index]], mlp: mlps[mlpLayers[index]])
    }

    package var kinds: [BlockShape] { firstOfKinds.map(block) }

    /// The index of the first block of each kind. Blocks of one kind have the same mixer and MLP.
    package var firstOfKinds: [Int] {
        unique(zip(layers, mlpLayers).map { [$0, $1] }).compactMap { kind in
            layers.indices.first { [layers[$0], mlpLayers[$0]] == kind }
        }
    }

    package var widestMLP: Int {
        mlps.map { max($0.intermediateSize, $0.experts?.intermediateSize ?? 0) }.max() ?? 0
    }

    package var hasExperts: Bool { mlps.contains { $0.experts != nil } }

    package var modules: [Module] {
        unique(mixers.flatMap(\.modules)) + unique(mlps.flatMap(\.modules)) + (perLayer?.modules ?? [])
    }

    /// The distinct modules that can have adapters: the linear layers, then the experts' matrices.
    package var trainable: [Module] { modules + unique(mlps.flatMap { $0.experts?.modules ?? [] }) }

    /// Returns the index of the block whose keys and values this block reuses, or nil if it reuses none.
    package func keysOf(_ block: Int) -> Int? {
        if case .attention(let mixer) = mixers[layers[block]] { mixer.keysOf } else { nil }
    }

    /// The largest useful LoRA rank: the largest min(inputs, outputs) of a matrix that can have adapters.
    package var largestRank: Int {
        kinds.flatMap { block in
            block.trainable.map { min(block.dimensions($0).inputs, block.dimensions($0).outputs) }
        }.max() ?? 1
    }

    package var owners: Set<Int> {
        Set(mixers.indices.compactMap { kind in layers.firstIndex(of: kind).flatMap(keysOf) })
    }

    /// Whether the blocks that reuse keys and values are consistent. Such a block must have no gate. It must reuse the keys and values of an earlier
    /// block, which computes them itself and in the same shape.
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

    package var attentionHeads: Int {
        mixers.map { if case .attention(let mixer) = $0 { mixer.numAttentionHeads } else { 1 } }.max() ?? 1
    }

    package var headsPerKey: Int {
        mixers.map { if case .attention(let a) = $0 { a.numAttentionHeads / a.numKeyValueHeads } else { 1 } }.max() ?? 1
    }

    package var mixerWidth: Int {
        mixers.map { $0.mixerWidth(hidden: hiddenSize) }.max() ?? hiddenSize
    }

    package var isRecurrent: Bool {
        mixers.contains { if case .attention = $0 { false } else { true } }
    }

    /// Whether the architecture is valid: for example, all sizes are within bounds and every block is complete. The bounds prevent integer overflow
    /// in products of sizes.
    package var isConsistent: Bool {
        let widths = [hiddenSize, vocabSize]
        let factors = [rmsNormEps, embeddingScale, finalLogitSoftcapping].compactMap { $0 }
        return (1...(1 << 12)).contains(numHiddenLayers) && widths.allSatisfy { (1...Bounds.width).contains($0) }
            && factors.allSatisfy { Bounds.numbers.contains(Double($0)) } && mlps.allSatisfy(\.isConsistent)
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

private func unique<T: Equatable>(_ all: [T]) -> [T] {
    all.reduce(into: []) { if !$0.contains($1) { $0.append($1) } }
}
