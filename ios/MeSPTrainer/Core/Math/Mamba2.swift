import MLX
import MeSPBundle

/// Mamba-2 as in Granite 4.0-H. It computes y from the parts z, xBC and dt of its projection, for each head:
///
///     x, B, C = silu(conv(xBC) + bias)        Δ = softplus(dt + dt_bias)        κ = a Δ,  a = −exp(A_log)
///     o = (the state space model's output for u = Δ x, κ, B and C) + D x
///     y = RMSNorm(o ∘ silu(z))
///
/// The norm is over all heads. A group consists of heads / groups consecutive heads, which share B and C.
package struct Mamba2 {
    let heads, groups: Int
    /// The dimensions P and N of a head's state.
    let headDim, stateSize: Int
    /// The convolution of x, B and C, with F = heads · P + 2 · groups · N features.
    let convolution: CausalConvolution
    let bias: MLXArray
    /// dt_bias, A_log and D, `[heads]` each.
    let dtBias, aLog, d: MLXArray
    let norm: RMSNorm

    func start(dtype: DType) -> MixerState.Recurrent {
        .init(tail: convolution.start(dtype: dtype), memory: MLXArray.zeros([heads, headDim, stateSize]))
    }

    /// Returns an estimate of the memory in bytes that one head takes: twice the size of its largest array.
    func bytesOfHead(_ length: Int) -> Int {
        2 * Self.arrayBytes(headDim: headDim, stateSize: stateSize, length: length)
    }

    static func arrayBytes(headDim: Int, stateSize: Int, length: Int) -> Int {
        4 * length * max(headDim, ChunkDecays.chunk, headDim * stateSize / ChunkDecays.chunk)
    }

    // MARK: - o

    /// Returns the state space model of some heads of a group.
    /// - Parameters:
    ///   - x: `[n, heads, P]`
    ///   - dt: `[n, all heads]`
    ///   - b, c: `[n, N]`
    func stateSpace(_ heads: Range<Int>, x: MLXArray, dt: MLXArray, b: MLXArray, c: MLXArray) -> StateSpace {
        let step = timeStep(heads, dt)
        return StateSpace(u: column(step) * x, logDecay: -exp(aLog[heads]) * step, b: b, c: c)
    }

    /// Returns o `[n, heads · P]` of some heads from the model's output.
    func output(_ heads: Range<Int>, _ y: MLXArray, x: MLXArray) -> MLXArray {
        (y + column(d[heads]) * x).reshaped([x.dim(0), -1])
    }

    /// Returns the gradients of the features of x in xBC, and of dt, of some heads:
    ///
    ///     dx = Δ du + D do        dΔ = rowsum(du ∘ x) + a dκ        d_dt = dΔ σ(dt + dt_bias)
    func headsBackward(
        _ heads: Range<Int>, xBC: MLXArray, x: MLXArray, dt: MLXArray, dO: MLXArray, du: MLXArray, dLogDecay: MLXArray
    ) -> [MLXArray] {
        let dx = column(timeStep(heads, dt)) * du + column(d[heads]) * dO
        let dDt = Self.stepBackward([(du * x).sum(axis: -1), dLogDecay, aLog[heads], shifted(heads, dt)])
        return [inputBackward(.x(heads), xBC, dy: dx.reshaped([x.dim(0), -1])), dDt]
    }

    private func shifted(_ heads: Range<Int>, _ dt: MLXArray) -> MLXArray {
        dt[0..., heads].asType(.float32) + dtBias[heads].asType(.float32)
    }

    private func timeStep(_ heads: Range<Int>, _ dt: MLXArray) -> MLXArray {
        logAddExp(shifted(heads, dt), MLXArray(0 as Float))
    }

    private static let stepBackward = Fused { ($0[0] - exp($0[2]) * $0[1]) * sigmoid($0[3]) }

    // MARK: - silu(conv(xBC) + bias)

    /// A part of the features of xBC: x of some heads, or B or C of a group.
    enum Part {
        case x(Range<Int>)
        case b(Int)
        case c(Int)
    }

    func features(_ part: Part) -> Range<Int> {
        func after(_ start: Int, _ group: Int) -> Range<Int> {
            start + group * stateSize..<start + (group + 1) * stateSize
        }
        return switch part {
        case .x(let heads): heads.lowerBound * headDim..<heads.upperBound * headDim
        case .b(let group): after(heads * headDim, group)
        case .c(let group): after(heads * headDim + groups * stateSize, group)
        }
    }

    /// Returns x, B or C `[n, features]`, in float32.
    /// - Parameter tail: xBC of the tokens before; nil at the start of a sequence
    func input(_ part: Part, _ xBC: MLXArray, tail: MLXArray? = nil) -> MLXArray {
        Self.silu([convolved(part, xBC, tail: tail), bias[features(part)]])
    }

    func inputBackward(_ part: Part, _ xBC: MLXArray, dy: MLXArray) -> MLXArray {
        let dConvolved = Self.siluBackward([convolved(part, xBC, tail: nil), bias[features(part)], dy])
        return convolution.features(features(part)).backward(dy: dConvolved)
    }

    private func convolved(_ part: Part, _ xBC: MLXArray, tail: MLXArray?) -> MLXArray {
        let (convolution, features) = (convolution.features(features(part)), features(part))
        return convolution(
            xBC[0..., features], tail: tail.map { $0[0..., features] } ?? convolution.start(dtype: xBC.dtype))
    }

    private static let silu = Fused { Activation.silu.values($0[0] + $0[1].asType(.float32)).f }
    private static let siluBackward = Fused {
        $0[2] * Activation.silu.values($0[0] + $0[1].asType(.float32)).slope
    }

    // MARK: - y = RMSNorm(o ∘ silu(z))

    func gatedNorm(o: MLXArray, z: MLXArray) -> MLXArray {
        norm(Activation.silu.gated(gate: z.asType(.float32), up: o.asType(.float32)))
    }

    func gatedNormBackward(o: MLXArray, z: MLXArray, dy: MLXArray) -> (dO: MLXArray, dZ: MLXArray) {
        let gated = Activation.silu.gated(gate: z.asType(.float32), up: o.asType(.float32))
        let d = Activation.silu.gatedBackward(gate: [z], up: [o], dAct: norm.backward(gated, dy: dy))
        return (d.dUp, d.dGate)
    }

    // MARK: - Shapes

    func headRange(of group: Int, _ own: Range<Int>) -> Range<Int> {
        let first = group * (heads / groups)
        return first + own.lowerBound..<first + own.upperBound
    }

    func byHead(_ x: MLXArray) -> MLXArray { x.reshaped([x.dim(0), -1, headDim]) }

    private func column(_ x: MLXArray) -> MLXArray { x.expandedDimensions(axis: -1) }
}
