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
    /// W in float32, made when the first product asks for it and shared by all (MLX is lazy); nil on the GPU. On the CPU,
    /// dequantizing a tile and multiplying is some 50 times as fast as `quantizedMM`; on the GPU it is the other way round.
    let dense: MLXArray?

    init(weight: MLXArray, scales: MLXArray, biases: MLXArray, groupSize: Int, bits: Int, onCPU: Bool) {
        (self.weight, self.scales, self.biases) = (weight, scales, biases)
        (self.groupSize, self.bits) = (groupSize, bits)
        dense = onCPU ? Self.dequantize(weight, scales, biases, groupSize, bits) : nil
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

    /// x Wᵀ, `[T, out]`, in x's dtype.
    func apply(_ x: MLXArray) -> MLXArray {
        if let dense { return matmul(x.asType(.float32), dense.T).asType(x.dtype) }
        return quantizedMM(x, weight, scales: scales, biases: biases, transpose: true, groupSize: groupSize, bits: bits)
    }

    /// sum + dy W, `[T, in]`, in sum's dtype.
    func applyTransposed(_ dy: MLXArray, addedTo sum: MLXArray) -> MLXArray {
        if let dense { return addMM(sum.asType(.float32), dy.asType(.float32), dense).asType(sum.dtype) }
        let dx = quantizedMM(
            dy, weight, scales: scales, biases: biases, transpose: false, groupSize: groupSize, bits: bits)
        return sum + dx.asType(sum.dtype)
    }
}

// MARK: - LoRA linear:  y = x Wᵀ + b + s (x A) B

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

/// The derivative of a rotation is the rotation by the opposite angle.
/// - Parameters:
///   - dy: `[heads, n, d]`, positions `start ..< start + n`; x₁ and x₂ are the halves of a head
///   - base: the model's `rope_theta`
func ropeBackward(dy: MLXArray, start: Int, base: Float) -> MLXArray {
    let half = dy.dim(-1) / 2
    let frequencies = exp(MLXArray.arange(half).asType(.float32) * (-logf(base) / Float(half)))
    let angles = MLXArray.arange(start, start + dy.dim(-2)).asType(.float32)[0..., .newAxis] * frequencies
    let (cosine, sine) = (cos(angles), sin(angles))
    let (dy1, dy2) = (dy[.ellipsis, 0..<half], dy[.ellipsis, half...])
    return concatenated([dy1 * cosine + dy2 * sine, dy2 * cosine - dy1 * sine], axis: -1)
}

// MARK: - Attention:  S = q kᵀ / √d + causal mask,  P = softmax(S),  attn_out = P v

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

        let visible = MLXArray.arange(rows.lowerBound, rows.upperBound)[0..., .newAxis] .>= MLXArray.arange(keys)
        let scores = matmul(qTile, kTile.swappedAxes(-1, -2)).reshaped([groups, perGroup, rows.count, keys])
        let p = softmax(which(visible, scores, -Float.infinity), axis: -1)
            .reshaped([groups, perGroup * rows.count, keys])
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
