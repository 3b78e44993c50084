import MLX
import Testing

@testable import MeSPBundle
@testable import MeSPCore

@Suite(.serialized) struct GatedActivationTests {
    @Test(arguments: [Activation.silu, .gelu], [(1, 1), (2, 2), (3, 3), (1, 2), (3, 2)]) func kernelsAreTheFormula(
        _ activation: Activation, _ terms: (gate: Int, up: Int)
    ) {
        func parts(_ terms: Int, _ seed: UInt64) -> [MLXArray] {
            MLXRandom.split(key: MLXRandom.key(seed), into: terms).enumerated().map { index, key in
                MLXRandom.normal(index == 2 ? [6] : [5, 6], key: key)
            }
        }
        let (gate, up) = (parts(terms.gate, 1), parts(terms.up, 2))
        let dAct = MLXRandom.normal([5, 6], key: MLXRandom.key(3))
        func derivative() -> (act: MLXArray, dGate: MLXArray, dUp: MLXArray) {
            activation.gatedBackward(gate: gate, up: up, dAct: dAct)
        }
        let (expected, found) = (Processor.$cpu.withValue(.plainCPU) { derivative() }, derivative())
        for (a, b) in [(expected.act, found.act), (expected.dGate, found.dGate), (expected.dUp, found.dUp)] {
            #expect(relativeError(a, b) < 1e-6)
        }
    }
}
