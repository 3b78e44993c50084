import MLX

/// A depthwise causal convolution over a token and the K − 1 tokens before it, without a bias:
///
///     y_t = Σ_j w_j x_{t−K+1+j}        dx_s = Σ_j w_j dy_{s+K−1−j}
struct CausalConvolution {
    /// The weights w, `[F, K]`.
    let weight: MLXArray

    func features(_ range: Range<Int>) -> CausalConvolution { CausalConvolution(weight: weight[range]) }

    func start(dtype: DType) -> MLXArray { MLXArray.zeros([weight.dim(1) - 1, weight.dim(0)], dtype: dtype) }

    /// - Parameters:
    ///   - x: `[n, F]`
    ///   - tail: x of the K − 1 tokens before, `[K − 1, F]`
    /// - Returns: y `[n, F]`, in float32.
    func callAsFunction(_ x: MLXArray, tail: MLXArray) -> MLXArray {
        sum(of: concatenated([tail, x]), weights)
    }

    /// Returns the tail for the tokens after x. The tail refers to a copy of at most 2 (K − 1) rows, so that x can be freed.
    func tail(after x: MLXArray, tail: MLXArray) -> MLXArray {
        concatenated([tail, x[max(0, x.dim(0) - tail.dim(0))...]])[(-tail.dim(0))...]
    }

    /// Returns dx `[n, F]` from dy, in float32.
    /// - Parameter carried: dy of the next K − 1 tokens, `[K − 1, F]`; nil if no tokens follow
    func backward(dy: MLXArray, carried: MLXArray? = nil) -> MLXArray {
        sum(of: concatenated([dy, carried ?? start(dtype: dy.dtype)]), weights.reversed())
    }

    private var weights: [MLXArray] { (0..<weight.dim(1)).map { weight[0..., $0] } }

    /// Returns Σ_j w_j x_{t+j} for t = 0 … n − K, where n is the number of rows of x.
    private func sum(of x: MLXArray, _ weights: [MLXArray]) -> MLXArray {
        let count = x.dim(0) - weights.count + 1
        return Self.weightedSum(weights + weights.indices.map { x[$0..<$0 + count] })
    }

    private static let weightedSum = Fused { terms in
        let terms = terms.map { $0.asType(.float32) }
        let products = zip(terms.prefix(terms.count / 2), terms.suffix(terms.count / 2)).map { $0 * $1 }
        return products.dropFirst().reduce(products[0]) { $0 + $1 }
    }
}
