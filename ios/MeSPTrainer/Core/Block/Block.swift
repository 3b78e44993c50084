import MLX
import MeSPAdapters
import MeSPBundle

/// A transformer block with its weights and LoRA parameters:
///
///     mixer_in = RMSNorm(x)                     mlp_in = RMSNorm(x_mid)
///     x_mid = x + mixer(mixer_in)               y = x_mid + down(act(gate(mlp_in)) ∘ up(mlp_in))
///
/// In a block with post-norms, the outputs of the mixer and of the MLP go through an RMSNorm before they are added to x and x_mid. x, y and the
/// outputs of the mixer's input projections have the bundle's dtype.
package struct Block {
    package var weights: BlockWeights
    var lora: MLXArray
    var dora: DoRA?
    let layout: LoRALayout
    let scale: Float
    package var schedule: Schedule
    /// The matrices of the adapters whose gradients the backward pass computes.
    var wanted: LoRALinear.Wanted
    var keptLayers: [Projection: LoRALinear]?
    /// The rows of each record, see `Example.records`; nil for one record.
    package var records: [Range<Int>]?
    /// p `[T, size]`, the tokens' embeddings for this layer; nil for a model without per-layer embeddings.
    var perLayerEmbeddings: MLXArray?
    /// The keys and values of another block, of a whole sequence.
    var shared: MixerState.KeyValues?
    /// The keys and values of another block, with an element for each sequence; used if `shared` is nil.
    var sharedStates = [MixerState.KeyValues]()
    package var dropout: DropoutKey?
    /// The position in the sequence of the first token of x. Dropout's masks depend on it.
    private var firstToken = 0

    package init(weights: BlockWeights, lora: MLXArray, layout: LoRALayout, scale: Float, schedule: Schedule) {
        (self.weights, self.lora, self.layout, self.scale, self.schedule) = (weights, lora, layout, scale, schedule)
        wanted = layout.freezesA ? .b : .all
    }

    func records(_ length: Int) -> [Range<Int>] { records ?? [0..<length] }

    /// The arguments of the block function after the weights. With packed records, the last one is the position at which each token's record begins.
    var sideInputs: [MLXArray] {
        let starts = records.map { records in
            MLXArray.of(records.flatMap { Array(repeating: Int32($0.lowerBound), count: $0.count) })
        }
        return [perLayerEmbeddings, shared?.keys, shared?.values].compactMap { $0?.expandedDimensions(axis: 0) }
            + [starts].compactMap { $0 }
    }

    func matrices(_ projection: Projection) -> LoRAMatrices? {
        if let dora { return dora.scaled(projection) }
        return layout.matrices(projection, in: lora)
    }

    func tiled<Formula>(_ formula: Formula) -> Tiled<Formula> { Tiled(formula, schedule) }

    func linear(_ projection: Projection) -> Tiled<LoRALinear> { tiled(layer(projection)) }

    func layer(_ projection: Projection) -> LoRALinear {
        keptLayers?[projection]
            ?? LoRALinear(
                weight: weights.matrix(projection), bias: weights.bias(projection),
                lora: matrices(projection), scale: scale,
                dropout: dropoutKey(projection).map { Dropout(key: $0, firstToken: firstToken) })
    }

    func layer(_ weight: QuantizedMatrix, _ projection: Projection, expert: Int, tokens: [Int]) -> LoRALinear {
        let lora = matrices(projection).map { LoRAMatrices(a: $0.a[expert], b: $0.b[expert]) }
        let dropout = dropoutKey(projection).map {
            Dropout(key: $0[1 + expert], tokens: tokens.map { firstToken + $0 })
        }
        return LoRALinear(weight: weight, bias: nil, lora: lora, scale: scale, dropout: dropout)
    }

    private func dropoutKey(_ projection: Projection) -> DropoutKey? {
        guard let key = dropout else { return nil }
        let module = layout.block.place(projection).module
        return layout.block.trainable.firstIndex(of: module).map { key[$0] }
    }

    func from(_ token: Int) -> Block {
        var block = self
        block.firstToken += token
        return block
    }
}

/// The forward pass of one block over a whole sequence x `[1, T, hidden]`. The returned arrays may not be evaluated yet.
package protocol BlockForward {
    func output(_ x: MLXArray) throws -> MLXArray
    func intermediates(_ x: MLXArray) throws -> Intermediates
    func outputs(_ x: MLXArray) throws -> BlockOutputs
}
