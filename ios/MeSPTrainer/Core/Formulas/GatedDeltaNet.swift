import MLX

/// Qwen3.5's gated delta net, from the projections qkv, z, b and a, by head:
///
///     q, k, v = silu(conv(qkv))        q̂ = q r_q / dk        k̂ = k r_k / √dk        r = 1 / √(mean(x²) + 10⁻⁶)
///     l = −exp(A_log) softplus(a + dt_bias)        β = σ(b)        o = the gated delta rule of q̂, k̂, v, l, β
///     y = RMSNorm(o) ∘ silu(z)
///
/// A key head serves value_heads / key_heads value heads, which lie behind each other.
struct GatedDeltaNet {
    let keyHeads, valueHeads: Int
    /// dk and dv
    let keyDim, valueDim: Int
    /// Of all q, k and v: D = 2 · key_heads · dk + value_heads · dv features.
    let convolution: CausalConvolution
    /// `[value_heads]`
    let aLog, dtBias: MLXArray
    /// Of o, by head: its weight is `[dv]`.
    let norm: RMSNorm

    /// What tokens leave to those behind them.
    struct State {
        /// qkv of the last K − 1, `[K − 1, D]`.
        var tail: MLXArray
        /// S of the gated delta rule, `[value_heads, dk, dv]` in float32.
        var memory: MLXArray
    }

    /// The state before the first token.
    /// - Parameter dtype: that of qkv
    func start(dtype: DType) -> State {
        State(tail: convolution.start(dtype: dtype), memory: MLXArray.zeros([valueHeads, keyDim, valueDim]))
    }

    /// The key heads of a tile, such that what has a row a token takes some `bytes`.
    func tile(length: Int, bytes: Int) -> Int {
        let features = max(keyDim, valueHeads / keyHeads * max(keyDim, valueDim, GatedDeltaRule.chunk))
        return min(keyHeads, max(1, bytes / (4 * length * features)))
    }

    /// - Parameters:
    ///   - qkv: `[n, D]`
    ///   - b, a: `[n, value_heads]`
    ///   - state: of the tokens before; becomes that of the last of these
    ///   - tile: key heads at a time
    /// - Returns: o `[n, value_heads · dv]`, in float32; evaluated where there is more than one tile.
    func callAsFunction(qkv: MLXArray, b: MLXArray, a: MLXArray, state: inout State, tile: Int) -> MLXArray {
        let before = state
        let parts = tiles(of: keyHeads, size: tile).map { heads in
            let part = Part(self, heads)
            var memory = before.memory[part.values]
            let o = part.rule(part.convolved(qkv, tail: before.tail), b: b, a: a, pace: .chained)(state: &memory)
            if heads.count < keyHeads { eval(o, memory) }
            return (o: o.reshaped([o.dim(0), -1]), memory: memory)
        }
        state.memory = concatenated(parts.map(\.memory))
        state.tail = convolution.tail(after: qkv, tail: before.tail)
        return concatenated(parts.map(\.o), axis: -1)
    }

    /// y `[n, value_heads · dv]`, in float32, of z and o, alike.
    func output(o: MLXArray, z: MLXArray) -> MLXArray {
        Activation.silu.gated(gate: z.asType(.float32), up: norm(byHead(o)).reshaped(z.shape))
    }

    /// `[n, heads · dv]` to `[n, heads, dv]`, in float32.
    private func byHead(_ x: MLXArray) -> MLXArray { x.asType(.float32).reshaped([x.dim(0), -1, valueDim]) }

    /// The derivative of y:
    ///
    ///     dz = dy ∘ RMSNorm(o) ∘ silu′(z)        dRMSNorm(o) = dy ∘ silu(z)
    ///
    /// - Parameter dy: like o and z, `[T, value_heads · dv]`
    /// - Returns: dO and dz, in float32, evaluated.
    func outputBackward(o: MLXArray, z: MLXArray, dy: MLXArray) -> (dO: MLXArray, dZ: MLXArray) {
        let byHead = byHead(o)
        let d = Activation.silu.gatedBackward(
            gate: [self.byHead(z)], up: [norm(byHead)], dAct: self.byHead(dy))
        let (dO, dZ) = (norm.backward(byHead, dy: d.dUp).reshaped(o.shape), d.dGate.reshaped(z.shape))
        eval(dO, dZ)
        return (dO, dZ)
    }

    /// The derivative of o, of a whole sequence. What was made on the way to o is made again, for a tile of key heads.
    ///
    ///     db = β (1 − β) dβ        da = −exp(A_log) σ(a + dt_bias) dl
    ///
    /// - Parameters:
    ///   - qkv: `[T, D]`
    ///   - b, a: `[T, value_heads]`
    ///   - dO: `[T, value_heads · dv]`, in float32
    ///   - tile: key heads at a time
    /// - Returns: the gradients of qkv, b and a, in float32, evaluated.
    func backward(qkv: MLXArray, b: MLXArray, a: MLXArray, dO: MLXArray, tile: Int, pace: Pace)
        -> (dQKV: MLXArray, dB: MLXArray, dA: MLXArray)
    {
        var inputs = [qkv, b, a, dO]
        var gradients = [[MLXArray]]()
        for heads in tiles(of: keyHeads, size: tile) {
            let d = Part(self, heads).backward(
                qkv: inputs[0], b: inputs[1], a: inputs[2], dO: inputs[3], pace: pace)
            inputs = pace.next(inputs, after: d)
            gradients.append(d)
        }
        func whole(_ indices: Range<Int>) -> MLXArray {
            concatenated(indices.flatMap { index in gradients.map { $0[index] } }, axis: -1)
        }
        let all = (whole(0..<3), whole(3..<4), whole(4..<5))
        eval(all.0, all.1, all.2)
        return all
    }

    /// Some of the key heads, with their value heads.
    private struct Part {
        let net: GatedDeltaNet
        let heads, values: Range<Int>

        init(_ net: GatedDeltaNet, _ heads: Range<Int>) {
            let each = net.valueHeads / net.keyHeads
            (self.net, self.heads, values) = (net, heads, heads.lowerBound * each..<heads.upperBound * each)
        }

        /// The features of z and o.
        private var features: Range<Int> { values.lowerBound * net.valueDim..<values.upperBound * net.valueDim }

        /// The features of qkv.
        private func features(_ x: MLXArray, axis: Int) -> MLXArray {
            let (dk, count) = (net.keyDim, net.keyHeads)
            let q = heads.lowerBound * dk..<heads.upperBound * dk
            let k = q.lowerBound + count * dk..<q.upperBound + count * dk
            let v = 2 * count * dk + features.lowerBound..<2 * count * dk + features.upperBound
            guard heads.count < count else { return x }
            return concatenated([q, k, v].map { axis == 0 ? x[$0] : x[0..., $0] }, axis: axis)
        }

        private var convolution: CausalConvolution {
            CausalConvolution(weight: features(net.convolution.weight, axis: 0))
        }

        /// conv(qkv) of these heads
        func convolved(_ qkv: MLXArray, tail: MLXArray) -> MLXArray {
            convolution(features(qkv, axis: 1), tail: features(tail, axis: 1))
        }

        /// silu(conv(qkv)) by head: q and k `[n, heads, dk]`, v `[n, values, dv]`.
        private func split(_ convolved: MLXArray) -> (q: MLXArray, k: MLXArray, v: MLXArray) {
            let (n, width) = (convolved.dim(0), heads.count * net.keyDim)
            let x = Self.silu([convolved])
            return (
                x[0..., ..<width].reshaped([n, heads.count, net.keyDim]),
                x[0..., width..<2 * width].reshaped([n, heads.count, net.keyDim]),
                x[0..., (2 * width)...].reshaped([n, values.count, net.valueDim])
            )
        }

        private static let silu = Fused { Activation.silu.values($0[0]).f }
        private static let siluBackward = Fused { $0[0] * Activation.silu.values($0[1]).slope }

        private var qNorm: RMSNorm { norm(scale: 1 / Float(net.keyDim)) }
        private var kNorm: RMSNorm { norm(scale: 1 / Float(net.keyDim).squareRoot()) }
        private func norm(scale: Float) -> RMSNorm {
            RMSNorm(weight: MLXArray.full([net.keyDim], values: MLXArray(scale)), eps: 1e-6)
        }

        /// a + dt_bias, and −exp(A_log).
        private func decay(_ a: MLXArray) -> (x: MLXArray, rate: MLXArray) {
            let (aLog, dtBias) = (net.aLog[values].asType(.float32), net.dtBias[values].asType(.float32))
            return (a[0..., values].asType(.float32) + dtBias, -exp(aLog))
        }

        private func beta(_ b: MLXArray) -> MLXArray { sigmoid(b[0..., values].asType(.float32)) }

        func rule(_ convolved: MLXArray, b: MLXArray, a: MLXArray, pace: Pace) -> GatedDeltaRule {
            let (q, k, v) = split(convolved)
            let (x, rate) = decay(a)
            return GatedDeltaRule(
                q: qNorm(q), k: kNorm(k), v: v, decay: rate * logAddExp(x, 0 as Float), beta: beta(b), pace: pace)
        }

        /// dq, dk and dv of qkv, db and da, `[T, features]`.
        func backward(qkv: MLXArray, b: MLXArray, a: MLXArray, dO: MLXArray, pace: Pace) -> [MLXArray] {
            let tail = net.convolution.start(dtype: qkv.dtype)
            let d = rule(convolved(qkv, tail: tail), b: b, a: a, pace: pace).backward(dO: net.byHead(dO[0..., features]))

            let c = convolved(qkv, tail: tail)
            let (q, k, _) = split(c)
            let dC = concatenated(
                [qNorm.backward(q, dy: d.dq), kNorm.backward(k, dy: d.dk), d.dv].map { $0.reshaped([$0.dim(0), -1]) },
                axis: -1)
            let dX = convolution.backward(dy: Self.siluBackward([dC, c]))
            let width = heads.count * net.keyDim
            let (x, rate) = decay(a)
            return [
                dX[0..., ..<width], dX[0..., width..<2 * width], dX[0..., (2 * width)...],
                (1 - beta(b)) * d.betaDBeta, rate * sigmoid(x) * d.dDecay,
            ]
        }
    }
}
