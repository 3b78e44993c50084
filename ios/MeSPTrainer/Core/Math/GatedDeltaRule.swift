import MLX

/// The gated delta rule of some heads ([Yang et al.](https://arxiv.org/abs/2412.06464)). For each token, a state S `[key_dim, value_dim]` is updated
/// with the key k and the value v, and read with the query q:
///
///     S ← exp(κ) S        d = β (v − Sᵀ k)        S ← S + k dᵀ        o = Sᵀ q
///
/// The rule is computed in chunks of C tokens, which are the rows of Q, K, V, D and O. S is the state before a chunk, and S₊ the state after it:
///
///     Γ_ij = exp(κ_{j+1} + … + κ_i) for i ≥ j, else 0        γ_i = exp(κ_1 + … + κ_i)        δ_j = Γ_Cj
///     A = Γ ∘ K Kᵀ below the diagonal        P = Γ ∘ Q Kᵀ        M = (I + β A)⁻¹
///     U = M β V        W = M β γ K        D = U − W S        O = γ Q S + P D        S₊ = γ_C S + (δ K)ᵀ D
///
/// β, γ and δ are columns. A key head has one or several value heads. Arrays are `[chunks, key_heads, value heads of each, …]`. The third axis has
/// size 1 if the value heads of a key head share an array.
package struct GatedDeltaRule {
    /// Q and K, `[…, C, key_dim]` each.
    private let q, k: MLXArray
    /// V, `[…, C, value_dim]`.
    private let v: MLXArray
    /// κ and β, `[…, C, 1]` each.
    private let logDecay, beta: MLXArray
    let length: Int

    /// Divides the tokens into chunks. All arrays are in float32.
    /// - Parameters:
    ///   - q, k: `[n, key_heads, key_dim]`
    ///   - v: `[n, value_heads, value_dim]`; the value heads of a key head are consecutive
    ///   - logDecay: κ ≤ 0, `[n, value_heads]`
    ///   - beta: `[n, value_heads]`
    init(q: MLXArray, k: MLXArray, v: MLXArray, logDecay: MLXArray, beta: MLXArray) {
        let heads = k.dim(1)
        func chunked(_ x: MLXArray) -> MLXArray { Self.chunked(x, keyHeads: heads) }
        (self.q, self.k, self.v) = (chunked(q), chunked(k), chunked(v))
        (self.logDecay, self.beta) = (
            chunked(logDecay.expandedDimensions(axis: -1)), chunked(beta.expandedDimensions(axis: -1))
        )
        length = k.dim(0)
    }

    // MARK: - Forward

    /// Returns o `[1, value_heads, value_dim]` of one token, in float32.
    /// - Parameter state: S before the token, `[value_heads, key_dim, value_dim]` in float32; replaced by S after it
    func step(state: inout MLXArray) -> MLXArray {
        var s = exp(logDecay) * byKeyHead(state)
        let d = beta * (v - matmul(k, s))
        s = addMM(s, transposed(k), d)
        state = s.reshaped(state.shape)
        return byToken(matmul(q, s))
    }

    /// Returns o `[n, value_heads, value_dim]`, in float32.
    /// - Parameter state: S before the tokens; replaced by S after them
    func output(_ c: Chunks, state: inout MLXArray) -> MLXArray {
        let (d, states, s) = corrections(c, w: w(c), state: state)
        state = s.reshaped(state.shape)
        return byToken(addMM(c.start * matmul(q, states), c.gamma * c.qk, d))
    }

    /// W
    func w(_ c: Chunks) -> MLXArray { matmul(c.m, beta * c.start * k) }

    /// Returns D and S of all chunks, and S after them.
    func corrections(
        _ c: Chunks, w: MLXArray, state: MLXArray
    ) -> (d: MLXArray, states: MLXArray, s: MLXArray) {
        let (u, w, kEnd, whole) = (each(matmul(c.m, beta * v)), each(w), each(transposed(c.end * k)), each(c.whole))
        var (d, states, s) = ([MLXArray](), [MLXArray](), byKeyHead(state))
        for n in u.indices {
            states.append(s)
            d.append(addMM(u[n], w[n], s, alpha: -1))
            s = addMM(whole[n] * s, kEnd[n], d[n])
        }
        return (concatenated(d), concatenated(states), s)
    }

    // MARK: - Backward

    // The gradients of q, k, v, κ and β. From the last chunk to the first:
    //
    //     dD = Pᵀ dO + δ K dS₊        dS = γ_C dS₊ + (γ Q)ᵀ dO − Wᵀ dD
    //
    // and for all chunks at once
    //
    //     Z = Mᵀ dD        dV = β Z        β dβ = rowsum(Z ∘ D)
    //     dP = dO Dᵀ        dA = −dV Dᵀ below the diagonal
    //     dQ = γ dO Sᵀ + (Γ ∘ dP) K
    //     dK = δ D dS₊ᵀ − γ dV Sᵀ + (Γ ∘ dA + (Γ ∘ dA)ᵀ) K + (Γ ∘ dP)ᵀ Q
    //
    // dQ and dK are summed over a key head's value heads. `ChunkDecays` computes dκ from
    //
    //     Γ ∘ dΓ = Γ ∘ (dP ∘ Q Kᵀ + dA ∘ K Kᵀ)        γ dγ = rowsum(Q ∘ γ dO Sᵀ − K ∘ γ dV Sᵀ)
    //     δ dδ = rowsum(K ∘ δ D dS₊ᵀ)        dγ_C = ⟨S, dS₊⟩

    /// Returns dD and dS₊ of all chunks.
    /// - Parameters:
    ///   - dO: `chunked`
    ///   - dState: the gradient of S after the tokens, replaced by the gradient of S before them
    func statesBackward(
        _ c: Chunks, w: MLXArray, _ dO: MLXArray, dState: inout MLXArray
    ) -> (dD: MLXArray, dStates: MLXArray) {
        let (pDO, kEnd) = (each(matmul(transposed(c.gamma * c.qk), dO)), each(c.end * k))
        let (qStart, w, dO, whole) = (each(transposed(c.start * q)), each(transposed(w)), each(dO), each(c.whole))
        var (dD, dStates) = ([MLXArray](), [MLXArray]())
        var dS = byKeyHead(dState)
        for n in pDO.indices.reversed() {
            dStates.insert(dS, at: 0)
            dD.insert(addMM(pDO[n], kEnd[n], dS), at: 0)
            dS = addMM(addMM(whole[n] * dS, qStart[n], dO[n]), w[n], dD[0], alpha: -1)
        }
        dState = dS.reshaped(dState.shape)
        return (concatenated(dD), concatenated(dStates))
    }

    func valuesBackward(_ c: Chunks, d: MLXArray, dD: MLXArray) -> (dv: MLXArray, betaDBeta: MLXArray) {
        let z = matmul(transposed(c.m), dD)
        return (beta * z, rowsum(z, d))
    }

    /// Returns γ_C dγ_C, Γ ∘ dP and Γ ∘ dA.
    func productsBackward(
        _ c: Chunks, _ dO: MLXArray, d: MLXArray, states: MLXArray, dv: MLXArray, dStates: MLXArray
    ) -> (inWhole: MLXArray, dP: MLXArray, dA: MLXArray) {
        (
            c.whole * dot(states, dStates), Self.product([matmul(dO, transposed(d)), c.gamma]),
            Self.product([matmul(dv, transposed(d)), c.gamma, -c.below])
        )
    }

    /// Returns dQ and its term of γ dγ.
    func queriesBackward(
        _ c: Chunks, _ dO: MLXArray, states: MLXArray, dP: MLXArray
    ) -> (dq: MLXArray, inStart: MLXArray) {
        let dQStart = c.start * matmul(dO, transposed(states))
        return (overValueHeads(addMM(dQStart, dP, k)), rowsum(q, dQStart))
    }

    /// Returns γ dV Sᵀ and its term of −γ dγ.
    func startBackward(_ c: Chunks, states: MLXArray, dv: MLXArray) -> (dk: MLXArray, inStart: MLXArray) {
        let gammaDVS = c.start * matmul(dv, transposed(states))
        return (gammaDVS, rowsum(k, gammaDVS))
    }

    /// Returns dK and dκ.
    /// - Parameter start: the result of `startBackward`
    func keysBackward(
        _ c: Chunks, d: MLXArray, dStates: MLXArray, dP: MLXArray, dA: MLXArray, inWhole: MLXArray,
        inQStart: MLXArray, start: (dk: MLXArray, inStart: MLXArray)
    ) -> (dk: MLXArray, dLogDecay: MLXArray) {
        let dKEnd = c.end * matmul(d, transposed(dStates))
        let inEnd = rowsum(k, dKEnd)
        let dk = overValueHeads(addMM(addMM(dKEnd - start.dk, dA + transposed(dA), k), transposed(dP), q))
        let dLogDecay = c.decays.backward(
            inGamma: Self.sumOfProducts([dP, c.qk, dA, c.kk]), inStart: inQStart - start.inStart, inEnd: inEnd,
            inWhole: inWhole)
        return (dk, dLogDecay)
    }

    private func overValueHeads(_ x: MLXArray) -> MLXArray { x.dim(2) == 1 ? x : x.sum(axis: 2, keepDims: true) }

    private func rowsum(_ x: MLXArray, _ y: MLXArray) -> MLXArray { (x * y).sum(axis: -1, keepDims: true) }

    /// Returns ⟨S, dS₊⟩ of each chunk, `[…, 1, 1]`, as a matrix product, which needs no array S ∘ dS₊.
    private func dot(_ x: MLXArray, _ y: MLXArray) -> MLXArray {
        let shape = Array(x.shape[..<3])
        return matmul(x.reshaped(shape + [1, -1]), y.reshaped(shape + [-1, 1]))
    }

    private static let product = Fused { $0.dropFirst().reduce($0[0]) { $0 * $1 } }
    private static let sumOfProducts = Fused { $0[0] * $0[1] + $0[2] * $0[3] }

    // MARK: - Chunks

    /// The arrays of all chunks that do not depend on a state.
    struct Chunks: Arrays {
        let decays: ChunkDecays
        /// Q Kᵀ, K Kᵀ and M.
        let qk, kk, m: MLXArray
        var gamma: MLXArray { decays.gamma }
        var start: MLXArray { decays.start }
        var end: MLXArray { decays.end }
        var whole: MLXArray { decays.whole }
        var below: MLXArray { decays.below }

        var arrays: [MLXArray] { decays.arrays + [qk, kk, m] }
    }

    var chunks: Chunks {
        let (kk, decays) = (matmul(k, transposed(k)), ChunkDecays(logDecay))
        return Chunks(
            decays: decays, qk: matmul(q, transposed(k)), kk: kk,
            m: inverse(Self.product([kk, decays.gamma, beta, decays.below])))
    }

    func chunked(_ x: MLXArray) -> MLXArray { Self.chunked(x, keyHeads: k.dim(1)) }

    /// Reshapes `[n, heads, d]` to `[chunks, key_heads, value heads of each, C, d]`.
    private static func chunked(_ x: MLXArray, keyHeads: Int) -> MLXArray {
        let whole = ChunkDecays.chunked(x)
        let (chunks, rows, heads, d) = (whole.dim(0), whole.dim(1), whole.dim(2), whole.dim(3))
        return whole.reshaped([chunks, rows, keyHeads, heads / keyHeads, d]).transposed(axes: [0, 2, 3, 1, 4])
    }

    /// Reshapes `[value_heads, key_dim, value_dim]` to `[1, key_heads, value heads of each, key_dim, value_dim]`.
    private func byKeyHead(_ state: MLXArray) -> MLXArray {
        state.reshaped([1, k.dim(1), -1, state.dim(1), state.dim(2)])
    }

    private func each(_ x: MLXArray) -> [MLXArray] { x.split(parts: x.dim(0)) }

    /// Reshapes `[chunks, key_heads, value heads of each, C, d]` to `[n, heads, d]`.
    func byToken(_ x: MLXArray) -> MLXArray {
        x.transposed(axes: [0, 3, 1, 2, 4]).reshaped([-1, x.dim(1) * x.dim(2), x.dim(4)])[0..<length]
    }
}

private func transposed(_ x: MLXArray) -> MLXArray { x.swappedAxes(-1, -2) }

/// Returns (I + E)⁻¹ for a strictly lower triangular E `[…, C, C]`, where C is a power of two.
///
/// Let M₁ and M₂ be the inverses of the two diagonal blocks of I + E, M = [[M₁, 0], [0, M₂]], and E₂₁ the lower left block of E. Then the inverse is
/// [[M₁, 0], [−M₂ E₂₁ M₁, M₂]] = M − M E₂₁ M. Each step doubles the size of the diagonal blocks.
private func inverse(_ e: MLXArray) -> MLXArray {
    let c = e.dim(-1)
    func lowerLeft(_ half: Int) -> MLXArray { e * mask(c) { i, j in i / half % 2 == 1 && i / half == j / half + 1 } }
    var m = mask(c) { i, j in i == j } - lowerLeft(1)
    var half = 2
    while half < c {
        m = addMM(m, matmul(m, lowerLeft(half)), m, alpha: -1)
        half *= 2
    }
    return m
}
