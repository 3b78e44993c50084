import MLX
import MeSPBundle

/// Qwen3.5's gated delta net. It computes y from the projections qkv, z, b and a, for each head:
///
///     q, k, v = silu(conv(qkv))        q̂ = q r_q / key_dim        k̂ = k r_k / √key_dim        r = 1 / √(mean(x²) + 10⁻⁶ / key_dim)
///     κ = −exp(A_log) softplus(a + dt_bias)        β = σ(b)        o = the gated delta rule of q̂, k̂, v, κ, β
///     y = RMSNorm(o) ∘ silu(z)
///
/// r_q and r_k are r of x = q and x = k. Each key head serves value_heads / key_heads consecutive value heads.
package struct GatedDeltaNet {
    let keyHeads, valueHeads: Int
    let keyDim, valueDim: Int
    /// The convolution of q, k and v, with F = 2 · key_heads · key_dim + value_heads · value_dim features.
    let convolution: CausalConvolution
    /// A_log and dt_bias, `[value_heads]` each.
    let aLog, dtBias: MLXArray
    let norm: RMSNorm

    /// The gradients that later tokens pass to earlier tokens.
    struct CarriedGradients: Arrays {
        /// The gradient of S, `[value_heads, key_dim, value_dim]`.
        var memory: MLXArray
        /// The gradient of the convolution's output for the first K − 1 of the later tokens, `[K − 1, F]`.
        var convolved: MLXArray

        var arrays: [MLXArray] { [memory, convolved] }
    }

    var noCarriedGradients: CarriedGradients {
        CarriedGradients(
            memory: MLXArray.zeros([valueHeads, keyDim, valueDim]), convolved: convolution.start(dtype: .float32))
    }

    func start(dtype: DType) -> MixerState.Recurrent {
        .init(tail: convolution.start(dtype: dtype), memory: MLXArray.zeros([valueHeads, keyDim, valueDim]))
    }

    /// Returns an estimate of the memory in bytes that one key head takes: three times the size of its largest array.
    func bytesOfHead(_ length: Int) -> Int {
        3
            * Self.arrayBytes(
                keyDim: keyDim, valueDim: valueDim, valueHeadsOfKey: valueHeads / keyHeads, length: length)
    }

    static func arrayBytes(keyDim: Int, valueDim: Int, valueHeadsOfKey: Int, length: Int) -> Int {
        4 * length * max(keyDim, valueHeadsOfKey * max(keyDim, valueDim, ChunkDecays.chunk))
    }

    // MARK: - o

    /// - Parameters:
    ///   - qkv: the results of `inputs` of these heads
    ///   - b, a: `[n, value_heads]`
    func rule(_ heads: Range<Int>, qkv: [MLXArray], b: MLXArray, a: MLXArray) -> GatedDeltaRule {
        GatedDeltaRule(
            q: qkv[0], k: qkv[1], v: qkv[2], logDecay: Self.logDecay(decay(heads, a)), beta: beta(heads, b))
    }

    func valueHeads(of heads: Range<Int>) -> Range<Int> {
        let each = valueHeads / keyHeads
        return heads.lowerBound * each..<heads.upperBound * each
    }

    private func decay(_ heads: Range<Int>, _ a: MLXArray) -> [MLXArray] {
        let values = valueHeads(of: heads)
        return [a[0..., values], dtBias[values], aLog[values]].map { $0.asType(.float32) }
    }

    private static let logDecay = Fused { -exp($0[2]) * logAddExp($0[0] + $0[1], 0 as Float) }
    private static let logDecayBackward = Fused { -exp($0[2]) * sigmoid($0[0] + $0[1]) * $0[3] }

    private func beta(_ heads: Range<Int>, _ b: MLXArray) -> MLXArray {
        sigmoid(b[0..., valueHeads(of: heads)].asType(.float32))
    }

    func inputs(_ heads: Range<Int>) -> [Input] {
        func input(_ heads: Range<Int>, _ dim: Int, start: Int, scale: Float?) -> Input {
            let features = start + heads.lowerBound * dim..<start + heads.upperBound * dim
            return Input(
                features: features, dim: dim, convolution: CausalConvolution(weight: convolution.weight[features]),
                norm: scale.map {
                    RMSNorm(weight: .of([Float](repeating: $0, count: dim)), eps: 1e-6 / Float(dim))
                })
        }
        let (keys, scale) = (keyHeads * keyDim, 1 / Float(keyDim))
        return [
            input(heads, keyDim, start: 0, scale: scale),
            input(heads, keyDim, start: keys, scale: scale.squareRoot()),
            input(valueHeads(of: heads), valueDim, start: 2 * keys, scale: nil),
        ]
    }

    /// q, k or v of some heads:  norm(silu(conv(x))). v has no norm.
    struct Input {
        let features: Range<Int>
        let dim: Int
        let convolution: CausalConvolution
        let norm: RMSNorm?

        func callAsFunction(_ qkv: MLXArray, tail: MLXArray) -> MLXArray {
            let x = activated(convolution(qkv[0..., features], tail: tail[0..., features]))
            return norm.map { $0(x) } ?? x
        }

        /// Returns the gradient of the columns `features` of qkv, in float32.
        /// - Parameter carried: these columns of `CarriedGradients.convolved`; replaced by the gradient for the tokens before
        func backward(_ qkv: MLXArray, tail: MLXArray, dy: MLXArray, carried: inout MLXArray) -> MLXArray {
            let convolved = convolution(qkv[0..., features], tail: tail[0..., features])
            let d = norm.map { $0.backward(activated(convolved), dy: dy) } ?? dy
            let dConvolved = Self.siluBackward([d.reshaped(convolved.shape), convolved])
            let dx = convolution.backward(dy: dConvolved, carried: carried)
            let count = carried.dim(0)
            carried =
                dConvolved.dim(0) < count
                ? concatenated([dConvolved, carried])[0..<count] : contiguous(dConvolved[0..<count])
            return dx
        }

        private func activated(_ x: MLXArray) -> MLXArray { Self.silu([x]).reshaped([x.dim(0), -1, dim]) }

        private static let silu = Fused { Activation.silu.values($0[0]).f }
        private static let siluBackward = Fused { $0[0] * Activation.silu.values($0[1]).slope }
    }

    /// Returns the gradients of b and a of some heads:
    ///
    ///     db = β (1 − β) dβ        da = −exp(A_log) σ(a + dt_bias) dκ
    func gatesBackward(
        _ heads: Range<Int>, b: MLXArray, a: MLXArray, betaDBeta: MLXArray, dLogDecay: MLXArray
    ) -> [MLXArray] {
        [(1 - beta(heads, b)) * betaDBeta, Self.logDecayBackward(decay(heads, a) + [dLogDecay])]
    }

    /// Returns the parts of `CarriedGradients` of some heads: of S, and of the outputs for q, k and v.
    func parts(_ heads: Range<Int>, _ carried: CarriedGradients) -> [MLXArray] {
        [carried.memory[valueHeads(of: heads)]] + inputs(heads).map { carried.convolved[0..., $0.features] }
    }

    /// Returns the columns of some heads, `[n, value heads of these, value_dim]`.
    func byHead(_ x: MLXArray, _ heads: Range<Int>) -> MLXArray {
        let values = valueHeads(of: heads)
        return byHead(x[0..., values.lowerBound * valueDim..<values.upperBound * valueDim])
    }

    // MARK: - y = RMSNorm(o) ∘ silu(z)

    func gatedNorm(o: MLXArray, z: MLXArray) -> MLXArray {
        Activation.silu.gated(gate: z.asType(.float32), up: norm(byHead(o)).reshaped(z.shape))
    }

    func gatedNormBackward(o: MLXArray, z: MLXArray, dy: MLXArray) -> (dO: MLXArray, dZ: MLXArray) {
        let (byHead, z) = (byHead(o), z.reshaped([z.dim(0), -1, valueDim]))
        let d = Activation.silu.gatedBackward(gate: [z], up: [norm(byHead)], dAct: dy.reshaped(z.shape))
        return (norm.backward(byHead, dy: d.dUp).reshaped(o.shape), d.dGate.reshaped(o.shape))
    }

    private func byHead(_ x: MLXArray) -> MLXArray { x.asType(.float32).reshaped([x.dim(0), -1, valueDim]) }
}
