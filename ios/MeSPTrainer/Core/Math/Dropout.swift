import MLX

/// A key from which dropout masks are computed, and the dropout probability p. Masks are not stored; each use recomputes them.
package struct DropoutKey {
    let rate: Float
    private let number: UInt64

    package init(rate: Float, seed: UInt64) { self.init(rate: rate, number: scattered(seed)) }

    private init(rate: Float, number: UInt64) { (self.rate, self.number) = (rate, number) }

    package subscript(_ index: Int) -> DropoutKey {
        DropoutKey(rate: rate, number: scattered(number &+ UInt64(index)))
    }

    fileprivate var halves: (tokens: UInt32, inputs: UInt32) {
        (UInt32(truncatingIfNeeded: number), UInt32(truncatingIfNeeded: number >> 32))
    }
}

/// Dropout of the input x `[n, in]` of a layer's adapter: x ∘ K, where each element of K is 1 with probability 1 − p, and 0 otherwise.
/// `LoRALinear.factor` contains the factor 1 / (1 − p).
///
///     K[t, j] = 1 where r[t] c[j] mod 2³² ≥ p 2³²,     r[t] = hash(t + k₀),     c[j] = hash(j + k₁) | 1
///
/// k₀ and k₁ are the halves of the key, t is a token's position in its sequence, and j is the index of an input. So x can be processed in parts of
/// any size. This is multiply-shift hashing (Dietzfelbinger et al. 1997).
struct Dropout {
    let key: DropoutKey
    /// The position of x's first row. `tokens` replaces it if the rows are not consecutive positions.
    var firstToken = 0
    var tokens: [Int]?
    var firstInput = 0

    func callAsFunction(_ x: MLXArray) -> MLXArray {
        let (k0, k1) = key.halves
        let positions = tokens ?? Array(firstToken..<firstToken + x.dim(0))
        let r = positions.map { hash(UInt32(truncatingIfNeeded: $0) &+ k0) }
        let c = (firstInput..<firstInput + x.dim(1)).map { hash(UInt32(truncatingIfNeeded: $0) &+ k1) | 1 }
        return masked(x, rows: r, columns: c, least: UInt32(Double(key.rate) * 0x1p32))
    }

    func rows(_ range: Range<Int>) -> Dropout {
        var part = self
        if let tokens { part.tokens = Array(tokens[range]) } else { part.firstToken += range.lowerBound }
        return part
    }

    func inputs(_ range: Range<Int>) -> Dropout {
        var part = self
        part.firstInput += range.lowerBound
        return part
    }
}

/// Applies a bijection of 32-bit numbers: lowbias32 of github.com/skeeto/hash-prospector.
private func hash(_ x: UInt32) -> UInt32 {
    var x = x
    x = (x ^ (x >> 16)) &* 0x7feb_352d
    x = (x ^ (x >> 15)) &* 0x846c_a68b
    return x ^ (x >> 16)
}
