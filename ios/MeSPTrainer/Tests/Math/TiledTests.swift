import MLX
import Testing

@testable import MeSPAdapters
@testable import MeSPBundle
@testable import MeSPCore

/// Compares formulas, whole and in tiles, with automatic differentiation of their definitions on dense matrices: ‖found − expected‖ ≤ 1e-5 ‖expected‖,
/// as the sums have another order.
@Suite(.serialized) struct TiledTests {
    enum Kind: CaseIterable { case linuxCPU, plainCPU, gpu }

    struct Case: Sendable, CustomTestStringConvertible {
        let kind: Kind
        let isCut: Bool
        let seed: UInt64
        var testDescription: String { "\(kind), \(isCut ? "in tiles" : "whole"), \(seed)" }

        static let all = Kind.allCases.flatMap { kind in
            [false, true].flatMap { isCut in (0..<8).map { Case(kind: kind, isCut: isCut, seed: $0) } }
        }

        var processor: Processor { kind == .gpu ? .gpu : kind == .plainCPU ? .plainCPU : .cpu }

        var schedule: Schedule {
            guard isCut else { return Schedule(processor) }
            var schedule = Schedule(processor, bytes: 1 << 12)
            (schedule.projectionRows, schedule.features, schedule.mlpTileTokens) = (40, 32, 7)
            (schedule.queryRows, schedule.keyHeads) = (5, 1)
            return schedule
        }
    }

    /// Seeded numbers, and choices that are bits of the seed.
    private struct Source {
        let each: Case
        private var count: UInt64 = 0
        init(_ each: Case) { self.each = each }

        func isSet(_ bit: UInt64) -> Bool { each.seed >> bit & 1 == 1 }

        mutating func normal(_ shape: [Int], scale: Float = 1) -> MLXArray {
            count += 1
            return MLXRandom.normal(shape, scale: scale, key: MLXRandom.key(each.seed << 8 | count))
        }

        /// A layer with a bias, DoRA's G and dropout by the seed, and the mask of 20 tokens.
        mutating func layer(_ inputs: Int, _ outputs: Int) throws -> Layer {
            let (weight, scales, biases) = quantized(normal([outputs, inputs], scale: 0.2), groupSize: 32, bits: 4)
            let format = try #require(
                QuantizationFormat(inputs: inputs, words: weight.dim(1), groups: scales.dim(1), hasBiases: true))
            let lora = LoRAMatrices(
                a: normal([inputs, 4], scale: 0.2), b: normal([4, outputs], scale: 0.2),
                m: isSet(0) ? 1 + normal([outputs], scale: 0.1) : nil)
            let dropout = isSet(2) ? Dropout(key: DropoutKey(rate: 0.3, seed: count)) : nil
            let formula = LoRALinear(
                weight: QuantizedMatrix(
                    weight: weight, scales: scales, biases: biases, format: format, processor: each.processor),
                bias: isSet(1) ? normal([outputs]) : nil, lora: lora, scale: 2, dropout: dropout)
            return Layer(
                formula: formula, mask: dropout.map { $0(MLXArray.ones([20, inputs])) },
                parameters: [lora.a, lora.b] + [lora.m].compactMap { $0 })
        }
    }

    private struct Layer {
        let formula: LoRALinear
        let mask: MLXArray?
        let parameters: [MLXArray]

        /// Returns G ∘ (x Wᵀ) + s (x̂ A) B + b by dense products.
        func defined(_ x: MLXArray, _ p: [MLXArray]) -> MLXArray {
            let xA = matmul(mask.map { x * $0 } ?? x, p[0])
            var y = matmul(x, formula.weight.inFloat32.T)
            if p.count > 2 { y = y * p[2] }
            y = y + formula.factor * matmul(xA, p[1])
            return formula.bias.map { y + $0 } ?? y
        }
    }

    private func expectEqual(
        _ found: [MLXArray?], _ expected: [MLXArray], _ each: Case, sourceLocation: SourceLocation = #_sourceLocation
    ) throws {
        #expect(found.count == expected.count, sourceLocation: sourceLocation)
        for (index, pair) in zip(found, expected).enumerated() {
            let found = try #require(pair.0, "\(index)", sourceLocation: sourceLocation)
            #expect(found.shape == pair.1.shape, "\(index)", sourceLocation: sourceLocation)
            #expect(relativeError(found, pair.1) <= 1e-5, "\(index)", sourceLocation: sourceLocation)
        }
    }

    @Test(arguments: Case.all) func aLinearLayer(_ each: Case) throws {
        var source = Source(each)
        let layer = try source.layer(64, 96)
        let (x, dy, sum) = (source.normal([20, 64]), source.normal([20, 96]), source.normal([20, 64]))
        let p = layer.parameters
        let (y, expected) = vjp({ [layer.defined($0[0], Array($0[1...]))] }, primals: [x] + p, cotangents: [dy])
        let tiled = Tiled(layer.formula, each.schedule)
        let d = tiled.backward(x, dy: dy, wanted: .all, wantsDx: true, addedTo: sum)
        try expectEqual(
            [tiled(x), d.dx.map { $0 - sum }, d.dA, d.dB] + (p.count > 2 ? [d.dG] : []), y + expected, each)
        let alone = tiled.backward(x, dy: dy, wanted: .none, wantsDx: true, addedTo: nil)
        try expectEqual(alone.arrays, [expected[0]], each)
    }

    @Test(arguments: Case.all) func aGatedMLP(_ each: Case) throws {
        var source = Source(each)
        let layers = [try source.layer(64, 96), try source.layer(64, 96), try source.layer(96, 64)]
        let mlp = GatedMLP(
            gate: layers[0].formula, up: layers[1].formula, down: layers[2].formula,
            names: (.gate, .up, .down), activation: source.isSet(1) ? .gelu : .silu)
        let (x, dy) = (source.normal([20, 64]), source.normal([20, 64]))
        let w = source.isSet(1) ? sigmoid(source.normal([20, 1])) : nil
        let p = layers.map(\.parameters)
        let count = p[0].count
        func defined(_ all: [MLXArray]) -> MLXArray {
            func part(_ index: Int) -> [MLXArray] { Array(all[(2 + index * count)..<(2 + (index + 1) * count)]) }
            let gate = layers[0].defined(all[0], part(0))
            let h = mlp.activation.values(gate).f * layers[1].defined(all[0], part(1))
            return all[1] * layers[2].defined(h, part(2))
        }
        let (y, expected) = vjp(
            { [defined($0)] }, primals: [x, w ?? MLXArray.ones([20, 1])] + p.flatMap { $0 }, cotangents: [dy])
        let tiled = Tiled(mlp, each.schedule)
        // gate and up are recomputed with DoRA.
        for kept in [nil, mlp.inner(x)] {
            let d = tiled.backward(x, kept: kept, dy: dy, w: w, wanted: .all)
            let gradients = [mlp.names.gate, mlp.names.up, mlp.names.down].flatMap { name in
                [d.gradients.a[name], d.gradients.b[name]] + (count > 2 ? [d.gradients.m[name]] : [])
            }
            let out = tiled(x, addedTo: nil)
            try expectEqual(
                [w.map { $0 * out } ?? out, d.dx] + (w == nil ? [] : [d.dw]) + gradients,
                y + [expected[0]] + (w == nil ? [] : [expected[1]]) + expected[2...], each)
            let alone = tiled.backward(x, kept: kept, dy: dy, w: w, wanted: .none)
            try expectEqual([alone.dx] + alone.gradients.arrays, [expected[0]], each)
        }
    }

    @Test(arguments: Case.all) func attentionOfSomeQueries(_ each: Case) throws {
        var source = Source(each)
        let mixer = AttentionMixer(
            modules: [], numAttentionHeads: 4, numKeyValueHeads: 2, headDim: 16, qkNorm: false, outputGate: false,
            attentionScale: 0.25, attnLogitSoftcapping: source.isSet(0) ? 3 : nil, frequencies: [], ropeScale: 1,
            slidingWindow: source.isSet(1) ? 6 : nil, vNorm: false, keysOf: nil)
        let attention = Attention(mixer: mixer, qNorm: nil, kNorm: nil, vNorm: nil)
        let (q, k, v) = (source.normal([4, 20, 16]), source.normal([2, 20, 16]), source.normal([2, 20, 16]))
        let dOut = source.normal([4, 20, 16])
        let (rows, columns) = (MLXArray.arange(20).expandedDimensions(axis: 1), MLXArray.arange(20))
        let seen = logicalAnd(rows .>= columns, rows .< columns + (mixer.slidingWindow ?? 20))
        func defined(_ a: [MLXArray]) -> MLXArray {
            let keys = [a[1], a[2]].map { concatenated([$0, $0], axis: 1).reshaped([4, 20, 16]) }
            var scores = matmul(a[0], keys[0].swappedAxes(1, 2)) * mixer.attentionScale
            if let cap = mixer.attnLogitSoftcapping { scores = tanh(scores / cap) * cap }
            return matmul(softmax(which(seen, scores, -Float.infinity), axis: -1), keys[1])
        }
        let (out, expected) = vjp({ [defined($0)] }, primals: [q, k, v], cotangents: [dOut])
        func byToken(_ x: MLXArray) -> MLXArray { x.swappedAxes(0, 1).reshaped([20, -1]) }
        let tiled = Tiled(attention, each.schedule)
        var none: Attention.KeyValues?
        let d = tiled.backward(q: q, k: k, v: v, dOut: dOut, carried: &none)
        try expectEqual([tiled(q: q, k: k, v: v), d.dq, d.dk, d.dv], (out + expected).map(byToken), each)
    }
}
