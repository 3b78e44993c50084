import MLX
import Testing

@testable import MeSPCore

/// A gated delta net or Mamba-2, with inputs of some length.
private struct RecurrentMixer {
    /// z, and qkv, b and a of a gated delta net, or xBC and dt of Mamba-2.
    var z: MLXArray
    var inputs: [MLXArray]
    let dy: MLXArray
    let start: (DType) -> MixerState.Recurrent
    let bytesOfHead: (_ length: Int) -> Int
    let output: (_ inputs: [MLXArray], Schedule, inout MixerState.Recurrent) -> MLXArray
    let gatedNorm: (_ o: MLXArray, _ z: MLXArray) -> MLXArray
    let gatedNormBackward: (_ o: MLXArray, _ z: MLXArray, _ dy: MLXArray) -> (dO: MLXArray, dZ: MLXArray)
    /// Returns the gradients of the inputs.
    let backward: (_ inputs: [MLXArray], _ dO: MLXArray, Schedule, _ records: [Range<Int>]?) -> [MLXArray]
    /// Returns y of z and the inputs, by the recurrence over tokens.
    let sequential: ([MLXArray]) -> MLXArray

    var length: Int { z.dim(0) }

    func schedule(heads: Int, _ processor: Processor = .cpu) -> Schedule {
        Schedule(processor, bytes: heads * bytesOfHead(length))
    }

    private static func normal(_ length: Int, _ features: [Int]) -> [MLXArray] {
        let keys = MLXRandom.split(key: MLXRandom.key(UInt64(length)), into: features.count)
        return zip(features, keys).map { MLXRandom.normal([length, $0], key: $1) }
    }

    private static func silu(of x: MLXArray, _ convolution: CausalConvolution, bias: MLXArray) -> MLXArray {
        let (n, w, reach) = (x.dim(0), convolution.weight, convolution.weight.dim(1) - 1)
        let all = concatenated([MLXArray.zeros([reach, x.dim(1)]), x])
        let conv = (0...reach).map { all[$0..<$0 + n] * w[0..., $0] }.reduce(bias) { $0 + $1 }
        return conv * sigmoid(conv)
    }

    static func gatedDeltaNet(
        _ length: Int, keyHeads: Int, valueHeads: Int, keyDim: Int = 8, valueDim: Int = 16
    ) -> (mixer: RecurrentMixer, net: GatedDeltaNet) {
        let keys = MLXRandom.split(key: MLXRandom.key(0), into: 4)
        let features = 2 * keyHeads * keyDim + valueHeads * valueDim
        let net = GatedDeltaNet(
            keyHeads: keyHeads, valueHeads: valueHeads, keyDim: keyDim, valueDim: valueDim,
            convolution: CausalConvolution(weight: MLXRandom.normal([features, 4], key: keys[0])),
            aLog: MLXRandom.uniform(low: -4, high: 1, [valueHeads], key: keys[1]),
            dtBias: MLXRandom.normal([valueHeads], key: keys[2]),
            norm: RMSNorm(weight: MLXRandom.uniform(low: 0.5, high: 1.5, [valueDim], key: keys[3]), eps: 1e-2))
        let width = valueHeads * valueDim
        let x = normal(length, [features, width, valueHeads, valueHeads, width])
        let mixer = RecurrentMixer(
            z: x[1], inputs: [x[0], x[2], x[3]], dy: x[4], start: net.start(dtype:), bytesOfHead: net.bytesOfHead,
            output: { Tiled(net, $1)(qkv: $0[0], b: $0[1], a: $0[2], state: &$2) },
            gatedNorm: net.gatedNorm(o:z:), gatedNormBackward: net.gatedNormBackward(o:z:dy:),
            backward: { x, dO, schedule, records in
                var none: GatedDeltaNet.CarriedGradients?
                let d = Tiled(net, schedule).backward(
                    qkv: x[0], b: x[1], a: x[2], dO: dO, records: records, carried: &none)
                return [d.dQKV, d.dB, d.dA]
            }, sequential: { sequential(net, $0) })
        return (mixer, net)
    }

    private static func sequential(_ net: GatedDeltaNet, _ all: [MLXArray]) -> MLXArray {
        let (z, b, a, n) = (all[0], all[2], all[3], all[0].dim(0))
        let x = silu(of: all[1], net.convolution, bias: MLXArray(0 as Float))
        let keys = net.keyHeads * net.keyDim
        func unit(_ x: MLXArray) -> MLXArray {
            let x = repeated(x.reshaped([n, net.keyHeads, net.keyDim]), count: net.valueHeads / net.keyHeads, axis: 1)
            return x * rsqrt(x.square().mean(axis: -1, keepDims: true) + 1e-6)
        }
        let q = unit(x[0..., ..<keys]) / Float(net.keyDim)
        let k = unit(x[0..., keys..<2 * keys]) / Float(net.keyDim).squareRoot()
        let v = x[0..., (2 * keys)...].reshaped([n, net.valueHeads, net.valueDim])
        let g = exp(-exp(net.aLog) * logAddExp(a + net.dtBias, Float(0)))
        let beta = sigmoid(b)
        var s = MLXArray.zeros([net.valueHeads, net.keyDim, net.valueDim])
        let o = stacked(
            (0..<n).map { t in
                s = number(g[t]) * s
                let d = number(beta[t]) * (row(v[t]) - (s * column(k[t])).sum(axis: 1, keepDims: true))
                s = s + column(k[t]) * d
                return (s * column(q[t])).sum(axis: 1)
            })
        let normed = o * rsqrt(o.square().mean(axis: -1, keepDims: true) + net.norm.eps) * net.norm.weight
        return normed.reshaped(z.shape) * z * sigmoid(z)
    }

    static func mamba2(
        _ length: Int, heads: Int, groups: Int, headDim: Int = 8, stateSize: Int = 16
    ) -> RecurrentMixer {
        let keys = MLXRandom.split(key: MLXRandom.key(0), into: 6)
        let features = heads * headDim + 2 * groups * stateSize
        let mamba = Mamba2(
            heads: heads, groups: groups, headDim: headDim, stateSize: stateSize,
            convolution: CausalConvolution(weight: MLXRandom.normal([features, 4], key: keys[0])),
            bias: MLXRandom.normal([features], key: keys[1]), dtBias: MLXRandom.normal([heads], key: keys[2]),
            aLog: MLXRandom.uniform(low: -4, high: 1, [heads], key: keys[3]),
            d: MLXRandom.normal([heads], key: keys[4]),
            norm: RMSNorm(
                weight: MLXRandom.uniform(low: 0.5, high: 1.5, [heads * headDim], key: keys[5]), eps: 1e-2))
        let x = normal(length, [heads * headDim, features, heads, heads * headDim])
        return RecurrentMixer(
            z: x[0], inputs: [x[1], x[2]], dy: x[3], start: mamba.start(dtype:), bytesOfHead: mamba.bytesOfHead,
            output: { Tiled(mamba, $1)(xBC: $0[0], dt: $0[1], state: &$2) },
            gatedNorm: mamba.gatedNorm(o:z:), gatedNormBackward: mamba.gatedNormBackward(o:z:dy:),
            backward: { x, dO, schedule, records in
                let d = Tiled(mamba, schedule).backward(xBC: x[0], dt: x[1], dO: dO, records: records)
                return [d.dXBC, d.dDt]
            }, sequential: { sequential(mamba, $0) })
    }

    private static func sequential(_ mamba: Mamba2, _ all: [MLXArray]) -> MLXArray {
        let (z, dt, n) = (all[0], all[2], all[0].dim(0))
        let activated = silu(of: all[1], mamba.convolution, bias: mamba.bias)
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
        var s = MLXArray.zeros([heads, mamba.headDim, mamba.stateSize])
        let o = stacked(
            (0..<n).map { t in
                s = number(decay[t]) * s + number(step[t]) * column(x[t]) * row(b[t])
                return (s * row(c[t])).sum(axis: -1) + column(mamba.d) * x[t]
            }
        ).reshaped(z.shape)
        let gated = o * z * sigmoid(z)
        return gated * rsqrt(gated.square().mean(axis: -1, keepDims: true) + mamba.norm.eps) * mamba.norm.weight
    }
}

private func column(_ x: MLXArray) -> MLXArray { x.expandedDimensions(axis: -1) }
private func row(_ x: MLXArray) -> MLXArray { x.expandedDimensions(axis: -2) }
private func number(_ x: MLXArray) -> MLXArray { x.expandedDimensions(axes: [-1, -2]) }

@Suite(.serialized) struct RecurrentMixerTests {
    enum Kind: CaseIterable { case gatedDeltaNet, mamba2 }

    /// Returns a mixer of two groups of two heads. Its dimensions differ, so that the tests notice if the code confuses them.
    private func mixer(_ kind: Kind, _ length: Int, groups: Int = 2) -> RecurrentMixer {
        kind == .gatedDeltaNet
            ? RecurrentMixer.gatedDeltaNet(length, keyHeads: groups, valueHeads: 2 * groups).mixer
            : .mamba2(length, heads: 2 * groups, groups: groups)
    }

    /// Expects that y and the gradients equal those of the recurrence: ‖found − expected‖ ≤ 1e-4 ‖expected‖.
    private func expectEqual(_ m: RecurrentMixer, tile: Int, sourceLocation: SourceLocation = #_sourceLocation) {
        let (y, expected) = vjp({ [m.sequential($0)] }, primals: [m.z] + m.inputs, cotangents: [m.dy])
        var state = m.start(.float32)
        let o = m.output(m.inputs, m.schedule(heads: tile), &state)
        let (dO, dZ) = m.gatedNormBackward(o, m.z, m.dy)
        let found = [m.gatedNorm(o, m.z), dZ] + m.backward(m.inputs, dO, m.schedule(heads: tile), nil)
        for (index, (found, expected)) in zip(found, y + expected).enumerated() {
            let error = (found - expected).square().sum().sqrt().item(Float.self)
            let size = expected.square().sum().sqrt().item(Float.self)
            #expect(found.shape == expected.shape && error <= 1e-4 * size, "\(index)", sourceLocation: sourceLocation)
        }
    }

    @Test(
        arguments: [1, 2, 37, 64, 130, 256],
        [(keyHeads: 2, valueHeads: 2, tile: 2), (2, 2, 1), (2, 4, 1), (3, 6, 2)])
    func aGatedDeltaNetEqualsItsRecurrence(_ length: Int, _ heads: (keyHeads: Int, valueHeads: Int, tile: Int)) {
        let (mixer, _) = RecurrentMixer.gatedDeltaNet(length, keyHeads: heads.keyHeads, valueHeads: heads.valueHeads)
        expectEqual(mixer, tile: heads.tile)
    }

    @Test(
        arguments: [1, 2, 37, 64, 130, 256],
        [(heads: 2, groups: 1, tile: 2), (3, 1, 2), (4, 2, 1), (6, 2, 3)])
    func mamba2EqualsItsRecurrence(_ length: Int, _ heads: (heads: Int, groups: Int, tile: Int)) {
        expectEqual(.mamba2(length, heads: heads.heads, groups: heads.groups), tile: heads.tile)
    }

    @Test(arguments: Kind.allCases) func aLongSequenceEqualsItsRecurrence(_ kind: Kind) {
        expectEqual(mixer(kind, 1024, groups: 1), tile: 1)
    }

    @Test(arguments: [-20, -5, 5, 20] as [Float], [-20, 5, 100] as [Float])
    func extremeDecaysAndCorrections(_ correction: Float, _ decay: Float) {
        let every = column(MLXArray.arange(130) % 2)
        var net = mixer(.gatedDeltaNet, 130)
        (net.inputs[1], net.inputs[2]) = (net.inputs[1] + every * correction, net.inputs[2] + every * decay)
        expectEqual(net, tile: 1)
        var mamba = mixer(.mamba2, 130)
        mamba.inputs[1] = mamba.inputs[1] + every * decay
        expectEqual(mamba, tile: 1)
    }

    /// From the fourth token on, all keys of a head are almost equal.
    @Test func keysNearEachOther() {
        var (net, _) = RecurrentMixer.gatedDeltaNet(130, keyHeads: 2, valueHeads: 2)
        let same = MLXRandom.normal([1, net.inputs[0].dim(1)], key: MLXRandom.key(9))
        net.inputs = [3 + same.square() + 1e-3 * net.inputs[0], net.inputs[1] + 8, net.inputs[2] - 8]
        expectEqual(net, tile: 2)
    }

    @Test(arguments: Kind.allCases, [[1, 1, 1, 127], [64, 66], [129, 1], [5, 2, 100, 1, 1, 21]])
    func piecesEqualTheWhole(_ kind: Kind, _ pieces: [Int]) {
        let m = mixer(kind, 130)
        func run(_ pieces: [Int]) -> (o: MLXArray, state: MixerState.Recurrent) {
            var (state, start) = (m.start(.float32), 0)
            let outputs = pieces.map { count in
                defer { start += count }
                return m.output(m.inputs.map { $0[start..<start + count] }, Schedule(.cpu, bytes: 1), &state)
            }
            return (concatenated(outputs), state)
        }
        let (whole, cut) = (run([130]), run(pieces))
        #expect(relativeError(cut.o, whole.o) < 1e-5)
        #expect(relativeError(cut.state.memory, whole.state.memory) < 1e-5)
        #expect(cut.state.tail.shape == [3, m.inputs[0].dim(1)] && all(cut.state.tail .== whole.state.tail).item())
    }

    @Test(arguments: Kind.allCases) func recordsDoNotSeeEachOther(_ kind: Kind) {
        let m = mixer(kind, 130)
        func run(_ rows: Range<Int>, _ records: [Range<Int>]?) -> [MLXArray] {
            m.backward(m.inputs.map { $0[rows] }, m.dy[rows], Schedule(.cpu, bytes: 1), records)
        }
        let records = [0..<1, 1..<70, 70..<130]
        let alone = records.map { run($0, nil) }
        for (index, together) in run(0..<130, records).enumerated() {
            #expect(relativeError(together, concatenated(alone.map { $0[index] })) < 1e-6)
        }
    }

    @Test(arguments: [[64, 66], [129, 1], [2, 1, 100, 27]], [1, 2])
    func segmentsHaveTheGradientsOfTheWhole(_ counts: [Int], _ tile: Int) {
        let (m, net) = RecurrentMixer.gatedDeltaNet(130, keyHeads: 2, valueHeads: 4)
        let tiled = Tiled(net, m.schedule(heads: tile))
        let (qkv, b, a) = (m.inputs[0], m.inputs[1], m.inputs[2])
        var (state, segments) = (net.start(dtype: .float32), [(rows: Range<Int>, state: MixerState.Recurrent)]())
        for count in counts {
            let start = segments.last?.rows.upperBound ?? 0
            let rows = start..<start + count
            segments.append((rows, state))
            _ = tiled(qkv: qkv[rows], b: b[rows], a: a[rows], state: &state)
        }
        var carried: GatedDeltaNet.CarriedGradients? = net.noCarriedGradients
        let parts = segments.reversed().map { rows, state in
            let d = tiled.backward(
                qkv: qkv[rows], b: b[rows], a: a[rows], dO: m.dy[rows], before: state, carried: &carried)
            return [d.dQKV, d.dB, d.dA]
        }
        for (index, whole) in m.backward(m.inputs, m.dy, m.schedule(heads: tile), nil).enumerated() {
            #expect(relativeError(concatenated(parts.reversed().map { $0[index] }), whole) < 1e-5)
        }
    }

    /// A GPU schedules the tiles of the derivative in another way than a CPU.
    @Test(arguments: Kind.allCases) func everyProcessorGivesTheSame(_ kind: Kind) {
        let m = mixer(kind, 100, groups: 3)
        let onGPU = m.backward(m.inputs, m.dy, m.schedule(heads: 2, .gpu), nil)
        for (a, b) in zip(onGPU, m.backward(m.inputs, m.dy, m.schedule(heads: 3), nil)) {
            #expect(relativeError(a, b) < 1e-6)
        }
    }

    @Test(arguments: Kind.allCases) func readsBFloat16(_ kind: Kind) {
        let m = mixer(kind, 70)
        func run(_ dtype: DType) -> [MLXArray] {
            func stored(_ x: MLXArray) -> MLXArray { x.asType(.bfloat16).asType(dtype) }
            let (inputs, z) = (m.inputs.map(stored), stored(m.z))
            var state = m.start(dtype)
            let o = m.output(inputs, Schedule(.cpu, bytes: 1), &state)
            #expect(state.tail.dtype == dtype)
            let (dO, dZ) = m.gatedNormBackward(stored(o), z, m.dy)
            return [o, m.gatedNorm(stored(o), z), dO, dZ] + m.backward(inputs, dO, Schedule(.cpu, bytes: 1), nil)
        }
        for (a, b) in zip(run(.bfloat16), run(.float32)) {
            #expect(a.dtype == .float32 && relativeError(a, b) < 1e-6)
        }
    }

    /// Besides the gradient, a gated delta net's derivative takes about 25 arrays, each of at most a third of `bytes`. Mamba-2's takes the gradient's
    /// parts, and about 13 arrays, each of at most half of `bytes`.
    @Test(arguments: Kind.allCases, [1 << 18, 1 << 19, 1 << 20]) func tilesBoundMemory(_ kind: Kind, _ bytes: Int) {
        let isNet = kind == .gatedDeltaNet
        let m =
            isNet
            ? RecurrentMixer.gatedDeltaNet(128, keyHeads: 16, valueHeads: 16, keyDim: 64, valueDim: 64).mixer
            : .mamba2(128, heads: 32, groups: 1, headDim: 32, stateSize: 128)
        MLX.eval(m.inputs + [m.dy])
        let before = Memory.activeMemory
        Memory.peakMemory = 0
        let d = m.backward(m.inputs, m.dy, Schedule(.cpu, bytes: bytes), nil)
        #expect(Memory.peakMemory - before < (isNet ? 1 : 2) * d[0].nbytes + (isNet ? 9 : 7) * bytes)
    }
}
