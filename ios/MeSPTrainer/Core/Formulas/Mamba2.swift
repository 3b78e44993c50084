import MLX
import MeSPBundle

/// Mamba-2 as Granite 4.0-H has it, from the parts z, xBC and dt of its projection, by head:
///
///     x, B, C = silu(conv(xBC) + bias)        Δ = softplus(dt + dt_bias)        l = −exp(A_log) Δ
///     o = the state space of u = Δ x, l, B and C, + D x
///     y = RMSNorm(o ∘ silu(z))
///
/// The norm is over all heads. B and C are a group's, of heads / groups heads, which lie behind each other.
package struct Mamba2 {
    let heads, groups: Int
    /// P and N
    let headDim, stateSize: Int
    /// Over all x, B and C: F = heads · P + 2 · groups · N features.
    let convolution: CausalConvolution
    /// `[F]`
    let bias: MLXArray
    /// `[heads]`
    let dtBias, aLog, d: MLXArray
    /// Its weight is `[heads · P]`.
    let norm: RMSNorm

    /// The state before the first token.
    /// - Parameter dtype: that of xBC
    func start(dtype: DType) -> MixerState.Recurrent {
        .init(tail: convolution.start(dtype: dtype), memory: MLXArray.zeros([heads, headDim, stateSize]))
    }

    func tile(length: Int, bytes: Int) -> Int {
        Self.tile(
            headsOfGroup: heads / groups, headDim: headDim, stateSize: stateSize, length: length, bytes: bytes
        ).heads
    }

    /// How many heads of a group at a time keep the derivative's temporaries in proportion to `bytes`: of what has a row a token, or a
    /// state a chunk, it holds some 13 arrays, where attention's holds some 6 of `bytes` each. And the bytes of such an array.
    static func tile(headsOfGroup: Int, headDim: Int, stateSize: Int, length: Int, bytes: Int)
        -> (heads: Int, array: Int)
    {
        let ofHead = 4 * length * max(headDim, ChunkDecays.chunk, headDim * stateSize / ChunkDecays.chunk)
        let heads = min(headsOfGroup, max(1, bytes / (2 * ofHead)))
        return (heads, heads * ofHead)
    }

    // MARK: - o

    /// - Parameters:
    ///   - xBC: `[n, F]`
    ///   - dt: `[n, heads]`
    ///   - state: of the tokens before; becomes that of the last of these
    ///   - tile: heads at a time
    /// - Returns: o `[n, heads · P]`, in float32; evaluated where there is more than one tile.
    func callAsFunction(xBC: MLXArray, dt: MLXArray, state: inout MixerState.Recurrent, tile: Int) -> MLXArray {
        let before = state
        let parts = (0..<groups).flatMap { group in
            let (b, c) = (input(.b(group), xBC, tail: before.tail), input(.c(group), xBC, tail: before.tail))
            return tiles(of: group, size: tile).map { heads in
                var memory = before.memory[heads]
                let x = byHead(input(.x(heads), xBC, tail: before.tail))
                let space = stateSpace(heads, x: x, dt: dt, b: b, c: c, pace: .chained)
                let o = (space(state: &memory) + column(d[heads]) * x).reshaped([x.dim(0), -1])
                if heads.count < self.heads { eval(o, memory) }
                return (o: o, memory: memory)
            }
        }
        state.memory = concatenated(parts.map(\.memory))
        state.tail = convolution.tail(after: xBC, tail: before.tail)
        return concatenated(parts.map(\.o), axis: -1)
    }

    /// The derivative of o, of a whole sequence. The intermediates of o are computed again, some heads at a time. xBC and dO are consumed,
    /// as their gradient is assembled after their last use.
    ///
    ///     dx = Δ du + D do        dΔ = rowsum(du ∘ x) − exp(A_log) dl        d_dt = dΔ σ(dt + dt_bias)
    ///
    /// with dB and dC summed over the heads of a group.
    ///
    /// - Parameters:
    ///   - xBC: `[T, F]`
    ///   - dt: `[T, heads]`
    ///   - dO: `[T, heads · P]`, in float32
    ///   - records: the rows of each record of the sequence, which has a state of its own; nil for one
    ///   - tile: heads at a time
    /// - Returns: the gradients of xBC and dt, in float32, evaluated.
    func backward(
        xBC: consuming MLXArray, dt: MLXArray, dO: consuming MLXArray, records: [Range<Int>]? = nil, tile: Int,
        pace: Pace
    ) -> (dXBC: MLXArray, dDt: MLXArray) {
        var arrays = [consume xBC, consume dO]
        let records = records ?? [0..<dt.dim(0)]
        var (dx, dB, dC, dDt) = ([MLXArray](), [MLXArray](), [MLXArray](), [MLXArray]())
        for group in 0..<groups {
            let ofGroup = eachRecord(records) { [input(.b(group), arrays[0][$0]), input(.c(group), arrays[0][$0])] }
            pace.finish(ofGroup)
            var sums = [MLXArray]()
            for heads in tiles(of: group, size: tile) {
                let d = eachRecord(records) {
                    backward(
                        heads, xBC: arrays[0][$0], dt: dt[$0], b: ofGroup[0][$0], c: ofGroup[1][$0], dO: arrays[1][$0],
                        pace: pace)
                }
                sums = sums.isEmpty ? Array(d[2...]) : zip(sums, d[2...]).map { $0 + $1 }
                arrays = pace.next(arrays, after: Array(d[..<2]) + sums)
                dx.append(d[0])
                dDt.append(d[1])
            }
            let d = eachRecord(records) {
                [
                    inputBackward(.b(group), arrays[0][$0], dy: sums[0][$0]),
                    inputBackward(.c(group), arrays[0][$0], dy: sums[1][$0]),
                ]
            }
            arrays = pace.next(arrays, after: d)
            dB.append(d[0])
            dC.append(d[1])
        }
        arrays = []
        let all = (concatenated(dx + dB + dC, axis: -1), concatenated(dDt, axis: -1))
        eval(all.0, all.1)
        return all
    }

    /// The gradients of some heads' x in xBC, and of their dt, B and C, `[T, features]`.
    private func backward(
        _ heads: Range<Int>, xBC: MLXArray, dt: MLXArray, b: MLXArray, c: MLXArray, dO: MLXArray, pace: Pace
    ) -> [MLXArray] {
        let x = byHead(input(.x(heads), xBC))
        pace.finish([x])
        let dO = byHead(dO[0..., features(.x(heads))])
        let d = stateSpace(heads, x: x, dt: dt, b: b, c: c, pace: pace).backward(dY: dO)
        let dx = column(step(heads, dt)) * d.du + column(self.d[heads]) * dO
        let dDt = Self.stepBackward(
            [(d.du * x).sum(axis: -1), d.dLogDecay, aLog[heads], shifted(heads, dt)])
        let dInput = inputBackward(.x(heads), xBC, dy: dx.reshaped([x.dim(0), -1]))
        pace.finish([dInput, dDt])
        return [dInput, dDt, d.dB, d.dC]
    }

    private func stateSpace(
        _ heads: Range<Int>, x: MLXArray, dt: MLXArray, b: MLXArray, c: MLXArray, pace: Pace
    ) -> StateSpace {
        let step = step(heads, dt)
        return StateSpace(u: column(step) * x, logDecay: -exp(aLog[heads]) * step, b: b, c: c, pace: pace)
    }

    /// dt + dt_bias `[n, heads]`
    private func shifted(_ heads: Range<Int>, _ dt: MLXArray) -> MLXArray {
        dt[0..., heads].asType(.float32) + dtBias[heads].asType(.float32)
    }

    /// Δ `[n, heads]`
    private func step(_ heads: Range<Int>, _ dt: MLXArray) -> MLXArray {
        logAddExp(shifted(heads, dt), MLXArray(0 as Float))
    }

    private static let stepBackward = Fused { ($0[0] - exp($0[2]) * $0[1]) * sigmoid($0[3]) }

    // MARK: - silu(conv(xBC) + bias)

    /// Which of the features of xBC.
    private enum Part {
        /// x of some heads, and B and C of a group.
        case x(Range<Int>)
        case b(Int)
        case c(Int)
    }

    private func features(_ part: Part) -> Range<Int> {
        func after(_ start: Int, _ group: Int) -> Range<Int> {
            start + group * stateSize..<start + (group + 1) * stateSize
        }
        return switch part {
        case .x(let heads): heads.lowerBound * headDim..<heads.upperBound * headDim
        case .b(let group): after(heads * headDim, group)
        case .c(let group): after(heads * headDim + groups * stateSize, group)
        }
    }

    /// x, B or C `[n, features]`, in float32.
    /// - Parameter tail: xBC of the tokens before; nil for none
    private func input(_ part: Part, _ xBC: MLXArray, tail: MLXArray? = nil) -> MLXArray {
        Self.silu([convolved(part, xBC, tail: tail), bias[features(part)]])
    }

    /// The gradient of these features of a whole sequence's xBC, in float32.
    private func inputBackward(_ part: Part, _ xBC: MLXArray, dy: MLXArray) -> MLXArray {
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

    /// y `[n, heads · P]`, in float32, of o and z, alike.
    func output(o: MLXArray, z: MLXArray) -> MLXArray {
        norm(Activation.silu.gated(gate: z.asType(.float32), up: o.asType(.float32)))
    }

    /// do and dz `[T, heads · P]`, in float32, evaluated, from dy, alike.
    func outputBackward(o: MLXArray, z: MLXArray, dy: MLXArray) -> (dO: MLXArray, dZ: MLXArray) {
        let gated = Activation.silu.gated(gate: z.asType(.float32), up: o.asType(.float32))
        let d = Activation.silu.gatedBackward(gate: [z], up: [o], dAct: norm.backward(gated, dy: dy))
        eval(d.dUp, d.dGate)
        return (d.dUp, d.dGate)
    }

    // MARK: - Shapes

    /// The heads of a group, some at a time.
    private func tiles(of group: Int, size: Int) -> [Range<Int>] {
        let count = heads / groups
        return MeSPCore.tiles(of: count, size: size).map {
            group * count + $0.lowerBound..<group * count + $0.upperBound
        }
    }

    /// `[n, heads · P]` to `[n, heads, P]`.
    private func byHead(_ x: MLXArray) -> MLXArray { x.reshaped([x.dim(0), -1, headDim]) }

    /// A number of each head, beside its P.
    private func column(_ x: MLXArray) -> MLXArray { x.expandedDimensions(axis: -1) }
}
