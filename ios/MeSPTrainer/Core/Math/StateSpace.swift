import MLX

/// The state space model of some heads of a group ([Dao & Gu](https://arxiv.org/abs/2405.21060)). Each token updates a head's state S `[P, N]` with u
/// and B, and reads it with C. The heads share B and C:
///
///     S ← exp(κ) S + u Bᵀ        y = S C
///
/// The model is computed in chunks of tokens, which are the rows of U, B, C and Y. S is the state before a chunk, S₊ is the state after it, and
/// `ChunkDecays` defines Γ, γ and δ:
///
///     Π = Γ ∘ C Bᵀ        Y = γ (C Sᵀ) + Π U        S₊ = γ_last S + (δ U)ᵀ B
///
/// γ and δ are columns.
package struct StateSpace: Arrays {
    /// U `[chunks, rows, heads, P]`
    private let u: MLXArray
    /// B and C `[chunks, rows, N]`
    private let b, c: MLXArray
    /// C Bᵀ `[chunks, 1, rows, rows]`
    private let cb: MLXArray
    private let decays: ChunkDecays
    private let length: Int

    var arrays: [MLXArray] { decays.arrays + [cb] }

    /// Divides the tokens into chunks. All arrays are in float32.
    /// - Parameters:
    ///   - u: `[n, heads, P]`
    ///   - logDecay: κ ≤ 0, `[n, heads]`
    ///   - b, c: `[n, N]`
    init(u: MLXArray, logDecay: MLXArray, b: MLXArray, c: MLXArray) {
        length = u.dim(0)
        (self.u, self.b, self.c) = (ChunkDecays.chunked(u), ChunkDecays.chunked(b), ChunkDecays.chunked(c))
        decays = ChunkDecays(swapped(ChunkDecays.chunked(logDecay.expandedDimensions(axis: -1))))
        cb = matmul(self.c, transposed(self.b)).expandedDimensions(axis: 1)
    }

    // MARK: - Forward

    /// - Parameter state: S before the tokens, `[heads, P, N]` in float32; replaced by S after them
    /// - Returns: y `[n, heads, P]`, in float32.
    func callAsFunction(state: inout MLXArray) -> MLXArray {
        let read = matmul(c, transposed(flat(chunkStates(&state)))).reshaped(u.shape)
        return byToken(swapped(decays.start) * read + swapped(matmul(decays.gamma * cb, swapped(u))))
    }

    /// Returns S before each chunk `[chunks, heads, P, N]`.
    private func chunkStates(_ s: inout MLXArray) -> MLXArray {
        let (written, whole) = (each(matmul(transposed(wide(swapped(decays.end) * u)), b)), each(decays.whole))
        var states = [MLXArray]()
        for n in written.indices {
            states.append(s.expandedDimensions(axis: 0))
            s = whole[n] * s + written[n].reshaped(s.shape)
        }
        return concatenated(states)
    }

    // MARK: - Backward

    // The gradients of u, κ, B and C for a sequence that began with S = 0. From the last chunk to the first, it computes
    //
    //     dS = γ_last dS₊ + (γ dY)ᵀ C
    //
    // and for all chunks at once
    //
    //     dΠ = dY Uᵀ        dU = Πᵀ dY + δ (B dS₊ᵀ)
    //     dC = (γ dY) S + (Γ ∘ dΠ) B        dB = (Γ ∘ dΠ)ᵀ C + (δ U) dS₊
    //
    // dB and dC are summed over the heads. `ChunkDecays` computes dκ from
    //
    //     Γ ∘ dΓ = Γ ∘ dΠ ∘ C Bᵀ        γ dγ = rowsum(γ dY ∘ C Sᵀ)        δ dδ = rowsum(U ∘ δ B dS₊ᵀ)        dγ_last = ⟨S, dS₊⟩

    /// The arrays that pass between the chunks.
    struct StateGradients: Arrays {
        /// S and dS₊ `[chunks, heads, P, N]`, γ dY `[chunks, rows, heads, P]`, and γ_last dγ_last `[chunks, heads, 1, 1]`.
        let states, dStates, dStart, inWhole: MLXArray

        var arrays: [MLXArray] { [states, dStates, dStart, inWhole] }
    }

    /// - Parameter dY: `[chunks, rows, heads, P]`
    func statesBackward(dY: MLXArray) -> StateGradients {
        var s = MLXArray.zeros([u.dim(2), u.dim(3), b.dim(-1)])
        let states = chunkStates(&s)
        let dStart = swapped(decays.start) * dY
        let dStates = statesBackward(matmul(transposed(wide(dStart)), c), like: s)
        return StateGradients(
            states: states, dStates: dStates, dStart: dStart, inWhole: decays.whole * dot(states, dStates))
    }

    /// The terms that read the states.
    struct StateTerms: Arrays {
        /// γ dγ and δ dδ `[chunks, rows, heads, 1]`, (γ dY) S and (δ U) dS₊ `[chunks, rows, N]`, and δ (B dS₊ᵀ) `[chunks, rows, heads, P]`.
        let inStart, inEnd, dCStart, dBEnd, fromEnd: MLXArray

        var arrays: [MLXArray] { [inStart, dCStart, fromEnd, inEnd, dBEnd] }
    }

    func termsBackward(_ d: StateGradients) -> StateTerms {
        let end = swapped(decays.end)
        let fromEnd = end * matmul(b, transposed(flat(d.dStates))).reshaped(u.shape)
        return StateTerms(
            inStart: rowsum(d.dStart, matmul(c, transposed(flat(d.states))).reshaped(u.shape)),
            inEnd: rowsum(u, fromEnd), dCStart: matmul(wide(d.dStart), flat(d.states)),
            dBEnd: matmul(wide(end * u), flat(d.dStates)), fromEnd: fromEnd)
    }

    /// Returns du `[T, heads, P]`, dκ `[T, heads, 1]`, dB and dC `[T, N]`, in float32.
    func inputsBackward(dY: MLXArray, inWhole: MLXArray, _ terms: StateTerms) -> [MLXArray] {
        let dPi = decays.gamma * matmul(swapped(dY), transposed(swapped(u)))
        let ofHeads = dPi.sum(axis: 1)
        let du = terms.fromEnd + swapped(matmul(transposed(decays.gamma * cb), swapped(dY)))
        let dLogDecay = decays.backward(
            inGamma: dPi * cb, inStart: swapped(terms.inStart), inEnd: swapped(terms.inEnd), inWhole: inWhole)
        return [
            du, swapped(dLogDecay), addMM(terms.dBEnd, transposed(ofHeads), c), addMM(terms.dCStart, ofHeads, b),
        ].map(byToken)
    }

    /// Returns dS₊ after each chunk, `[chunks, heads, P, N]`.
    /// - Parameter read: (γ dY)ᵀ C `[chunks, heads·P, N]`
    private func statesBackward(_ read: MLXArray, like s: MLXArray) -> MLXArray {
        let (read, whole) = (each(read), each(decays.whole))
        var (dS, dStates) = (MLXArray.zeros(s.shape), [MLXArray]())
        for n in read.indices.reversed() {
            dStates.insert(dS.expandedDimensions(axis: 0), at: 0)
            dS = whole[n] * dS + read[n].reshaped(s.shape)
        }
        return concatenated(dStates)
    }

    private func rowsum(_ x: MLXArray, _ y: MLXArray) -> MLXArray { (x * y).sum(axis: -1, keepDims: true) }

    /// Returns ⟨S, dS₊⟩ of each chunk and head, `[chunks, heads, 1, 1]`, as a matrix product, which needs no array S ∘ dS₊.
    private func dot(_ x: MLXArray, _ y: MLXArray) -> MLXArray {
        let shape = Array(x.shape[..<2])
        return matmul(x.reshaped(shape + [1, -1]), y.reshaped(shape + [-1, 1]))
    }

    // MARK: - Shapes

    private func each(_ x: MLXArray) -> [MLXArray] { x.split(parts: x.dim(0)).map { $0.squeezed(axis: 0) } }

    /// Reshapes `[chunks, rows, heads, P]` to `[chunks, rows, heads·P]`.
    private func wide(_ x: MLXArray) -> MLXArray { x.reshaped([x.dim(0), x.dim(1), -1]) }

    /// Reshapes `[chunks, heads, P, N]` to `[chunks, heads·P, N]`.
    private func flat(_ x: MLXArray) -> MLXArray { x.reshaped([x.dim(0), -1, x.dim(3)]) }

    /// Reshapes `[chunks, rows, …]` to `[n, …]`.
    private func byToken(_ x: MLXArray) -> MLXArray { x.reshaped([-1] + Array(x.shape[2...]))[0..<length] }
}

/// Swaps `[chunks, rows, heads, …]` and `[chunks, heads, rows, …]`.
private func swapped(_ x: MLXArray) -> MLXArray { x.swappedAxes(1, 2) }

private func transposed(_ x: MLXArray) -> MLXArray { x.swappedAxes(-1, -2) }
