import MeSPSentences

struct FunctionSignature: Equatable {
    let inputs, outputs: [ArrayType]

    static let isAnother = MeSPError("it does not have the inputs and outputs of a block")
}

extension FunctionSignature {
    /// Creates the signature that the function of a block must have.
    ///
    /// - Parameters:
    ///   - words: the length of the block's weight file in 32-bit words.
    init(of block: BlockShape, dtype: ElementType, words: Int, length: Int, rank: Int, packed: Bool) throws {
        let (architecture, listed) = (block.architecture, try AllowedPrimitives.list.get().signature)
        let lora = block.modules.map(block.dimensions).reduce(0) { $0 + rank * ($1.inputs + $1.outputs) }
        var sizes = [
            "1": 1, "length": length, "hidden": architecture.hiddenSize, "intermediate": block.mlp.intermediateSize,
            "lora": lora, "words": words,
            "mixer_width": block.mixer.mixerWidth(hidden: architecture.hiddenSize),
        ]
        let ofMixer: [String]
        var given = architecture.perLayer == nil ? [] : listed.perLayer
        sizes["per_layer"] = architecture.perLayer?.size
        switch block.mixer {
        case .attention(let mixer):
            sizes["heads"] = mixer.numAttentionHeads
            sizes["kv_heads"] = mixer.numKeyValueHeads
            sizes["head_dim"] = mixer.headDim
            sizes["query"] = mixer.headDim + mixer.gateDim
            ofMixer = listed.attention
            if mixer.keysOf != nil { given += listed.shared }
        case .gatedDeltaNet(let mixer):
            sizes["channels"] = mixer.convolutionWidth
            sizes["ba"] = 2 * mixer.numValueHeads
            ofMixer = listed.gatedDeltaNet
        case .shortConvolution:
            ofMixer = listed.shortConvolution
        case .mamba2(let mixer):
            sizes["channels"] = mixer.convolutionWidth
            sizes["heads"] = mixer.numHeads
            ofMixer = listed.mamba2
        }
        func array(_ text: String) throws -> ArrayType {
            let words = text.split(separator: " ").map(String.init)
            let element = words[0] == "dtype" ? dtype : ElementType(rawValue: words[0])
            let shape = words.dropFirst().compactMap { sizes[$0] }
            guard let element, shape.count == words.count - 1 else { preconditionFailure("no array is \(text)") }
            return ArrayType(shape: shape, element: element)
        }
        let outputs = listed.first + ofMixer + listed.then + (architecture.postNorms ? listed.postNorms : [])
        let inputs = listed.inputs + given + (packed ? listed.packed : [])
        self.init(inputs: try inputs.map(array), outputs: try outputs.map(array))
    }
}
