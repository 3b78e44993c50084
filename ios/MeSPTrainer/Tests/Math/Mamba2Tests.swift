import MLX
import Testing

@testable import MeSPCore

@Suite(.serialized) struct Mamba2Tests {
    private struct Inputs {
        var z, xBC, dt, dy: MLXArray

        init(_ mamba: Mamba2, length: Int) {
            let keys = MLXRandom.split(key: MLXRandom.key(UInt64(length)), into: 4)
            func normal(_ features: Int, _ index: Int) -> MLXArray {
                MLXRandom.normal([length, features], key: keys[index])
            }
            (z, dy) = (normal(mamba.heads * mamba.headDim, 0), normal(mamba.heads * mamba.headDim, 3))
            (xBC, dt) = (normal(mamba.convolution.weight.dim(0), 1), normal(mamba.heads, 2))
        }
    }

    /// Returns a mixer whose head and state dimensions differ, so that the tests notice if the code confuses them.
    private func mamba(heads: Int, groups: Int, headDim: Int = 8, stateSize: Int = 16) -> Mamba2 {
        let keys = MLXRandom.split(key: MLXRandom.key(0), into: 6)
        let features = heads * headDim + 2 * groups * stateSize
        return Mamba2(
            heads: heads, groups: groups, headDim: headDim, stateSize: stateSize,
            convolution: CausalConvolution(weight: MLXRandom.normal([features, 4], key: keys[0])),
            bias: MLXRandom.normal([features], key: keys[1]), dtBias: MLXRandom.normal([heads], key: keys[2]),
            aLog: MLXRandom.uniform(low: -4, high: 1, [heads], key: keys[3]),
            d: MLXRandom.normal([heads], key: keys[4]),
            norm: RMSNorm(
                weight: MLXRandom.uniform(low: 0.5, high: 1.5, [heads * headDim], key: keys[5]), eps: 1e-2))
    }

    private func sequential(_ mamba: Mamba2, _ inputs: [MLXArray]) -> MLXArray {
        let (z, xBC, dt) = (inputs[0], inputs[1], inputs[2])
        let (n, w, reach) = (xBC.dim(0), mamba.convolution.weight, mamba.convolution.weight.dim(1) - 1)
        let all = concatenated([MLXArray.zeros([reach, xBC.dim(1)]), xBC])
        let conv = (0...reach).map { all[$0..<$0 + n] * w[0..., $0] }.reduce(mamba.bias) { $0 + $1 }
        let activated = conv * sigmoid(conv)

        let (heads, values) = (mamba.heads, mamba.heads * mamba.headDim)
        let x = activated[0..., ..<values].reshaped([n, heads, mamba.headDim])
        func ofGroups(_ start: Int) -> MLXArray {
            let size = mamba.groups * mamba.stateSize
            return repeated(
                activated[0..., start..<start + size].reshaped([n, mamba.groups, mamba.stateSize]),
                count: heads / mamba.groups, axis: 1)
        }
        let (b, c) = (ofGroups(values), ofGroups(values + mamba.groups * mamba.stateSize))
        let step = logAddExp(dt + mamba.dtBias, Float(0))
        let decay = exp(-exp(mamba.aLog) * step)

        func number(_ x: MLXArray) -> MLXArray { x.expandedDimensions(axes: [-1, -2]) }
        var s = MLXArray.zeros([heads, mamba.headDim, mamba.stateSize])
        let o = stacked(
            (0..<n).map { t in
                let written = x[t].expandedDimensions(axis: -1) * b[t].expandedDimensions(axis: -2)
                s = number(decay[t]) * s + number(step[t]) * written
                return (s * c[t].expandedDimensions(axis: -2)).sum(axis: -1)
                    + mamba.d.expandedDimensions(axis: -1) * x[t]
            }
        ).reshaped(z.shape)
        let gated = o * z * sigmoid(z)
        return gated * rsqrt(gated.square().mean(axis: -1, keepDims: true) + mamba.norm.eps) * mamba.norm.weight
    }

    private func schedule(_ mamba: Mamba2, _ heads: Int, _ length: Int, _ processor: Processor = .cpu) -> Schedule {
        Schedule(processor, bytes: heads * mamba.bytesOfHead(length))
    }

    /// Expects that y and the gradients equal those of the recurrence: ‖found − expected‖ ≤ 1e-4 ‖expected‖.
    private func expectEqual(
        _ mamba: Mamba2, _ inputs: Inputs, tile: Int, sourceLocation: SourceLocation = #_sourceLocation
    ) {
        let (y, expected) = vjp(
            { [sequential(mamba, $0)] }, primals: [inputs.z, inputs.xBC, inputs.dt], cotangents: [inputs.dy])
        var state = mamba.start(dtype: .float32)
        let o = Tiled(mamba, schedule(mamba, tile, inputs.dt.dim(0)))(xBC: inputs.xBC, dt: inputs.dt, state: &state)
        let (dO, dZ) = mamba.gatedNormBackward(o: o, z: inputs.z, dy: inputs.dy)
        let d = Tiled(mamba, schedule(mamba, tile, inputs.dt.dim(0))).backward(xBC: inputs.xBC, dt: inputs.dt, dO: dO)
        let found = [mamba.gatedNorm(o: o, z: inputs.z), dZ, d.dXBC, d.dDt]
        for (name, (found, expected)) in zip(["y", "dz", "dxBC", "ddt"], zip(found, y + expected)) {
            let error = (found - expected).square().sum().sqrt().item(Float.self)
            let size = expected.square().sum().sqrt().item(Float.self)
            #expect(found.shape == expected.shape && error <= 1e-4 * size, "\(name)", sourceLocation: sourceLocation)
        }
    }

    @Test(
        arguments: [1, 2, 37, 64, 130, 256],
        [(heads: 2, groups: 1, tile: 2), (3, 1, 2), (4, 2, 1), (6, 2, 3)])
    func equalsTheSequentialForm(_ length: Int, _ heads: (heads: Int, groups: Int, tile: Int)) {
        let mamba = mamba(heads: heads.heads, groups: heads.groups)
        expectEqual(mamba, Inputs(mamba, length: length), tile: heads.tile)
    }

    @Test func equalsTheSequentialFormOfALongSequence() {
        let mamba = mamba(heads: 2, groups: 1)
        expectEqual(mamba, Inputs(mamba, length: 1024), tile: 1)
    }

    @Test(arguments: [-20, 5, 100] as [Float]) func extremeDecays(_ dt: Float) {
        let mamba = mamba(heads: 4, groups: 2)
        var inputs = Inputs(mamba, length: 130)
        inputs.dt = inputs.dt + (MLXArray.arange(130) % 2).expandedDimensions(axis: -1) * dt
        expectEqual(mamba, inputs, tile: 1)
    }

    @Test(arguments: [[1, 1, 1, 127], [64, 66], [129, 1], [5, 2, 100, 1, 1, 21]])
    func piecesEqualTheWhole(_ pieces: [Int]) {
        let mamba = mamba(heads: 4, groups: 2)
        let inputs = Inputs(mamba, length: 130)
        func run(_ pieces: [Int]) -> (o: MLXArray, state: MixerState.Recurrent) {
            var (state, start) = (mamba.start(dtype: .float32), 0)
            let outputs = pieces.map { count in
                let rows = start..<start + count
                start += count
                return Tiled(mamba, Schedule(.cpu, bytes: 1))(xBC: inputs.xBC[rows], dt: inputs.dt[rows], state: &state)
            }
            return (concatenated(outputs), state)
        }
        let (whole, cut) = (run([130]), run(pieces))
        #expect(relativeError(cut.o, whole.o) < 1e-5)
        #expect(relativeError(cut.state.memory, whole.state.memory) < 1e-5)
        #expect(cut.state.tail.shape == [3, inputs.xBC.dim(1)] && all(cut.state.tail .== whole.state.tail).item())
    }

    @Test func recordsDoNotSeeEachOther() {
        let mamba = mamba(heads: 4, groups: 2)
        let i = Inputs(mamba, length: 130)
        func run(_ rows: Range<Int>, _ records: [Range<Int>]?) -> [MLXArray] {
            let d = Tiled(mamba, Schedule(.cpu, bytes: 1)).backward(
                xBC: i.xBC[rows], dt: i.dt[rows], dO: i.dy[rows], records: records)
            return [d.dXBC, d.dDt]
        }
        let records = [0..<1, 1..<70, 70..<130]
        let alone = records.map { run($0, nil) }
        for (index, together) in run(0..<130, records).enumerated() {
            #expect(relativeError(together, concatenated(alone.map { $0[index] })) < 1e-6)
        }
    }

    @Test func everyProcessorGivesTheSame() {
        let mamba = mamba(heads: 6, groups: 2)
        let i = Inputs(mamba, length: 100)
        func run(_ tile: Int, _ processor: Processor) -> [MLXArray] {
            let d = Tiled(mamba, schedule(mamba, tile, 100, processor)).backward(xBC: i.xBC, dt: i.dt, dO: i.dy)
            return [d.dXBC, d.dDt]
        }
        for (a, b) in zip(run(2, .gpu), run(3, .cpu)) { #expect(relativeError(a, b) < 1e-6) }
    }

    @Test func readsBFloat16() {
        let mamba = mamba(heads: 4, groups: 2)
        let i = Inputs(mamba, length: 70)
        func run(_ dtype: DType) -> [MLXArray] {
            func stored(_ x: MLXArray) -> MLXArray { x.asType(.bfloat16).asType(dtype) }
            let (z, xBC, dt) = (stored(i.z), stored(i.xBC), stored(i.dt))
            var state = mamba.start(dtype: dtype)
            let o = Tiled(mamba, Schedule(.cpu, bytes: 1))(xBC: xBC, dt: dt, state: &state)
            #expect(state.tail.dtype == dtype)
            let (dO, dZ) = mamba.gatedNormBackward(o: stored(o), z: z, dy: i.dy)
            let d = Tiled(mamba, Schedule(.cpu, bytes: 1)).backward(xBC: xBC, dt: dt, dO: dO)
            return [o, mamba.gatedNorm(o: stored(o), z: z), dO, dZ, d.dXBC, d.dDt]
        }
        for (a, b) in zip(run(.bfloat16), run(.float32)) {
            #expect(a.dtype == .float32 && relativeError(a, b) < 1e-6)
        }
    }

    /// Besides the gradient and its parts, the derivative takes about 13 arrays, each of at most half of `bytes`.
    @Test(arguments: [1 << 18, 1 << 19, 1 << 20]) func tilesBoundMemory(_ bytes: Int) {
        let mamba = mamba(heads: 32, groups: 1, headDim: 32, stateSize: 128)
        let inputs = Inputs(mamba, length: 128)
        MLX.eval(inputs.xBC, inputs.dt, inputs.dy)
        let before = Memory.activeMemory
        Memory.peakMemory = 0
        let d = Tiled(mamba, Schedule(.cpu, bytes: bytes)).backward(xBC: inputs.xBC, dt: inputs.dt, dO: inputs.dy)
        #expect(Memory.peakMemory - before < 2 * d.dXBC.nbytes + 7 * bytes)
    }
}
