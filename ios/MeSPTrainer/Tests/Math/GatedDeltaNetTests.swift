import MLX
import Testing

@testable import MeSPCore

@Suite(.serialized) struct GatedDeltaNetTests {
    private struct Inputs {
        var qkv, z, b, a, dy: MLXArray

        init(_ net: GatedDeltaNet, length: Int) {
            let keys = MLXRandom.split(key: MLXRandom.key(UInt64(length)), into: 5)
            func normal(_ features: Int, _ index: Int) -> MLXArray {
                MLXRandom.normal([length, features], key: keys[index])
            }
            qkv = normal(net.convolution.weight.dim(0), 0)
            z = normal(net.valueHeads * net.valueDim, 1)
            (b, a) = (normal(net.valueHeads, 2), normal(net.valueHeads, 3))
            dy = normal(net.valueHeads * net.valueDim, 4)
        }
    }

    /// Returns a net whose key and value dimensions differ by default, so that the tests notice if the code confuses them.
    private func net(keyHeads: Int, valueHeads: Int, keyDim: Int = 8, valueDim: Int = 16) -> GatedDeltaNet {
        let keys = MLXRandom.split(key: MLXRandom.key(0), into: 4)
        let features = 2 * keyHeads * keyDim + valueHeads * valueDim
        return GatedDeltaNet(
            keyHeads: keyHeads, valueHeads: valueHeads, keyDim: keyDim, valueDim: valueDim,
            convolution: CausalConvolution(weight: MLXRandom.normal([features, 4], key: keys[0])),
            aLog: MLXRandom.uniform(low: -4, high: 1, [valueHeads], key: keys[1]),
            dtBias: MLXRandom.normal([valueHeads], key: keys[2]),
            norm: RMSNorm(weight: MLXRandom.uniform(low: 0.5, high: 1.5, [valueDim], key: keys[3]), eps: 1e-2))
    }

    private func sequential(_ net: GatedDeltaNet, _ inputs: [MLXArray]) -> MLXArray {
        let (qkv, z, b, a) = (inputs[0], inputs[1], inputs[2], inputs[3])
        let (n, w, reach) = (qkv.dim(0), net.convolution.weight, net.convolution.weight.dim(1) - 1)
        let all = concatenated([MLXArray.zeros([reach, qkv.dim(1)]), qkv])
        let conv = (0...reach).map { all[$0..<$0 + n] * w[0..., $0] }.reduce(MLXArray(0 as Float)) { $0 + $1 }
        let x = conv * sigmoid(conv)

        let keys = net.keyHeads * net.keyDim
        func unit(_ x: MLXArray) -> MLXArray {
            let x = repeated(
                x.reshaped([n, net.keyHeads, net.keyDim]), count: net.valueHeads / net.keyHeads, axis: 1)
            return x * rsqrt(x.square().mean(axis: -1, keepDims: true) + 1e-6)
        }
        let q = unit(x[0..., ..<keys]) / Float(net.keyDim)
        let k = unit(x[0..., keys..<2 * keys]) / Float(net.keyDim).squareRoot()
        let v = x[0..., (2 * keys)...].reshaped([n, net.valueHeads, net.valueDim])
        let g = exp(-exp(net.aLog) * logAddExp(a + net.dtBias, Float(0)))
        let beta = sigmoid(b)

        func column(_ x: MLXArray) -> MLXArray { x.expandedDimensions(axis: -1) }
        func row(_ x: MLXArray) -> MLXArray { x.expandedDimensions(axis: -2) }
        func number(_ x: MLXArray) -> MLXArray { x.expandedDimensions(axes: [-1, -2]) }
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

    private func schedule(_ net: GatedDeltaNet, _ heads: Int, _ length: Int, _ processor: Processor = .cpu) -> Schedule
    {
        Schedule(processor, bytes: heads * net.bytesOfHead(length))
    }

    /// Expects that y and the gradients equal those of the recurrence: ‖found − expected‖ ≤ 1e-4 ‖expected‖.
    private func expectEqual(
        _ net: GatedDeltaNet, _ inputs: Inputs, tile: Int, sourceLocation: SourceLocation = #_sourceLocation
    ) {
        let (y, expected) = vjp(
            { [sequential(net, $0)] }, primals: [inputs.qkv, inputs.z, inputs.b, inputs.a], cotangents: [inputs.dy])
        var state = net.start(dtype: .float32)
        let o = Tiled(net, schedule(net, tile, inputs.qkv.dim(0)))(
            qkv: inputs.qkv, b: inputs.b, a: inputs.a, state: &state)
        let (dO, dZ) = net.gatedNormBackward(o: o, z: inputs.z, dy: inputs.dy)
        var none: GatedDeltaNet.CarriedGradients?
        let d = Tiled(net, schedule(net, tile, inputs.qkv.dim(0))).backward(
            qkv: inputs.qkv, b: inputs.b, a: inputs.a, dO: dO, carried: &none)
        let found = [net.gatedNorm(o: o, z: inputs.z), d.dQKV, dZ, d.dB, d.dA]
        for (name, (found, expected)) in zip(["y", "dqkv", "dz", "db", "da"], zip(found, y + expected)) {
            let error = (found - expected).square().sum().sqrt().item(Float.self)
            let size = expected.square().sum().sqrt().item(Float.self)
            #expect(found.shape == expected.shape && error <= 1e-4 * size, "\(name)", sourceLocation: sourceLocation)
        }
    }

    @Test(
        arguments: [1, 2, 37, 64, 130, 256],
        [(keyHeads: 2, valueHeads: 2, tile: 2), (2, 2, 1), (2, 4, 1), (3, 6, 2)])
    func equalsTheSequentialForm(_ length: Int, _ heads: (keyHeads: Int, valueHeads: Int, tile: Int)) {
        let net = net(keyHeads: heads.keyHeads, valueHeads: heads.valueHeads)
        expectEqual(net, Inputs(net, length: length), tile: heads.tile)
    }

    @Test func equalsTheSequentialFormOfALongSequence() {
        let net = net(keyHeads: 1, valueHeads: 2)
        expectEqual(net, Inputs(net, length: 1024), tile: 1)
    }

    @Test(arguments: [-20, -5, 5, 20] as [Float], [-20, 5, 100] as [Float])
    func extremeDecaysAndCorrections(_ b: Float, _ a: Float) {
        let net = net(keyHeads: 2, valueHeads: 4)
        var inputs = Inputs(net, length: 130)
        let every = (MLXArray.arange(130) % 2).expandedDimensions(axis: -1)
        (inputs.b, inputs.a) = (inputs.b + every * b, inputs.a + every * a)
        expectEqual(net, inputs, tile: 1)
    }

    /// From the fourth token on, all keys of a head are almost equal.
    @Test func keysNearEachOther() {
        let net = net(keyHeads: 2, valueHeads: 2)
        var inputs = Inputs(net, length: 130)
        let same = MLXRandom.normal([1, inputs.qkv.dim(1)], key: MLXRandom.key(9))
        inputs.qkv = 3 + same.square() + 1e-3 * inputs.qkv
        inputs.b = inputs.b + 8
        inputs.a = inputs.a - 8
        expectEqual(net, inputs, tile: 2)
    }

    @Test(arguments: [[1, 1, 1, 127], [64, 66], [129, 1], [5, 2, 100, 1, 1, 21]])
    func piecesEqualTheWhole(_ pieces: [Int]) {
        let net = net(keyHeads: 2, valueHeads: 4)
        let inputs = Inputs(net, length: 130)
        func run(_ pieces: [Int]) -> (o: MLXArray, state: MixerState.Recurrent) {
            var (state, start) = (net.start(dtype: .float32), 0)
            let outputs = pieces.map { count in
                let rows = start..<start + count
                start += count
                return Tiled(net, Schedule(.cpu, bytes: 1))(
                    qkv: inputs.qkv[rows], b: inputs.b[rows], a: inputs.a[rows], state: &state)
            }
            return (concatenated(outputs), state)
        }
        let (whole, cut) = (run([130]), run(pieces))
        #expect(relativeError(cut.o, whole.o) < 1e-5)
        #expect(relativeError(cut.state.memory, whole.state.memory) < 1e-5)
        #expect(cut.state.tail.shape == [3, inputs.qkv.dim(1)] && all(cut.state.tail .== whole.state.tail).item())
    }

    @Test(arguments: [[64, 66], [129, 1], [2, 1, 100, 27]], [1, 2]) func segmentsHaveTheGradientsOfTheWhole(
        _ counts: [Int], _ tile: Int
    ) {
        let net = net(keyHeads: 2, valueHeads: 4)
        let i = Inputs(net, length: 130)
        var none: GatedDeltaNet.CarriedGradients?
        let whole = Tiled(net, schedule(net, tile, 130)).backward(qkv: i.qkv, b: i.b, a: i.a, dO: i.dy, carried: &none)
        var (state, segments) = (net.start(dtype: .float32), [(rows: Range<Int>, state: MixerState.Recurrent)]())
        for count in counts {
            let start = segments.last?.rows.upperBound ?? 0
            let rows = start..<start + count
            segments.append((rows, state))
            _ = Tiled(net, schedule(net, tile, 130))(qkv: i.qkv[rows], b: i.b[rows], a: i.a[rows], state: &state)
        }
        var carried: GatedDeltaNet.CarriedGradients? = net.noCarriedGradients
        let parts = segments.reversed().map { rows, state in
            Tiled(net, schedule(net, tile, 130)).backward(
                qkv: i.qkv[rows], b: i.b[rows], a: i.a[rows], dO: i.dy[rows], before: state, carried: &carried)
        }
        #expect(relativeError(concatenated(parts.map(\.dQKV).reversed()), whole.dQKV) < 1e-5)
        #expect(relativeError(concatenated(parts.map(\.dB).reversed()), whole.dB) < 1e-5)
        #expect(relativeError(concatenated(parts.map(\.dA).reversed()), whole.dA) < 1e-5)
    }

    /// A GPU schedules the tiles of the derivative in another way than a CPU.
    @Test func everyProcessorGivesTheSame() {
        let net = net(keyHeads: 3, valueHeads: 6)
        let i = Inputs(net, length: 100)
        func run(_ tile: Int, _ processor: Processor) -> [MLXArray] {
            var none: GatedDeltaNet.CarriedGradients?
            let d = Tiled(net, schedule(net, tile, 100, processor)).backward(
                qkv: i.qkv, b: i.b, a: i.a, dO: i.dy, carried: &none)
            return [d.dQKV, d.dB, d.dA]
        }
        for (a, b) in zip(run(2, .gpu), run(3, .cpu)) { #expect(relativeError(a, b) < 1e-6) }
    }

    @Test func readsBFloat16() {
        let net = net(keyHeads: 2, valueHeads: 4)
        let i = Inputs(net, length: 70)
        func run(_ dtype: DType) -> [MLXArray] {
            func stored(_ x: MLXArray) -> MLXArray { x.asType(.bfloat16).asType(dtype) }
            let (qkv, z, b, a) = (stored(i.qkv), stored(i.z), stored(i.b), stored(i.a))
            var state = net.start(dtype: dtype)
            let o = Tiled(net, Schedule(.cpu, bytes: 1))(qkv: qkv, b: b, a: a, state: &state)
            #expect(state.tail.dtype == dtype)
            let (dO, dZ) = net.gatedNormBackward(o: stored(o), z: z, dy: i.dy)
            var none: GatedDeltaNet.CarriedGradients?
            let d = Tiled(net, Schedule(.cpu, bytes: 1)).backward(qkv: qkv, b: b, a: a, dO: dO, carried: &none)
            return [o, net.gatedNorm(o: stored(o), z: z), dO, dZ, d.dQKV, d.dB, d.dA]
        }
        for (a, b) in zip(run(.bfloat16), run(.float32)) {
            #expect(a.dtype == .float32 && relativeError(a, b) < 1e-6)
        }
    }

    /// Besides the gradient, the derivative takes about 25 arrays, each of at most a third of `bytes`.
    @Test(arguments: [1 << 18, 1 << 19, 1 << 20]) func tilesBoundMemory(_ bytes: Int) {
        let net = net(keyHeads: 16, valueHeads: 16, keyDim: 64, valueDim: 64)
        let inputs = Inputs(net, length: 128)
        MLX.eval(inputs.qkv, inputs.b, inputs.a, inputs.dy)
        let before = Memory.activeMemory
        Memory.peakMemory = 0
        var none: GatedDeltaNet.CarriedGradients?
        let d = Tiled(net, Schedule(.cpu, bytes: bytes)).backward(
            qkv: inputs.qkv, b: inputs.b, a: inputs.a, dO: inputs.dy, carried: &none)
        #expect(Memory.peakMemory - before < d.dQKV.nbytes + 9 * bytes)
    }
}
