import MLX
import MeSPBundle

package enum MixerState {
    case attention(KeyValues)
    case recurrent(Recurrent, count: Int)
    /// b ∘ u of the last K − 1 tokens, for a convolution over K tokens.
    case shortConvolution(tail: MLXArray, count: Int)
    case shared(count: Int)

    package struct Recurrent: Arrays {
        /// The convolution's input for the last K − 1 tokens, `[K − 1, F]`.
        var tail: MLXArray
        /// S of the gated delta rule `[value_heads, key_dim, value_dim]`, or of the state space model `[heads, P, N]`, in float32.
        var memory: MLXArray

        var arrays: [MLXArray] { [tail, memory] }
    }

    /// Keys after RoPE, and values, `[kv_heads, capacity, head_dim]` each. The first `count` of the `capacity` tokens are in use.
    package struct KeyValues: Arrays {
        private(set) var keys: MLXArray
        private(set) var values: MLXArray
        private(set) var count = 0
        /// The number of tokens by which the capacity grows when a single token is appended and no capacity is free.
        static let room = 16

        init(_ mixer: AttentionMixer, dtype: DType) {
            keys = MLXArray.zeros([mixer.numKeyValueHeads, 0, mixer.headDim], dtype: dtype)
            values = keys
        }

        var arrays: [MLXArray] { [keys, values] }

        var size: Int { count == 0 ? 0 : (keys.nbytes + values.nbytes) / keys.dim(1) * count }

        /// Appends keys and values, `[kv_heads, n, head_dim]` each. A single token is written in place if there is free capacity.
        mutating func append(_ newKeys: MLXArray, _ newValues: MLXArray) {
            let n = newKeys.dim(1)
            if n == 1, count < keys.dim(1) {
                // These are new array objects, because other code may hold the old ones.
                (keys, values) = (keys.view(dtype: keys.dtype), values.view(dtype: values.dtype))
                keys[0..., count..<count + 1] = newKeys
                values[0..., count..<count + 1] = newValues
            } else {
                let room =
                    n == 1
                    ? [MLXArray.zeros([newKeys.dim(0), Self.room - 1, newKeys.dim(2)], dtype: newKeys.dtype)] : []
                keys = concatenated([keys[0..., 0..<count], newKeys] + room, axis: 1)
                values = concatenated([values[0..., 0..<count], newValues] + room, axis: 1)
            }
            count += n
        }

        /// Views would keep the whole arrays alive.
        mutating func cut(to count: Int) {
            (keys, values) = (contiguous(keys[0..., 0..<count]), contiguous(values[0..., 0..<count]))
            eval(keys, values)
            self.count = count
        }

        init(keys: MLXArray, values: MLXArray) { (self.keys, self.values, count) = (keys, values, keys.dim(1)) }

        subscript(rows: Range<Int>) -> KeyValues {
            KeyValues(keys: keys[0..., rows], values: values[0..., rows])
        }
    }

    init(_ weights: BlockWeights, dtype: DType) {
        switch weights.shape.mixer {
        case .attention(let mixer):
            self = mixer.keysOf == nil ? .attention(KeyValues(mixer, dtype: dtype)) : .shared(count: 0)
        case .gatedDeltaNet(let mixer):
            self = .recurrent(weights.gatedDeltaNet(mixer).start(dtype: dtype), count: 0)
        case .shortConvolution:
            self = .shortConvolution(tail: weights.shortConvolution.start(dtype: .float32), count: 0)
        case .mamba2(let mixer): self = .recurrent(weights.mamba2(mixer).start(dtype: dtype), count: 0)
        }
    }

    var count: Int {
        switch self {
        case .attention(let cache): cache.count
        case .recurrent(_, let count), .shortConvolution(_, let count), .shared(let count): count
        }
    }

    /// Whether the state cannot be cut back to fewer tokens.
    var isRecurrent: Bool {
        switch self {
        case .attention, .shared: false
        case .recurrent, .shortConvolution: true
        }
    }

    mutating func append(keys: MLXArray, values: MLXArray) -> KeyValues {
        guard case .attention(var cache) = self else { preconditionFailure("another mixer's state") }
        cache.append(keys, values)
        self = .attention(cache)
        return cache
    }

    var keysAndValues: KeyValues? {
        if case .attention(let cache) = self { cache } else { nil }
    }

    package var arrays: [MLXArray] {
        switch self {
        case .attention(let cache): [cache.keys, cache.values].map { $0[0..., 0..<cache.count] }
        case .recurrent(let state, _): state.arrays
        case .shortConvolution(let tail, _): [tail]
        case .shared: []
        }
    }

    var size: Int {
        if case .attention(let cache) = self { cache.size } else { arrays.reduce(0) { $0 + $1.nbytes } }
    }

    func canBeCut(to count: Int) -> Bool { isRecurrent ? count == self.count : count <= self.count }

    mutating func cut(to count: Int) {
        if case .shared = self { self = .shared(count: min(count, self.count)) }
        guard case .attention(var cache) = self, count < self.count else { return }
        cache.cut(to: count)
        self = .attention(cache)
    }
}
