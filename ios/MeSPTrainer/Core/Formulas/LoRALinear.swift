import MLX
import MeSPAdapters

/// A projection with its adapter, if it has one:  y = G ∘ (x Wᵀ) + s (x̂ A) B + b,  with the factor s of `BlockwiseModel.scale`. x̂ is x; with
/// dropout it is x ∘ K / (1 − p), see `Dropout`. G is 1; with DoRA it is the adapter's m `[out]`, see `DoRA`.
struct LoRALinear {
    private(set) var weight: QuantizedMatrix
    private(set) var bias: MLXArray?
    private(set) var lora: LoRAMatrices?
    private let scale: Float
    /// nil where nothing is left out.
    private var dropout: Dropout?

    init(weight: QuantizedMatrix, bias: MLXArray?, lora: LoRAMatrices?, scale: Float, dropout: Dropout? = nil) {
        (self.weight, self.bias, self.lora, self.scale, self.dropout) = (weight, bias, lora, scale, dropout)
    }

    /// s, with dropout s / (1 − p).
    var factor: Float { dropout.map { scale / (1 - $0.key.rate) } ?? scale }

    /// x `[T, in]` to y `[T, out]`, in float32.
    ///
    /// - Parameter machine: that takes some rows of W at a time; nil for all of them.
    func callAsFunction(_ x: MLXArray, machine: Machine? = nil) -> MLXArray {
        let h = h(x)
        if let machine, machine.projectionRows < weight.rows {
            return concatenated(
                machine.each(of: weight.rows, size: machine.projectionRows) { outputs($0)(x, h: h) }, axis: -1)
        }
        return self(x, h: h)
    }

    /// y from x, and s x̂ A.
    func callAsFunction(_ x: MLXArray, h: MLXArray?) -> MLXArray {
        var y = weight.apply(x, times: lora?.m)
        if let h, let lora { y = addMM(y, h, lora.b) }
        return bias.map { y + $0 } ?? y
    }

    /// s x̂ A `[T, rank]`, in float32.
    func h(_ x: MLXArray) -> MLXArray? { products(x, nil).xA.map { $0 * factor } }

    /// (x ∘ K) A `[T, rank]`, and (x ∘ K)ᵀ g `[in, rank]` where there is a g `[T, rank]`, added to the sums where there are such.
    func products(
        _ x: MLXArray, _ g: MLXArray?, addedTo sums: (xA: MLXArray?, xTg: MLXArray?) = (nil, nil)
    ) -> (xA: MLXArray?, xTg: MLXArray?) {
        guard let lora else { return (nil, nil) }
        var (xA, xTg) = ([MLXArray](), sums.xTg)
        for rows in rowsAtOnce(of: x.dim(0), inputs: x.dim(1)) {
            let x = kept(x[rows].asType(.float32), rows)
            xA += product(x, lora.a, addedTo: sums.xA?[rows]).arrays
            xTg = product(x.T, g?[rows], addedTo: xTg)
        }
        return (concatenated(xA), xTg)
    }

    /// Some rows of x ∘ K from those of x.
    private func kept(_ x: MLXArray, _ rows: Range<Int>) -> MLXArray { dropout.map { $0.rows(rows)(x) } ?? x }

    /// The rows of x that are multiplied with K at a time: on a CPU as many as stay in a core's cache.
    private func rowsAtOnce(of count: Int, inputs: Int) -> [Range<Int>] {
        tiles(of: count, size: dropout == nil || !Device.isCPU ? count : max(1, (1 << 16) / inputs))
    }

    /// The projection to some of the outputs.
    func outputs(_ range: Range<Int>) -> LoRALinear {
        guard range.count < weight.rows else { return self }
        var part = self
        (part.weight, part.bias) = (weight.rows(range), bias?[range])
        part.lora = lora?.outputs(range)
        return part
    }

    /// The projection from some of the inputs, whose bounds are multiples of the group size, without its bias. Over all inputs,
    /// what these give adds up to what the whole projection gives but for the bias.
    func inputs(_ range: Range<Int>) -> LoRALinear {
        var part = self
        (part.weight, part.bias) = (weight.columns(range), nil)
        part.lora = lora.map { LoRAMatrices(a: $0.a[range], b: $0.b, m: $0.m) }
        part.dropout = dropout?.inputs(range)
        return part
    }

    /// The projection of some rows of x.
    func rows(_ range: Range<Int>) -> LoRALinear {
        var part = self
        part.dropout = dropout?.rows(range)
        return part
    }
}

extension LoRALinear {
    /// The derivative of a projection but for its bias. `h = s x̂ A` of its adapter is recomputed, never stored; with M of `Dropout`, or 1:
    ///
    ///     dx = (G ∘ dy) W + s (dy Bᵀ) Aᵀ ∘ M        dA = s x̂ᵀ (dy Bᵀ)        dB = hᵀ dy        dG = Σₜ dy ∘ (x Wᵀ)
    ///
    /// W is taken some rows at a time, so that no more of it is dequantized at once.
    /// - Parameters:
    ///   - wantsA: whether dA is wanted
    ///   - wantsDx: whether dx is wanted
    /// - Returns: dx `[T, in]`, added to the sum where there is one, and the gradients of A, B and G.
    func backward(
        _ x: MLXArray, dy: MLXArray, machine: Machine, wantsA: Bool, wantsDx: Bool, addedTo sum: MLXArray?
    ) -> (dx: MLXArray?, dA: MLXArray?, dB: MLXArray?, dG: MLXArray?) {
        let dyBT = dyBT(dy)
        let (xA, dA) = products(x, wantsA ? dyBT : nil)
        let dB = product(xA.map { $0 * factor }?.T, dy)
        let hasG = lora?.m != nil
        guard wantsDx || hasG else { return machine.part(nil, dA, dB, nil) }
        var dx = wantsDx ? adapterDx(dyBT, addedTo: sum) : nil
        if let first = dx, lora != nil { dx = machine.inputs([first], after: [first, dA, dB].arrays)[0] }
        var dG = [MLXArray]()
        for rows in tiles(of: weight.rows, size: machine.projectionRows) {
            let (part, dy) = (outputs(rows), dy[0..., rows])
            dG += part.dG(x, dy: dy, machine: machine).arrays
            if wantsDx { dx = machine.part(part.weight.applyTransposed(dy, times: part.lora?.m, addedTo: dx)) }
        }
        return (dx, dA, dB, hasG ? concatenated(dG) : nil)
    }

    /// Σₜ dy ∘ (x Wᵀ) `[out]`, some outputs at a time; nil where G is 1.
    func dG(_ x: MLXArray, dy: MLXArray, machine: Machine) -> MLXArray? {
        guard lora?.m != nil else { return nil }
        let outputs = tiles(of: weight.rows, size: machine.columnsAtOnce(of: dy))
        return concatenated(
            outputs.map { rows in machine.part((dy[0..., rows] * weight.rows(rows).apply(x)).sum(axis: 0)) })
    }

    /// s dy Bᵀ `[T, rank]`, with dropout times 1 / (1 − p).
    func dyBT(_ dy: MLXArray) -> MLXArray? { lora.map { matmul(dy, $0.b.T) * factor } }

    /// sum + (s dy Bᵀ) Aᵀ ∘ M `[T, in]`, from `dyBT`; or the sum.
    func adapterDx(_ dyBT: MLXArray?, addedTo sum: MLXArray?) -> MLXArray? {
        guard dropout != nil, let dyBT, let a = lora?.a else { return product(dyBT, lora?.a.T, addedTo: sum) }
        return concatenated(
            rowsAtOnce(of: dyBT.dim(0), inputs: a.dim(0)).map { rows in
                let dx = kept(matmul(dyBT[rows], a.T), rows)
                return sum.map { $0[rows] + dx } ?? dx
            })
    }
}

/// sum + a b, or what there is of it: the sum where a or b is nil.
func product(_ a: MLXArray?, _ b: MLXArray?, addedTo sum: MLXArray? = nil) -> MLXArray? {
    guard let a, let b else { return sum }
    return sum.map { addMM($0, a, b) } ?? matmul(a, b)
}
