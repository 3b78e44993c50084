import MLX

/// A block's state after some tokens, for the tokens that follow.
package enum MixerState {
    case attention(KeyValues)
    case gatedDeltaNet(GatedDeltaNet.State, count: Int)
    /// b ∘ u of the last tokens.
    case shortConvolution(tail: MLXArray, count: Int)
    /// Of attention over another block's keys and values, which that has.
    case shared(count: Int)

    /// Keys after RoPE, and values: `[kv_heads, n, head_dim]` each.
    package struct KeyValues {
        var keys: MLXArray
        var values: MLXArray

        init(_ mixer: AttentionMixer, dtype: DType) {
            keys = MLXArray.zeros([mixer.numKeyValueHeads, 0, mixer.headDim], dtype: dtype)
            values = keys
        }

        init(keys: MLXArray, values: MLXArray) { (self.keys, self.values) = (keys, values) }

        /// Those of some positions.
        subscript(rows: Range<Int>) -> KeyValues {
            KeyValues(keys: keys[0..., rows], values: values[0..., rows])
        }
    }

    /// Before the first token.
    init(_ weights: BlockWeights, dtype: DType) {
        switch weights.shape.mixer {
        case .attention(let mixer):
            self = mixer.keysOf == nil ? .attention(KeyValues(mixer, dtype: dtype)) : .shared(count: 0)
        case .gatedDeltaNet(let mixer):
            self = .gatedDeltaNet(weights.gatedDeltaNet(mixer).start(dtype: dtype), count: 0)
        case .shortConvolution: self = .shortConvolution(tail: weights.shortConvolution.start(), count: 0)
        }
    }

    /// The tokens seen.
    var count: Int {
        switch self {
        case .attention(let cache): cache.keys.dim(1)
        case .gatedDeltaNet(_, let count), .shortConvolution(_, let count), .shared(let count): count
        }
    }

    /// Whether it has not each token by itself, so that none can be taken away.
    var isRecurrent: Bool {
        switch self {
        case .attention, .shared: false
        case .gatedDeltaNet, .shortConvolution: true
        }
    }

    /// Of attention, unless they are another block's.
    var keysAndValues: KeyValues? {
        if case .attention(let cache) = self { cache } else { nil }
    }

    package var arrays: [MLXArray] {
        switch self {
        case .attention(let cache): [cache.keys, cache.values]
        case .gatedDeltaNet(let state, _): [state.tail, state.memory]
        case .shortConvolution(let tail, _): [tail]
        case .shared: []
        }
    }

    /// In bytes.
    var size: Int { arrays.reduce(0) { $0 + $1.nbytes } }

    /// Whether it has what the first `count` tokens left.
    func canBeCut(to count: Int) -> Bool { isRecurrent ? count == self.count : count <= self.count }

    /// Keeps what the first tokens left. Copies, as a view would keep all.
    mutating func cut(to count: Int) {
        if case .shared = self { self = .shared(count: min(count, self.count)) }
        guard case .attention(var cache) = self, count < self.count else { return }
        (cache.keys, cache.values) = (
            contiguous(cache.keys[0..., 0..<count]), contiguous(cache.values[0..., 0..<count])
        )
        eval(cache.keys, cache.values)
        self = .attention(cache)
    }
}
