import Foundation
import MLX

// Each forward formula with its derivative right below it. Activations are [T, features]; `d…` is the gradient of the loss
// with respect to `…`.

// MARK: - Quantized matrix

/// How a matrix is quantized. The shapes of its arrays tell.
struct QuantizationFormat {
    let bits: Int
    let groupSize: Int
    let mode: QuantizationMode

    /// nil where MLX has no such format.
    /// - Parameters:
    ///   - inputs: weights in a row
    ///   - words: 32-bit words in a row
    ///   - groups: scales in a row
    ///   - hasBiases: whether there are biases, which only affine quantization has
    init?(inputs: Int, words: Int, groups: Int, hasBiases: Bool) {
        guard words > 0, groups > 0, words * 32 % inputs == 0, inputs % groups == 0 else { return nil }
        (bits, groupSize) = (words * 32 / inputs, inputs / groups)
        switch (hasBiases, groupSize, bits) {
        case (true, _, _):
            guard [32, 64, 128].contains(groupSize), [2, 3, 4, 5, 6, 8].contains(bits) else { return nil }
            mode = .affine
        case (false, 16, 4): mode = .nvfp4
        case (false, 32, 4): mode = .mxfp4
        case (false, 32, 8): mode = .mxfp8
        default: return nil
        }
    }
}

/// W `[out, in]`, quantized in groups along its rows, and products with it. W is frozen: it has no gradient.
struct QuantizedMatrix {
    let weight: MLXArray
    let scales: MLXArray
    /// nil but for affine quantization.
    let biases: MLXArray?
    let format: QuantizationFormat
    /// W in float32, made when the first product asks for it and shared by all; nil on the GPU. On the CPU, dequantizing a tile
    /// and multiplying is some 50 times as fast as `quantizedMM`; on the GPU it is the other way round.
    private let dense: Dense?

    private final class Dense {
        lazy var array = make()
        private let make: () -> MLXArray
        init(_ make: @escaping () -> MLXArray) { self.make = make }
    }

    init(weight: MLXArray, scales: MLXArray, biases: MLXArray?, format: QuantizationFormat, onCPU: Bool) {
        (self.weight, self.scales, self.biases, self.format) = (weight, scales, biases, format)
        dense = onCPU ? Dense { Self.dequantize(weight, scales, biases, format) } : nil
    }

    /// With bfloat16 scales `dequantized` would round W to bfloat16.
    private static func dequantize(
        _ weight: MLXArray, _ scales: MLXArray, _ biases: MLXArray?, _ format: QuantizationFormat
    ) -> MLXArray {
        dequantized(
            weight, scales: biases == nil ? scales : scales.asType(.float32), biases: biases?.asType(.float32),
            groupSize: format.groupSize, bits: format.bits, mode: format.mode, dtype: .float32)
    }

    var rows: Int { scales.dim(0) }

    /// Rows (outputs) `range` of W.
    func rows(_ range: Range<Int>) -> QuantizedMatrix {
        range.count == rows ? self : part(weight[range], scales[range], biases?[range])
    }

    /// Columns (inputs) `range` of W, whose bounds are multiples of the group size.
    func columns(_ range: Range<Int>) -> QuantizedMatrix {
        let words = range.lowerBound * format.bits / 32..<range.upperBound * format.bits / 32
        let groups = range.lowerBound / format.groupSize..<range.upperBound / format.groupSize
        return part(weight[0..., words], scales[0..., groups], biases?[0..., groups])
    }

    private func part(_ weight: MLXArray, _ scales: MLXArray, _ biases: MLXArray?) -> QuantizedMatrix {
        QuantizedMatrix(weight: weight, scales: scales, biases: biases, format: format, onCPU: dense != nil)
    }

    /// The rows of W that `indices` `[n]` name, in float32: `[n, in]`.
    func take(_ indices: MLXArray) -> MLXArray {
        Self.dequantize(
            weight.take(indices, axis: 0), scales.take(indices, axis: 0), biases?.take(indices, axis: 0), format)
    }

    /// x Wᵀ, `[T, out]`, in `dtype`, by default x's.
    func apply(_ x: MLXArray, as dtype: DType? = nil) -> MLXArray {
        let product: MLXArray
        if let dense, x.dim(0) > Self.fewRows {
            product = matmul(x.asType(.float32), dense.array.T)
        } else {
            product = multiplied(x, transpose: true)
        }
        return product.asType(dtype ?? x.dtype)
    }

    /// Rows of x up to which `quantizedMM` in float32 is the faster on the CPU too, as dequantizing W takes longer than they do.
    static let fewRows = 4

    /// sum + dy W, `[T, in]`, in sum's dtype.
    func applyTransposed(_ dy: MLXArray, addedTo sum: MLXArray) -> MLXArray {
        if let dense { return addMM(sum.asType(.float32), dy.asType(.float32), dense.array).asType(sum.dtype) }
        return sum + multiplied(dy, transpose: false).asType(sum.dtype)
    }

    /// x Wᵀ or x W by `quantizedMM`, on the CPU in float32.
    private func multiplied(_ x: MLXArray, transpose: Bool) -> MLXArray {
        func cast(_ array: MLXArray) -> MLXArray { dense == nil ? array : array.asType(.float32) }
        return quantizedMM(
            cast(x), weight, scales: biases == nil ? scales : cast(scales), biases: biases.map(cast),
            transpose: transpose, groupSize: format.groupSize, bits: format.bits, mode: format.mode)
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

    /// The projection from some of the inputs, whose bounds are multiples of the group size, without its bias. Over all inputs,
    /// what these give adds up to what the whole projection gives but for the bias.
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

struct RMSNorm {
    /// `[D]`
    let weight: MLXArray
    let eps: Float

    /// `[…, D]` to `[…, D]`, computed in float32.
    func callAsFunction(_ x: MLXArray) -> MLXArray {
        let x32 = x.asType(.float32)
        return weight * (x32 * r(x32)).asType(x.dtype)
    }

    /// dx = r (dy w − x r² mean(dy w x))
    func backward(_ x: MLXArray, dy: MLXArray) -> MLXArray {
        let x32 = x.asType(.float32)
        let r = r(x32)
        let dyw = (dy * weight).asType(.float32)
        let projection = (dyw * x32).mean(axis: -1, keepDims: true)
        return (r * (dyw - x32 * (r.square() * projection))).asType(x.dtype)
    }

    private func r(_ x: MLXArray) -> MLXArray { rsqrt(x.square().mean(axis: -1, keepDims: true) + eps) }
}

// MARK: - RoPE:  (y₁, y₂) = s (x₁ cos θ − x₂ sin θ, x₁ sin θ + x₂ cos θ),  θ = t · frequency

struct RoPE {
    /// Radians a position of each pair (x₁, x₂), which lie in the two halves of a head's first dimensions; the others stay as they
    /// are.
    let frequencies: [Float]
    /// s
    let scale: Float

    /// - Parameter x: `[heads, n, d]`, positions `start ..< start + n`
    func callAsFunction(_ x: MLXArray, start: Int) -> MLXArray { turned(x, start: start, sign: 1) }

    /// The derivative of a rotation is the rotation by the opposite angle.
    func backward(dy: MLXArray, start: Int) -> MLXArray { turned(dy, start: start, sign: -1) }

    private func turned(_ x: MLXArray, start: Int, sign: Float) -> MLXArray {
        let half = frequencies.count
        guard half > 0 else { return x }
        let angles = MLXArray.arange(start, start + x.dim(-2)).asType(.float32)[0..., .newAxis] * MLXArray(frequencies)
        let (cosine, sine) = (cos(angles) * scale, sin(angles) * (sign * scale))
        let (x1, x2) = (x[.ellipsis, 0..<half], x[.ellipsis, half..<2 * half])
        var parts = [x1 * cosine - x2 * sine, x1 * sine + x2 * cosine]
        if 2 * half < x.dim(-1) { parts.append(x[.ellipsis, (2 * half)...]) }
        return concatenated(parts, axis: -1)
    }
}

// MARK: - Soft cap:  cap(s) = c tanh(s / c)

struct SoftCap {
    let c: Float

    func callAsFunction(_ s: MLXArray) -> MLXArray { tanh(s / c) * c }

    /// cap′(s) = 1 − (cap(s) / c)², from cap(s).
    func slope(_ capped: MLXArray) -> MLXArray { 1 - (capped / c).square() }
}

// MARK: - Attention:  S = cap(q̂ k̂ᵀ · scale) + mask,  P = softmax(S),  attn_out = P v

/// Grouped-query attention, causal, a tile of query rows at a time over the keys that they see.
struct Attention {
    let scale: Float
    let softcap: SoftCap?
    /// How many positions a query sees, its own included; nil for all.
    let window: Int?
    let rope: RoPE
    let qNorm: RMSNorm?
    let kNorm: RMSNorm?

    /// q̂ = RoPE(norm(q)), in float32.
    /// - Parameter q: `[heads, n, d]`, positions `start ..< start + n`
    func query(_ q: MLXArray, start: Int) -> MLXArray { positioned(q, qNorm, start) }

    /// k̂ = RoPE(norm(k)), in float32.
    func key(_ k: MLXArray, start: Int) -> MLXArray { positioned(k, kNorm, start) }

    private func positioned(_ x: MLXArray, _ norm: RMSNorm?, _ start: Int) -> MLXArray {
        let x = x.asType(.float32)
        return rope(norm.map { $0(x) } ?? x, start: start)
    }

    /// dq or dk from the gradient of q̂ or k̂, in float32.
    private func positionedBackward(_ x: MLXArray, _ norm: RMSNorm?, _ start: Int, dy: MLXArray) -> MLXArray {
        let d = rope.backward(dy: dy, start: start)
        return norm.map { $0.backward(x.asType(.float32), dy: d) } ?? d
    }

    /// - Parameters:
    ///   - q: q̂ `[heads, n, d]`, the last n of N positions; k, v: k̂ and v `[kv_heads, N, d]`
    ///   - tile: query rows a tile
    /// - Returns: attn_out `[n, heads·d]`, in float32; evaluated where there is more than one tile.
    func callAsFunction(q: MLXArray, k: MLXArray, v: MLXArray, tile: Int) -> MLXArray {
        let (heads, length, d, groups) = (q.dim(0), q.dim(1), q.dim(2), k.dim(0))
        let start = k.dim(1) - length
        let (k, v) = (k.asType(.float32), v.asType(.float32))
        let parts = tiles(of: length, size: tile).map { tile in
            let rows = start + tile.lowerBound..<start + tile.upperBound
            let keys = seen(by: rows)
            let q = q[0..., tile].reshaped([groups, -1, d]).asType(.float32)
            let (p, _) = probabilities(q * scale, k[0..., keys], rows, keys)
            let out = matmul(p, v[0..., keys]).reshaped([heads, tile.count, d])
            let part = out.swappedAxes(0, 1).reshaped([tile.count, heads * d])
            if tile.count < length { eval(part) }
            return part
        }
        return concatenated(parts)
    }

    /// The positions that some query at a position of `rows` sees.
    private func seen(by rows: Range<Int>) -> Range<Int> {
        max(0, rows.lowerBound + 1 - (window ?? rows.upperBound))..<rows.upperBound
    }

    /// P of the queries at positions `rows` over the `keys`.
    /// - Parameters:
    ///   - q: q̂ · scale `[kv_heads, m, d]`; the query heads that share a key-value head lie below each other
    ///   - k: k̂ `[kv_heads, keys, d]`
    /// - Returns: P `[kv_heads, m, keys]`, and cap′ of the scores, alike, nil where they are not capped.
    private func probabilities(_ q: MLXArray, _ k: MLXArray, _ rows: Range<Int>, _ keys: Range<Int>)
        -> (p: MLXArray, slope: MLXArray?)
    {
        var scores = matmul(q, k.swappedAxes(-1, -2)).reshaped([k.dim(0), -1, rows.count, keys.count])
        var slope: MLXArray?
        if let softcap {
            scores = softcap(scores)
            slope = softcap.slope(scores).reshaped([k.dim(0), -1, keys.count])
        }
        let (queries, positions) = (
            MLXArray.arange(rows.lowerBound, rows.upperBound)[0..., .newAxis],
            MLXArray.arange(keys.lowerBound, keys.upperBound)
        )
        var visible = queries .>= positions
        if let window { visible = logicalAnd(visible, queries .< positions + window) }
        let p = softmax(which(visible, scores, -Float.infinity), axis: -1)
        return (p.reshaped([k.dim(0), -1, keys.count]), slope)
    }

    /// The derivative from what the forward pass left, a tile of query rows at a time, the last first:
    ///
    ///     dv = Pᵀ dO      dP = dO vᵀ      dS = P (dP − rowsum(dO ∘ O)) cap′      dq̂ = dS k̂ · scale      dk̂ = dSᵀ q̂ · scale
    ///
    /// P is made again for each tile and never kept. dq̂ and dk̂ are turned back through RoPE and the norms.
    /// - Parameters:
    ///   - q: `[heads, T, d]`; k, v: `[kv_heads, T, d]`; before the norms and RoPE
    ///   - out: attn_out by head, `[heads, T, d]`; dOut: its gradient, alike
    ///   - tile: query rows a tile
    /// - Returns: dq `[T, heads·d]`, dk and dv `[T, kv_heads·d]`, evaluated.
    func backward(q: MLXArray, k: MLXArray, v: MLXArray, out: MLXArray, dOut: MLXArray, tile: Int)
        -> (dq: MLXArray, dk: MLXArray, dv: MLXArray)
    {
        var parts = tilesBackward(q: q, k: k, v: v, out: out, dOut: dOut, tile: tile)
        func joined(_ tiles: inout [MLXArray]) -> MLXArray {
            let whole = concatenated(tiles.reversed())
            eval(whole)
            tiles = []
            return whole
        }
        return (joined(&parts.dq), joined(&parts.dk), joined(&parts.dv))
    }

    /// The tiles of dq, dk and dv, the last first; evaluated.
    private func tilesBackward(q: MLXArray, k: MLXArray, v: MLXArray, out: MLXArray, dOut: MLXArray, tile: Int)
        -> (dq: [MLXArray], dk: [MLXArray], dv: [MLXArray])
    {
        let (heads, length, d) = (q.dim(0), q.dim(1), q.dim(2))
        let (groups, perGroup) = (k.dim(0), heads / k.dim(0))
        var (dqTiles, dkTiles, dvTiles) = ([MLXArray](), [MLXArray](), [MLXArray]())
        // What the tiles so far add to the keys and values that earlier tiles see too, up to the next tile's last row.
        var (dk, dv) = (MLXArray.zeros([groups, 0, d]), MLXArray.zeros([groups, 0, d]))
        let kHat = key(k, start: 0)
        eval(kHat)

        for rows in tiles(of: length, size: tile).reversed() {
            let keys = seen(by: rows)
            // The query heads that share a key-value head lie below each other, so that a sum over them is a matrix product.
            func stacked(_ x: MLXArray) -> MLXArray { x.reshaped([groups, perGroup * rows.count, d]).asType(.float32) }
            func byToken(_ x: MLXArray) -> MLXArray { x.swappedAxes(0, 1).reshaped([rows.count, -1]).asType(q.dtype) }
            /// new, of the `keys`, plus the sum so far, of the last of them.
            func added(_ sum: MLXArray, to new: MLXArray) -> MLXArray {
                let missing = keys.count - sum.dim(1)
                return new + (missing > 0 ? concatenated([MLXArray.zeros([groups, missing, d]), sum], axis: 1) : sum)
            }

            /// dq̂; evaluated, as are dk and dv, with which the scores go.
            func scoresBackward() -> MLXArray {
                let (kTile, vTile) = (kHat[0..., keys], v[0..., keys].asType(.float32))
                let qTile = stacked(query(q[0..., rows], start: rows.lowerBound)) * scale
                let (oTile, dO) = (stacked(out[0..., rows]), stacked(dOut[0..., rows]))

                let (p, slope) = probabilities(qTile, kTile, rows, keys)
                let dP = matmul(dO, vTile.swappedAxes(-1, -2))
                var dS = p * (dP - (dO * oTile).sum(axis: -1, keepDims: true))
                if let slope { dS = dS * slope }

                let dq = (matmul(dS, kTile) * scale).reshaped([heads, rows.count, d])
                dv = added(dv, to: matmul(p.swappedAxes(-1, -2), dO))
                dk = added(dk, to: matmul(dS.swappedAxes(-1, -2), qTile))
                eval(dq, dk, dv)
                return dq
            }

            let dq = scoresBackward()
            let own = rows.lowerBound - keys.lowerBound  // where in dk and dv the tile's own positions begin
            dqTiles.append(byToken(positionedBackward(q[0..., rows], qNorm, rows.lowerBound, dy: dq)))
            dkTiles.append(byToken(positionedBackward(k[0..., rows], kNorm, rows.lowerBound, dy: dk[0..., own...])))
            dvTiles.append(byToken(dv[0..., own...]))
            (dk, dv) = (dk[0..., 0..<own], dv[0..., 0..<own])
            eval([dk, dv] + [dqTiles, dkTiles, dvTiles].compactMap(\.last))
        }
        return (dqTiles, dkTiles, dvTiles)
    }
}

// MARK: - Gated activation:  act = f(gate) ∘ up

/// f of the MLP.
enum Activation: String, Codable, Sendable {
    /// silu(x) = x σ(x)
    case silu
    /// gelu(x) = x (1 + t) / 2,  t = tanh(√(2/π) (x + 0.044715 x³)), the approximation by tanh
    case gelu

    func gated(gate: MLXArray, up: MLXArray) -> MLXArray { values(gate).f * up }

    /// d_gate = d_act up f′(gate),  d_up = d_act f(gate)
    func gatedBackward(gate: MLXArray, up: MLXArray, dAct: MLXArray) -> (act: MLXArray, dGate: MLXArray, dUp: MLXArray)
    {
        let (f, slope) = values(gate)
        return (f * up, dAct * up * slope, dAct * f)
    }

    /// f(x) and f′(x)
    private func values(_ x: MLXArray) -> (f: MLXArray, slope: MLXArray) {
        switch self {
        case .silu:  // silu′ = σ + x σ (1 − σ)
            let sigma = sigmoid(x)
            let silu = x * sigma
            return (silu, sigma + silu * (1 - sigma))
        case .gelu:  // gelu′ = (1 + t) / 2 + x (1 − t²) √(2/π) (1 + 3 · 0.044715 x²) / 2
            let (c, a) = (Float(2 / Double.pi).squareRoot(), Float(0.044715))
            let square = x.square()
            let t = tanh(c * x * (1 + a * square))
            let half = (1 + t) * 0.5
            return (x * half, half + (0.5 * c) * x * (1 - t.square()) * (1 + 3 * a * square))
        }
    }
}

// MARK: -

/// `0..<count` in pieces of `size`, the last perhaps shorter.
func tiles(of count: Int, size: Int) -> [Range<Int>] {
    stride(from: 0, to: count, by: size).map { $0..<min($0 + size, count) }
}
