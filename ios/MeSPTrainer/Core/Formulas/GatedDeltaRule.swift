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
    private let length: Int
    private let machine: Machine

    /// Divides the tokens into chunks. All arrays are in float32.
    /// - Parameters:
    ///   - q, k: `[n, key_heads, key_dim]`
    ///   - v: `[n, value_heads, value_dim]`; the value heads of a key head are consecutive
    ///   - logDecay: κ ≤ 0, `[n, value_heads]`
    ///   - beta: `[n, value_heads]`
    init(q: MLXArray, k: MLXArray, v: MLXArray, logDecay: MLXArray, beta: MLXArray, machine: Machine) {
        let heads = k.dim(1)
        func chunked(_ x: MLXArray) -> MLXArray { Self.chunked(x, keyHeads: heads) }
        (self.q, self.k, self.v) = (chunked(q), chunked(k), chunked(v))
        (self.logDecay, self.beta) = (
            chunked(logDecay.expandedDimensions(axis: -1)), chunked(beta.expandedDimensions(axis: -1))
        )
        (length, self.machine) = (k.dim(0), machine)
    }

    // MARK: - Forward

    /// - Parameter state: S before the tokens, `[value_heads, key_dim, value_dim]` in float32; replaced by S after them
    /// - Returns: o `[n, value_heads, value_dim]`, in float32.
    func callAsFunction(state: inout MLXArray) -> MLXArray {
        var s = byKeyHead(state)
        let o = length == 1 ? step(&s) : byChunks(&s)
        state = s.reshaped(state.shape)
        return byToken(o)
    }

    private func step(_ s: inout MLXArray) -> MLXArray {
        s = exp(logDecay) * s
        let d = beta * (v - matmul(k, s))
        s = addMM(s, transposed(k), d)
        return matmul(q, s)
    }

    private func byChunks(_ s: inout MLXArray) -> MLXArray {
        let c = Chunks(self)
        let (d, states) = corrections(c, w: c.w(self), &s)
        return addMM(c.start * matmul(q, states), c.gamma * c.qk, d)
    }

    private func corrections(_ c: Chunks, w: MLXArray, _ s: inout MLXArray) -> (d: MLXArray, states: MLXArray) {
        let (u, w, kEnd, whole) = (each(matmul(c.m, beta * v)), each(w), each(transposed(c.end * k)), each(c.whole))
        var (d, states) = ([MLXArray](), [MLXArray]())
        for n in u.indices {
            states.append(s)
            d.append(addMM(u[n], w[n], s, alpha: -1))
            s = addMM(whole[n] * s, kEnd[n], d[n])
        }
        return (concatenated(d), concatenated(states))
    }

    // MARK: - Backward

    /// Returns the gradients of q, k, v, κ and β. From the last chunk to the first, it computes
    ///
    ///     dD = Pᵀ dO + δ K dS₊        dS = γ_C dS₊ + (γ Q)ᵀ dO − Wᵀ dD
    ///
    /// and for all chunks at once
    ///
    ///     Z = Mᵀ dD        dV = β Z        β dβ = rowsum(Z ∘ D)
    ///     dP = dO Dᵀ        dA = −dV Dᵀ below the diagonal
    ///     dQ = γ dO Sᵀ + (Γ ∘ dP) K
    ///     dK = δ D dS₊ᵀ − γ dV Sᵀ + (Γ ∘ dA + (Γ ∘ dA)ᵀ) K + (Γ ∘ dP)ᵀ Q
    ///
    /// dQ and dK are summed over a key head's value heads. `ChunkDecays` computes dκ from
    ///
    ///     Γ ∘ dΓ = Γ ∘ (dP ∘ Q Kᵀ + dA ∘ K Kᵀ)        γ dγ = rowsum(Q ∘ γ dO Sᵀ − K ∘ γ dV Sᵀ)
    ///     δ dδ = rowsum(K ∘ δ D dS₊ᵀ)        dγ_C = ⟨S, dS₊⟩
    ///
    /// - Parameters:
    ///   - state: S before the tokens, `[value_heads, key_dim, value_dim]`
    ///   - dState: the gradient of S after the tokens, replaced by the gradient of S before them
    /// - Returns: dq and dk `[T, key_heads, key_dim]`, dv `[T, value_heads, value_dim]`, dκ and β dβ `[T, value_heads]`, in float32.
    func backward(dO: MLXArray, state: MLXArray, dState: inout MLXArray)
        -> (dq: MLXArray, dk: MLXArray, dv: MLXArray, dLogDecay: MLXArray, betaDBeta: MLXArray)
    {
        let c = Chunks(self)
        let dO = Self.chunked(dO, keyHeads: k.dim(1))
        let (d, states, dv, betaDBeta, dStates) = recurrenceBackward(c, dO, state, &dState)
        let (inAll, dP, dA) = machine.part(
            c.whole * dot(states, dStates), Self.product([matmul(dO, transposed(d)), c.gamma]),
            Self.product([matmul(dv, transposed(d)), c.gamma, -c.below]))

        let dQStart = c.start * matmul(dO, transposed(states))
        let (dq, inQStart) = machine.part(overValueHeads(addMM(dQStart, dP, k)), rowsum(q, dQStart))
        let gammaDVS = c.start * matmul(dv, transposed(states))
        let (dKStart, inKStart) = machine.part(gammaDVS, rowsum(k, gammaDVS))
        let dKEnd = c.end * matmul(d, transposed(dStates))
        let inEnd = rowsum(k, dKEnd)
        let dk = overValueHeads(
            addMM(addMM(dKEnd - dKStart, dA + transposed(dA), k), transposed(dP), q))
        let dLogDecay = c.decays.backward(
            inGamma: Self.sumOfProducts([dP, c.qk, dA, c.kk]), inStart: inQStart - inKStart, inEnd: inEnd,
            inWhole: inAll)
        let results = machine.part([dq, dk, dv, dLogDecay, betaDBeta].map(byToken))
        return (
            results[0], results[1], results[2], results[3].squeezed(axis: -1), results[4].squeezed(axis: -1)
        )
    }

    private func overValueHeads(_ x: MLXArray) -> MLXArray { x.dim(2) == 1 ? x : x.sum(axis: 2, keepDims: true) }

    private func rowsum(_ x: MLXArray, _ y: MLXArray) -> MLXArray { (x * y).sum(axis: -1, keepDims: true) }

    /// Returns ⟨S, dS₊⟩ of each chunk, `[…, 1, 1]`, as a matrix product, which needs no array S ∘ dS₊.
    private func dot(_ x: MLXArray, _ y: MLXArray) -> MLXArray {
        let shape = Array(x.shape[..<3])
        return matmul(x.reshaped(shape + [1, -1]), y.reshaped(shape + [-1, 1]))
    }

    private func recurrenceBackward(_ c: Chunks, _ dO: MLXArray, _ state: MLXArray, _ dState: inout MLXArray)
        -> (d: MLXArray, states: MLXArray, dv: MLXArray, betaDBeta: MLXArray, dStates: MLXArray)
    {
        let w = c.w(self)
        var s = byKeyHead(state)
        let (d, states) = corrections(c, w: w, &s)
        machine.part(w, d, states)
        let (dD, dStates) = statesBackward(c, w: w, dO, &dState)
        machine.part(dD, dStates, dState)
        let z = matmul(transposed(c.m), dD)
        let (dv, betaDBeta) = machine.part(beta * z, rowsum(z, d))
        return (d, states, dv, betaDBeta, dStates)
    }

    private func statesBackward(_ c: Chunks, w: MLXArray, _ dO: MLXArray, _ dState: inout MLXArray)
        -> (dD: MLXArray, dStates: MLXArray)
    {
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

    private static let product = Fused { $0.dropFirst().reduce($0[0]) { $0 * $1 } }
    private static let sumOfProducts = Fused { $0[0] * $0[1] + $0[2] * $0[3] }

    // MARK: - Chunks

    private struct Chunks {
        let decays: ChunkDecays
        let qk, kk: MLXArray
        let m: MLXArray
        var gamma: MLXArray { decays.gamma }
        var start: MLXArray { decays.start }
        var end: MLXArray { decays.end }
        var whole: MLXArray { decays.whole }
        var below: MLXArray { decays.below }

        init(_ rule: GatedDeltaRule) {
            let ofKeys = matmul(rule.k, transposed(rule.k))
            let decays = ChunkDecays(rule.logDecay)
            (self.decays, qk, kk, m) = rule.machine.part(
                decays, matmul(rule.q, transposed(rule.k)), ofKeys,
                inverse(GatedDeltaRule.product([ofKeys, decays.gamma, rule.beta, decays.below])))
        }

        func w(_ rule: GatedDeltaRule) -> MLXArray { matmul(m, rule.beta * start * rule.k) }
    }

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
    private func byToken(_ x: MLXArray) -> MLXArray {
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
