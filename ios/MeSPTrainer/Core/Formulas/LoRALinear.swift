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

    /// Returns y `[T, out]` of x `[T, in]`, in float32.
    func callAsFunction(_ x: MLXArray, machine: Machine? = nil) -> MLXArray {
        let h = h(x)
        if let machine, machine.projectionRows < weight.rows {
            return concatenated(
                machine.each(of: weight.rows, size: machine.projectionRows) { outputs($0)(x, h: h) }, axis: -1)
        }
        return self(x, h: h)
    }

    func callAsFunction(_ x: MLXArray, h: MLXArray?) -> MLXArray {
        var y = weight.apply(x, times: lora?.m)
        if let h, let lora { y = addMM(y, h, lora.b) }
        return bias.map { y + $0 } ?? y
    }

    /// Returns s x̂ A `[T, rank]`, in float32; nil without an adapter.
    func h(_ x: MLXArray) -> MLXArray? { products(x, nil).xA.map { $0 * factor } }

    /// Returns (x ∘ K) A `[T, rank]`, and (x ∘ K)ᵀ g `[in, rank]` if there is a g `[T, rank]`. Each product is added to its sum in `sums`.
    ///
    /// - Parameter machine: limits the number of rows of x ∘ K that are computed at a time; nil for no limit.
    func products(
        _ x: MLXArray, _ g: MLXArray?, addedTo sums: (xA: MLXArray?, xTg: MLXArray?) = (nil, nil),
        machine: Machine? = nil
    ) -> (xA: MLXArray?, xTg: MLXArray?) {
        guard let lora else { return (nil, nil) }
        guard hasDropout, let machine else {
            let x = kept(x.asType(.float32))
            return (product(x, lora.a, addedTo: sums.xA), product(x.T, g, addedTo: sums.xTg))
        }
        var (xA, xTg) = ([MLXArray](), sums.xTg)
        for some in tiles(of: x.dim(0), size: machine.rowsAtOnce(of: x)) {
            let part = rows(some).products(x[some], g?[some], addedTo: (sums.xA?[some], xTg))
            machine.part(part.xA, part.xTg)
            (xA, xTg) = (xA + part.xA.arrays, part.xTg)
        }
        return (concatenated(xA), xTg)
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

extension LoRALinear {
    /// Returns the gradients of x, A, B and G. M is K / (1 − p) with dropout, and 1 without:
    ///
    ///     h = s x̂ A
    ///     dx = (G ∘ dy) W + s (dy Bᵀ) Aᵀ ∘ M        dA = s x̂ᵀ (dy Bᵀ)        dB = hᵀ dy        dG = Σₜ dy ∘ (x Wᵀ)
    ///
    /// - Returns: dx `[T, in]`, added to the sum if there is one, and the gradients of A, B and G. A result that is not computed is nil.
    func backward(
        _ x: MLXArray, dy: MLXArray, machine: Machine, wantsA: Bool, wantsDx: Bool, addedTo sum: MLXArray?
    ) -> (dx: MLXArray?, dA: MLXArray?, dB: MLXArray?, dG: MLXArray?) {
        let dyBT = dyBT(dy)
        let (xA, dA) = products(x, wantsA ? dyBT : nil, machine: machine)
        let dB = product(xA.map { $0 * factor }?.T, dy)
        let hasG = lora?.m != nil
        guard wantsDx || hasG else { return machine.part(nil, dA, dB, nil) }
        var dx = wantsDx ? adapterDx(dyBT, addedTo: sum, machine: machine) : nil
        if let first = dx, lora != nil { dx = machine.inputs([first], after: [first, dA, dB].arrays)[0] }
        var dG = [MLXArray]()
        for rows in tiles(of: weight.rows, size: machine.projectionRows) {
            let (part, dy) = (outputs(rows), dy[0..., rows])
            dG += part.dG(x, dy: dy, machine: machine).arrays
            if wantsDx { dx = machine.part(part.weight.applyTransposed(dy, times: part.lora?.m, addedTo: dx)) }
        }
        return (dx, dA, dB, hasG ? concatenated(dG) : nil)
    }

    /// Returns Σₜ dy ∘ (x Wᵀ) `[out]`, computed for some outputs at a time; nil if G is 1.
    func dG(_ x: MLXArray, dy: MLXArray, machine: Machine) -> MLXArray? {
        guard lora?.m != nil else { return nil }
        let outputs = tiles(of: weight.rows, size: machine.columnsAtOnce(of: dy))
        return concatenated(
            outputs.map { rows in machine.part((dy[0..., rows] * weight.rows(rows).apply(x)).sum(axis: 0)) })
    }

    /// Returns s dy Bᵀ `[T, rank]`, divided by 1 − p with dropout; nil without an adapter.
    func dyBT(_ dy: MLXArray) -> MLXArray? { lora.map { matmul(dy, $0.b.T) * factor } }

    /// Returns sum + (`dyBT` Aᵀ) ∘ K `[T, in]`, where K is 1 without dropout.
    func adapterDx(_ dyBT: MLXArray?, addedTo sum: MLXArray?, machine: Machine? = nil) -> MLXArray? {
        guard hasDropout, let dyBT, let a = lora?.a else { return product(dyBT, lora?.a.T, addedTo: sum) }
        var dx = sum ?? MLXArray.zeros([dyBT.dim(0), a.dim(0)])
        for some in tiles(of: dx.dim(0), size: machine?.rowsAtOnce(of: dx) ?? dx.dim(0)) {
            replace(some, of: &dx, by: dx[some] + rows(some).kept(matmul(dyBT[some], a.T)))
        }
        return dx
    }
}

/// Returns sum + a b. Returns the sum if a or b is nil.
func product(_ a: MLXArray?, _ b: MLXArray?, addedTo sum: MLXArray? = nil) -> MLXArray? {
    guard let a, let b else { return sum }
    return sum.map { addMM($0, a, b) } ?? matmul(a, b)
}
