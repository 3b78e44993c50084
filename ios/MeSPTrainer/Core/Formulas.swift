import Foundation
import MLX

// Each forward formula with its derivative right below it. Activations are [T, features]; `d…` is the gradient of the loss
// with respect to `…`.

// MARK: - Quantized matrix

/// W `[out, in]`, quantized in groups along its rows, and products with it. W is frozen: it has no gradient.
struct QuantizedMatrix {
    let weight: MLXArray
    let scales: MLXArray
    let biases: MLXArray
    let groupSize: Int
    let bits: Int
    /// W in float32, made when the first product asks for it and shared by all; nil on the GPU. On the CPU, dequantizing a tile
    /// and multiplying is some 50 times as fast as `quantizedMM`; on the GPU it is the other way round.
    private let dense: Dense?

    private final class Dense {
        lazy var array = make()
        private let make: () -> MLXArray
        init(_ make: @escaping () -> MLXArray) { self.make = make }
    }

    init(weight: MLXArray, scales: MLXArray, biases: MLXArray, groupSize: Int, bits: Int, onCPU: Bool) {
        (self.weight, self.scales, self.biases) = (weight, scales, biases)
        (self.groupSize, self.bits) = (groupSize, bits)
        dense = onCPU ? Dense { Self.dequantize(weight, scales, biases, groupSize, bits) } : nil
    }

    /// With bfloat16 scales `dequantized` would round W to bfloat16.
    private static func dequantize(_ w: MLXArray, _ scales: MLXArray, _ biases: MLXArray, _ groupSize: Int, _ bits: Int)
        -> MLXArray
    {
        dequantized(
            w, scales: scales.asType(.float32), biases: biases.asType(.float32), groupSize: groupSize, bits: bits)
    }

    var rows: Int { scales.dim(0) }

    /// Rows (outputs) `range` of W.
    func rows(_ range: Range<Int>) -> QuantizedMatrix {
        part(weight[range], scales[range], biases[range])
    }

    /// Columns (inputs) `range` of W, whose bounds are multiples of the group size.
    func columns(_ range: Range<Int>) -> QuantizedMatrix {
        let words = range.lowerBound * bits / 32..<range.upperBound * bits / 32
        let groups = range.lowerBound / groupSize..<range.upperBound / groupSize
        return part(weight[0..., words], scales[0..., groups], biases[0..., groups])
    }

    private func part(_ weight: MLXArray, _ scales: MLXArray, _ biases: MLXArray) -> QuantizedMatrix {
        QuantizedMatrix(
            weight: weight, scales: scales, biases: biases, groupSize: groupSize, bits: bits, onCPU: dense != nil)
    }

    /// The rows of W that `indices` `[n]` name, in float32: `[n, in]`.
    func take(_ indices: MLXArray) -> MLXArray {
        Self.dequantize(
            weight.take(indices, axis: 0), scales.take(indices, axis: 0), biases.take(indices, axis: 0), groupSize, bits
        )
    }

    /// x Wᵀ, `[T, out]`, in `dtype`, by default x's.
    func apply(_ x: MLXArray, as dtype: DType? = nil) -> MLXArray {
        let product: MLXArray
        if let dense, x.dim(0) > Self.fewRows {
            product = matmul(x.asType(.float32), dense.array.T)
        } else {
            let type = dense == nil ? scales.dtype : .float32
            product = quantizedMM(
                x.asType(type), weight, scales: scales.asType(type), biases: biases.asType(type), transpose: true,
                groupSize: groupSize, bits: bits)
        }
        return product.asType(dtype ?? x.dtype)
    }

    /// Rows of x up to which `quantizedMM` in float32 is the faster on the CPU too, as dequantizing W takes longer than they do.
    static let fewRows = 4

    /// sum + dy W, `[T, in]`, in sum's dtype.
    func applyTransposed(_ dy: MLXArray, addedTo sum: MLXArray) -> MLXArray {
        if let dense { return addMM(sum.asType(.float32), dy.asType(.float32), dense.array).asType(sum.dtype) }
        let dx = quantizedMM(
            dy, weight, scales: scales, biases: biases, transpose: false, groupSize: groupSize, bits: bits)
        return sum + dx.asType(sum.dtype)
    }
}

// MARK: - LoRA linear:  y = x Wᵀ + b + s (x A) B

/// A projection with its adapter, if it has one. s = α / rank.
struct LoRALinear {
    let weight: QuantizedMatrix
    let bias: MLXArray?
    let lora: LoRAMatrices?
    let scale: Float

    /// x `[T, in]` to y `[T, out]`, in float32.
    func callAsFunction(_ x: MLXArray) -> MLXArray {
        var y = weight.apply(x, as: .float32)
        if let bias { y = y + bias }
        guard let lora else { return y }
        return addMM(y, matmul(x.asType(.float32), lora.a) * scale, lora.b)
    }

    /// The same, `tile` rows of W at a time; evaluated where these are not all.
    func callAsFunction(_ x: MLXArray, tile: Int) -> MLXArray {
        let rows = tiles(of: weight.rows, size: tile)
        guard rows.count > 1 else { return self(x) }
        return concatenated(
            rows.map {
                let y = outputs($0)(x)
                eval(y)
                return y
            }, axis: -1)
    }

    /// The projection to some of the outputs.
    func outputs(_ range: Range<Int>) -> LoRALinear {
        LoRALinear(
            weight: weight.rows(range), bias: bias?[range],
            lora: lora.map { LoRAMatrices(a: $0.a, b: $0.b[0..., range]) }, scale: scale)
    }

    /// The projection, which has no bias, from some of the inputs, whose bounds are multiples of the group size. Over all
    /// inputs, what these give adds up to what the whole projection gives.
    func inputs(_ range: Range<Int>) -> LoRALinear {
        LoRALinear(
            weight: weight.columns(range), bias: nil, lora: lora.map { LoRAMatrices(a: $0.a[range], b: $0.b) },
            scale: scale)
    }
}

/// The derivative of a LoRA projection. `h = x A` is recomputed, never stored:
///
///     dx = dy W + s (dy Bᵀ) Aᵀ        dA = s xᵀ (dy Bᵀ)        dB = s (x A)ᵀ dy
///
/// W is taken a tile of rows at a time, so that no more than `tile` of it is dequantized at once.
/// - Parameter sum: `[T, in]`, or nil where dx is not wanted.
/// - Returns: sum + dx, and the gradients of A and B; evaluated.
func linearBackward(
    _ x: MLXArray, _ w: QuantizedMatrix, _ lora: LoRAMatrices, scale: Float, dy: MLXArray, tile: Int,
    addedTo sum: MLXArray?
) -> (dx: MLXArray?, gradient: LoRAMatrices) {
    let dyB = matmul(dy, lora.b.T) * scale
    let gradient = LoRAMatrices(a: matmul(x.T, dyB), b: matmul((matmul(x, lora.a) * scale).T, dy))
    guard let sum else {
        eval(gradient.a, gradient.b)
        return (nil, gradient)
    }
    var dx = addMM(sum, dyB, lora.a.T)
    eval(dx, gradient.a, gradient.b)
    for rows in tiles(of: w.rows, size: tile) {
        dx = w.rows(rows).applyTransposed(dy[0..., rows], addedTo: dx)
        eval(dx)
    }
    return (dx, gradient)
}

// MARK: - RMSNorm:  y = x r w,  r = 1 / √(mean(x²) + ε)

/// `[T, D]` to `[T, D]`, computed in float32.
func rmsNorm(_ x: MLXArray, weight: MLXArray, eps: Float) -> MLXArray {
    let x32 = x.asType(.float32)
    let r = rsqrt(x32.square().mean(axis: -1, keepDims: true) + eps)
    return weight * (x32 * r).asType(x.dtype)
}

/// dx = r (dy w − x r² mean(dy w x))
func rmsNormBackward(_ x: MLXArray, weight: MLXArray, eps: Float, dy: MLXArray) -> MLXArray {
    let x32 = x.asType(.float32)
    let r = rsqrt(x32.square().mean(axis: -1, keepDims: true) + eps)
    let dyw = (dy * weight).asType(.float32)
    let projection = (dyw * x32).mean(axis: -1, keepDims: true)
    return (r * (dyw - x32 * (r.square() * projection))).asType(x.dtype)
}

// MARK: - RoPE:  (y₁, y₂) = (x₁ cos θ − x₂ sin θ, x₁ sin θ + x₂ cos θ),  θ = t base^(−2i/d)

/// - Parameters:
///   - x: `[heads, n, d]`, positions `start ..< start + n`; x₁ and x₂ are the halves of a head
///   - base: the model's `rope_theta`
func rope(_ x: MLXArray, start: Int, base: Float) -> MLXArray { rotate(x, start: start, base: base, sign: 1) }

/// The derivative of a rotation is the rotation by the opposite angle.
func ropeBackward(dy: MLXArray, start: Int, base: Float) -> MLXArray {
    rotate(dy, start: start, base: base, sign: -1)
}

private func rotate(_ x: MLXArray, start: Int, base: Float, sign: Float) -> MLXArray {
    let half = x.dim(-1) / 2
    let frequencies = exp(MLXArray.arange(half).asType(.float32) * (-logf(base) / Float(half)))
    let angles = MLXArray.arange(start, start + x.dim(-2)).asType(.float32)[0..., .newAxis] * frequencies
    let (cosine, sine) = (cos(angles), sin(angles) * sign)
    let (x1, x2) = (x[.ellipsis, 0..<half], x[.ellipsis, half...])
    return concatenated([x1 * cosine - x2 * sine, x1 * sine + x2 * cosine], axis: -1)
}

// MARK: - Attention:  S = q kᵀ / √d + causal mask,  P = softmax(S),  attn_out = P v

/// Grouped-query attention, a tile of query rows at a time.
/// - Parameters:
///   - q: `[heads, n, d]`, the last n of N positions; k, v: `[kv_heads, N, d]`; q and k after RoPE
///   - tile: query rows a tile
/// - Returns: attn_out `[n, heads·d]`, in float32; evaluated where there is more than one tile.
func attention(q: MLXArray, k: MLXArray, v: MLXArray, tile: Int) -> MLXArray {
    let (heads, length, d, groups) = (q.dim(0), q.dim(1), q.dim(2), k.dim(0))
    let start = k.dim(1) - length
    let (k, v) = (k.asType(.float32), v.asType(.float32))
    let rows = tiles(of: length, size: tile)
    let parts = rows.map { rows in
        let keys = start + rows.upperBound
        let qTile = q[0..., rows].reshaped([groups, -1, d]).asType(.float32) / Float(d).squareRoot()
        let p = probabilities(qTile, k[0..., 0..<keys], rows: start + rows.lowerBound..<keys)
        let out = matmul(p, v[0..., 0..<keys]).reshaped([heads, rows.count, d])
        let part = out.swappedAxes(0, 1).reshaped([rows.count, heads * d])
        if rows.count < length { eval(part) }
        return part
    }
    return concatenated(parts)
}

/// P of the queries at positions `rows` over all positions before the last of them.
/// - Parameters:
///   - q: `[kv_heads, m, d]`, divided by √d; the query heads that share a key-value head lie below each other
///   - k: `[kv_heads, rows.upperBound, d]`
/// - Returns: `[kv_heads, m, rows.upperBound]`
private func probabilities(_ q: MLXArray, _ k: MLXArray, rows: Range<Int>) -> MLXArray {
    let (groups, keys) = (q.dim(0), rows.upperBound)
    let visible = MLXArray.arange(rows.lowerBound, keys)[0..., .newAxis] .>= MLXArray.arange(keys)
    let scores = matmul(q, k.swappedAxes(-1, -2)).reshaped([groups, -1, rows.count, keys])
    return softmax(which(visible, scores, -Float.infinity), axis: -1).reshaped(q.shape.dropLast() + [keys])
}

/// The derivative of grouped-query attention from what the forward pass left, a tile of query rows at a time:
///
///     dv = Pᵀ dO      dP = dO vᵀ      dS = P (dP − rowsum(dO ∘ O))      dq = dS k / √d      dk = dSᵀ q / √d
///
/// P is made again for each tile, over the keys up to its last row, and never kept. dq and dk are turned back through RoPE.
/// - Parameters:
///   - q: `[heads, T, d]`; k, v: `[kv_heads, T, d]`; all after RoPE
///   - out: attn_out by head, `[heads, T, d]`; dOut: its gradient, alike
///   - base: the model's `rope_theta`
///   - tile: query rows a tile
/// - Returns: dq `[T, heads·d]`, dk and dv `[T, kv_heads·d]`, evaluated.
func attentionBackward(
    q: MLXArray, k: MLXArray, v: MLXArray, out: MLXArray, dOut: MLXArray, base: Float, tile: Int
) -> (dq: MLXArray, dk: MLXArray, dv: MLXArray) {
    let (heads, length, d) = (q.dim(0), q.dim(1), q.dim(2))
    let (groups, perGroup) = (k.dim(0), heads / k.dim(0))
    let scale = 1 / Float(d).squareRoot()
    var (dqTiles, dkTiles, dvTiles) = ([MLXArray](), [MLXArray](), [MLXArray]())
    // What the tiles so far, from the last, add to the keys and values that earlier tiles see too.
    var (dk, dv) = (MLXArray.zeros(k.shape), MLXArray.zeros(v.shape))

    for rows in tiles(of: length, size: tile).reversed() {
        let keys = rows.upperBound
        // The query heads that share a key-value head lie below each other, so that a sum over them is a matrix product.
        func stacked(_ x: MLXArray) -> MLXArray {
            x[0..., rows].reshaped([groups, perGroup * rows.count, d]).asType(.float32)
        }
        func byToken(_ x: MLXArray) -> MLXArray { x.swappedAxes(0, 1).reshaped([rows.count, -1]).asType(q.dtype) }

        let (kTile, vTile) = (k[0..., 0..<keys].asType(.float32), v[0..., 0..<keys].asType(.float32))
        let (qTile, oTile, dO) = (stacked(q) * scale, stacked(out), stacked(dOut))

        let p = probabilities(qTile, kTile, rows: rows)
        let dP = matmul(dO, vTile.swappedAxes(-1, -2))
        let dS = p * (dP - (dO * oTile).sum(axis: -1, keepDims: true))

        let dq = (matmul(dS, kTile) * scale).reshaped([heads, rows.count, d])
        dv = dv[0..., 0..<keys] + matmul(p.swappedAxes(-1, -2), dO)
        dk = dk[0..., 0..<keys] + matmul(dS.swappedAxes(-1, -2), qTile)
        dqTiles.append(byToken(ropeBackward(dy: dq, start: rows.lowerBound, base: base)))
        dkTiles.append(byToken(ropeBackward(dy: dk[0..., rows], start: rows.lowerBound, base: base)))
        dvTiles.append(byToken(dv[0..., rows]))
        eval([dk, dv] + [dqTiles, dkTiles, dvTiles].compactMap(\.last))
    }
    let whole = [dqTiles, dkTiles, dvTiles].map { concatenated($0.reversed()) }
    eval(whole)
    return (whole[0], whole[1], whole[2])
}

// MARK: - SwiGLU:  act = silu(gate) ∘ up,  silu(x) = x σ(x)

func swiglu(gate: MLXArray, up: MLXArray) -> MLXArray { gate * sigmoid(gate) * up }

/// d_gate = d_act up (σ + gate σ (1 − σ)),  d_up = d_act silu(gate)
func swigluBackward(gate: MLXArray, up: MLXArray, dAct: MLXArray) -> (act: MLXArray, dGate: MLXArray, dUp: MLXArray) {
    let sigma = sigmoid(gate)
    let silu = gate * sigma
    return (silu * up, dAct * up * (sigma + silu * (1 - sigma)), dAct * silu)
}

// MARK: -

/// `0..<count` in pieces of `size`, the last perhaps shorter.
func tiles(of count: Int, size: Int) -> [Range<Int>] {
    stride(from: 0, to: count, by: size).map { $0..<min($0 + size, count) }
}
