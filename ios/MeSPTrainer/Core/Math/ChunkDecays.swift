import MLX

/// The decay of a recurrent mixer's state within a chunk of C tokens. κ ≤ 0 is the logarithm of a token's decay:
///
///     Γ_ij = exp(κ_{j+1} + … + κ_i) for i ≥ j, else 0        γ_i = exp(κ_1 + … + κ_i)        δ_j = Γ_Cj
package struct ChunkDecays: Arrays {
    /// Γ `[…, C, C]`
    let gamma: MLXArray
    /// γ (`start`) `[…, C, 1]`, δ (`end`) `[…, C, 1]` and γ_C (`whole`) `[…, 1, 1]`.
    let start, end, whole: MLXArray
    /// A mask `[C, C]` that is 1 below the diagonal and 0 elsewhere.
    let below: MLXArray

    var arrays: [MLXArray] { [gamma, start] }

    /// The largest chunk size C. Shorter sequences use the smallest power of two that is at least their length.
    package static let chunk = 64

    /// - Parameter logDecay: κ `[…, C, 1]`, in float32
    init(_ logDecay: MLXArray) {
        let last = logDecay.dim(-2) - 1
        below = mask(last + 1) { i, j in i > j }
        // Each sum κ_{j+1} + … + κ_i is computed directly. A difference of two running sums would lose small terms to rounding.
        gamma = Self.expMasked([cumsum(logDecay * below, axis: -2), mask(last + 1) { i, j in i >= j }])
        start = exp(cumsum(logDecay, axis: -2))
        end = gamma[.ellipsis, last..., 0...].swappedAxes(-1, -2)
        whole = start[.ellipsis, last..., 0...]
    }

    private static let expMasked = Fused { exp($0[0]) * $0[1] }

    /// Returns dκ `[…, C, 1]`:
    ///
    ///     dκ_m = Σ_{j < m ≤ i} (Γ ∘ dΓ)_ij + Σ_{i ≥ m} (γ dγ)_i + Σ_{j < m} (δ dδ)_j + γ_C dγ_C
    ///
    /// - Parameters:
    ///   - inGamma: Γ ∘ dΓ `[…, C, C]`
    ///   - inStart, inEnd: γ dγ and δ dδ `[…, C, 1]`
    ///   - inWhole: γ_C dγ_C `[…, 1, 1]`
    func backward(inGamma: MLXArray, inStart: MLXArray, inEnd: MLXArray, inWhole: MLXArray) -> MLXArray {
        let between = (cumsum(inGamma, axis: -2, reverse: true) * below).sum(axis: -1, keepDims: true)
        return between + cumsum(inStart, axis: -2, reverse: true) + cumsum(inEnd, axis: -2, inclusive: false) + inWhole
    }

    /// Reshapes `[n, …]` to `[chunks, C, …]`, padded with zeros.
    static func chunked(_ x: MLXArray) -> MLXArray {
        let (length, others) = (x.dim(0), Array(x.shape[1...]))
        var rows = 1
        while rows < min(length, chunk) { rows *= 2 }
        let chunks = (length + rows - 1) / rows
        let missing = chunks * rows - length
        let whole = missing > 0 ? concatenated([x, MLXArray.zeros([missing] + others)]) : x
        return whole.reshaped([chunks, rows] + others)
    }
}

func mask(_ c: Int, _ contains: (_ row: Int, _ column: Int) -> Bool) -> MLXArray {
    .of((0..<c * c).map { contains($0 / c, $0 % c) ? 1 : 0 as Float }, [c, c])
}
