import MLX
import MeSPAdapters

/// A linear layer with an optional adapter:  y = G ∘ (x Wᵀ) + s (x̂ A) B + b,  with the adapter's scale s. x̂ is x ∘ K / (1 − p) with dropout, and x
/// without. G `[out]` is m / n with DoRA, and 1 without.
struct LoRALinear {
    private(set) var weight: QuantizedMatrix
    private(set) var bias: MLXArray?
    private(set) var lora: LoRAMatrices?
    private let scale: Float
    private var dropout: Dropout?

    init(weight: QuantizedMatrix, bias: MLXArray?, lora: LoRAMatrices?, scale: Float, dropout: Dropout? = nil) {
        (self.weight, self.bias, self.lora, self.scale, self.dropout) = (weight, bias, lora, scale, dropout)
    }

    var hasDropout: Bool { dropout != nil }

    /// s, or s / (1 − p) with dropout.
    var factor: Float { dropout.map { scale / (1 - $0.key.rate) } ?? scale }

    /// Returns y `[T, out]` of x `[T, in]`, in float32. `h` is h(x), if it is known.
    func callAsFunction(_ x: MLXArray, h: MLXArray? = nil) -> MLXArray {
        var y = weight.apply(x, times: lora?.m, as: .float32)
        if let lora, let h = h ?? self.h(x) { y = addMM(y, h, lora.b) }
        return bias.map { y + $0 } ?? y
    }

    /// Returns s x̂ A `[T, rank]`, in float32; nil without an adapter.
    func h(_ x: MLXArray) -> MLXArray? { products(x, nil).xA.map { $0 * factor } }

    /// Returns (x ∘ K) A `[T, rank]`, and (x ∘ K)ᵀ g `[in, rank]` if there is a g `[T, rank]`. Each product is added to its sum in `sums`.
    func products(
        _ x: MLXArray, _ g: MLXArray?, addedTo sums: (xA: MLXArray?, xTg: MLXArray?) = (nil, nil)
    ) -> (xA: MLXArray?, xTg: MLXArray?) {
        guard let lora else { return (nil, nil) }
        let x = kept(x.asType(.float32))
        return (product(x, lora.a, addedTo: sums.xA), product(x.T, g, addedTo: sums.xTg))
    }

    private func kept(_ x: MLXArray) -> MLXArray { dropout.map { $0(x) } ?? x }

    func outputs(_ range: Range<Int>) -> LoRALinear {
        guard range.count < weight.rows else { return self }
        var part = self
        (part.weight, part.bias) = (weight.rows(range), bias?[range])
        part.lora = lora?.outputs(range)
        return part
    }

    /// Returns the layer for some of its inputs, without its bias. The bounds of `range` are multiples of the quantization group size.
    func inputs(_ range: Range<Int>) -> LoRALinear {
        var part = self
        (part.weight, part.bias) = (weight.columns(range), nil)
        part.lora = lora.map { LoRAMatrices(a: $0.a[range], b: $0.b, m: $0.m) }
        part.dropout = dropout?.inputs(range)
        return part
    }

    func rows(_ range: Range<Int>) -> LoRALinear {
        var part = self
        part.dropout = dropout?.rows(range)
        return part
    }
}

/// The gradients of x, A, B and G. M is K / (1 − p) with dropout, and 1 without:
///
///     h = s x̂ A
///     dx = (G ∘ dy) W + s (dy Bᵀ) Aᵀ ∘ M        dA = s x̂ᵀ (dy Bᵀ)        dB = hᵀ dy        dG = Σₜ dy ∘ (x Wᵀ)
extension LoRALinear {
    /// Which gradients are computed: of A, B and G; of B, where A is frozen; or none, but dx.
    enum Wanted { case all, b, none }

    struct Gradients: Arrays {
        /// dx `[T, in]`. A gradient that is not computed is nil.
        var dx: MLXArray?
        var dA, dB, dG: MLXArray?

        var arrays: [MLXArray] { [dx, dA, dB, dG].arrays }
    }

    /// Returns s dy Bᵀ `[T, rank]`, divided by 1 − p with dropout; nil without an adapter.
    func dyBT(_ dy: MLXArray) -> MLXArray? { lora.map { matmul(dy, $0.b.T) * factor } }

    /// Returns dB `[rank, out]` from (x ∘ K) A `[T, rank]`.
    func dB(_ xA: MLXArray?, dy: MLXArray) -> MLXArray? { product(xA.map { $0 * factor }?.T, dy) }

    /// Returns dG `[out]`; nil if G is 1.
    func dG(_ x: MLXArray, dy: MLXArray) -> MLXArray? { lora?.m == nil ? nil : (dy * weight.apply(x)).sum(axis: 0) }

    /// Returns sum + (G ∘ dy) W `[T, in]`.
    func weightDx(_ dy: MLXArray, addedTo sum: MLXArray?) -> MLXArray {
        weight.applyTransposed(dy, times: lora?.m, addedTo: sum)
    }

    /// Returns sum + (`dyBT` Aᵀ) ∘ K `[T, in]`, where K is 1 without dropout.
    func adapterDx(_ dyBT: MLXArray?, addedTo sum: MLXArray?) -> MLXArray? {
        guard hasDropout, let dyBT, let a = lora?.a else { return product(dyBT, lora?.a.T, addedTo: sum) }
        let dx = kept(matmul(dyBT, a.T))
        return sum.map { $0 + dx } ?? dx
    }
}

/// Returns sum + a b. Returns the sum if a or b is nil.
func product(_ a: MLXArray?, _ b: MLXArray?, addedTo sum: MLXArray? = nil) -> MLXArray? {
    guard let a, let b else { return sum }
    return sum.map { addMM($0, a, b) } ?? matmul(a, b)
}
