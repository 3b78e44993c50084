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

    private func headsAtOnce(_ length: Int, _ machine: Machine) -> Int {
        min(heads / groups, max(1, machine.bytes / bytesOfHead(length)))
    }

    /// Returns an estimate of the memory in bytes that one head takes: twice the size of its largest array.
    func bytesOfHead(_ length: Int) -> Int {
        2 * Self.arrayBytes(headDim: headDim, stateSize: stateSize, length: length)
    }

    static func arrayBytes(headDim: Int, stateSize: Int, length: Int) -> Int {
        4 * length * max(headDim, ChunkDecays.chunk, headDim * stateSize / ChunkDecays.chunk)
    }

    // MARK: - o

    /// Returns o `[n, heads · P]`, in float32.
    /// - Parameters:
    ///   - xBC: `[n, F]`
    ///   - dt: `[n, heads]`
    func callAsFunction(xBC: MLXArray, dt: MLXArray, state: inout MixerState.Recurrent, machine: Machine) -> MLXArray {
        let before = state
        let parts = machine.each(of: groups, size: 1) { group in
            let (b, c) = (
                input(.b(group.lowerBound), xBC, tail: before.tail), input(.c(group.lowerBound), xBC, tail: before.tail)
            )
            return machine.each(of: heads / groups, size: headsAtOnce(xBC.dim(0), machine)) {
                let heads = headRange(of: group.lowerBound, $0)
                var memory = before.memory[heads]
                let x = byHead(input(.x(heads), xBC, tail: before.tail))
                let space = stateSpace(heads, x: x, dt: dt, b: b, c: c, machine)
                return [(space(state: &memory) + column(d[heads]) * x).reshaped([x.dim(0), -1]), memory]
            }
        }.flatMap { $0 }
        state.memory = concatenated(parts.map { $0[1] })
        state.tail = convolution.tail(after: xBC, tail: before.tail)
        return concatenated(parts.map { $0[0] }, axis: -1)
    }

    /// Returns the gradients of xBC and dt for a whole sequence. Recomputes the intermediates for some heads at a time:
    ///
    ///     dx = Δ du + D do        dΔ = rowsum(du ∘ x) + a dκ        d_dt = dΔ σ(dt + dt_bias)
    ///
    /// dB and dC are summed over the heads of a group.
    ///
    /// - Parameters:
    ///   - xBC: `[T, F]`, freed after its last use
    func backward(
        xBC: consuming MLXArray, dt: MLXArray, dO: consuming MLXArray, records: [Range<Int>]? = nil, machine: Machine
    ) -> (dXBC: MLXArray, dDt: MLXArray) {
        var inputs = [consume xBC, consume dO]
        let records = records ?? [0..<dt.dim(0)]
        var (dx, dB, dC, dDt) = ([MLXArray](), [MLXArray](), [MLXArray](), [MLXArray]())
        for group in 0..<groups {
            let bc = machine.part(
                eachRecord(records) { [input(.b(group), inputs[0][$0]), input(.c(group), inputs[0][$0])] })
            let all = tiles(of: heads / groups, size: headsAtOnce(dt.dim(0), machine)).map { headRange(of: group, $0) }
            let ofHeads = machine.reduce(all, HeadGradients(), reading: &inputs) { all, heads, inputs in
                all.add(
                    eachRecord(records) {
                        backward(
                            heads, xBC: inputs[0][$0], dt: dt[$0], b: bc[0][$0], c: bc[1][$0], dO: inputs[1][$0],
                            machine)
                    })
            }
            let d = eachRecord(records) {
                [
                    inputBackward(.b(group), inputs[0][$0], dy: ofHeads.sums[0][$0]),
                    inputBackward(.c(group), inputs[0][$0], dy: ofHeads.sums[1][$0]),
                ]
            }
            inputs = machine.inputs(inputs, after: d)
            dx += ofHeads.dx
            dDt += ofHeads.dDt
            dB.append(d[0])
            dC.append(d[1])
        }
        inputs = []
        return machine.part(concatenated(dx + dB + dC, axis: -1), concatenated(dDt, axis: -1))
    }

    private struct HeadGradients: Arrays {
        var (dx, dDt, sums) = ([MLXArray](), [MLXArray](), [MLXArray]())
        var arrays: [MLXArray] { dx.suffix(1) + dDt.suffix(1) + sums }

        mutating func add(_ d: [MLXArray]) {
            dx.append(d[0])
            dDt.append(d[1])
            sums = sums.isEmpty ? Array(d[2...]) : zip(sums, d[2...]).map { $0 + $1 }
        }
    }

    private func backward(
        _ heads: Range<Int>, xBC: MLXArray, dt: MLXArray, b: MLXArray, c: MLXArray, dO: MLXArray, _ machine: Machine
    ) -> [MLXArray] {
        let x = machine.part(byHead(input(.x(heads), xBC)))
        let dO = byHead(dO[0..., features(.x(heads))])
        let d = stateSpace(heads, x: x, dt: dt, b: b, c: c, machine).backward(dY: dO)
        let dx = column(timeStep(heads, dt)) * d.du + column(self.d[heads]) * dO
        let dDt = Self.stepBackward(
            [(d.du * x).sum(axis: -1), d.dLogDecay, aLog[heads], shifted(heads, dt)])
        return machine.part([inputBackward(.x(heads), xBC, dy: dx.reshaped([x.dim(0), -1])), dDt]) + [d.dB, d.dC]
    }

    private func stateSpace(
        _ heads: Range<Int>, x: MLXArray, dt: MLXArray, b: MLXArray, c: MLXArray, _ machine: Machine
    ) -> StateSpace {
        let step = timeStep(heads, dt)
        return StateSpace(u: column(step) * x, logDecay: -exp(aLog[heads]) * step, b: b, c: c, machine: machine)
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
    private enum Part {
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

    /// Returns x, B or C `[n, features]`, in float32.
    /// - Parameter tail: xBC of the tokens before; nil at the start of a sequence
    private func input(_ part: Part, _ xBC: MLXArray, tail: MLXArray? = nil) -> MLXArray {
        Self.silu([convolved(part, xBC, tail: tail), bias[features(part)]])
    }

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

    func gatedNorm(o: MLXArray, z: MLXArray) -> MLXArray {
        norm(Activation.silu.gated(gate: z.asType(.float32), up: o.asType(.float32)))
    }

    func gatedNormBackward(o: MLXArray, z: MLXArray, dy: MLXArray) -> (dO: MLXArray, dZ: MLXArray) {
        let gated = Activation.silu.gated(gate: z.asType(.float32), up: o.asType(.float32))
        let d = Activation.silu.gatedBackward(gate: [z], up: [o], dAct: norm.backward(gated, dy: dy))
        return (d.dUp, d.dGate)
    }

    // MARK: - Shapes

    private func headRange(of group: Int, _ own: Range<Int>) -> Range<Int> {
        let first = group * (heads / groups)
        return first + own.lowerBound..<first + own.upperBound
    }

    private func byHead(_ x: MLXArray) -> MLXArray { x.reshaped([x.dim(0), -1, headDim]) }

    private func column(_ x: MLXArray) -> MLXArray { x.expandedDimensions(axis: -1) }
}
