import Foundation
import MLX
import MeSPBundle

extension Activation {
    func gated(gate: MLXArray, up: MLXArray) -> MLXArray { kernels.gated([gate, up]) }

    /// Returns act = f(gate) up,  d_gate = d_act up f′(gate)  and  d_up = d_act f(gate), in float32.
    ///
    /// - Parameters:
    ///   - gate: terms whose sum is gate
    ///   - up: terms whose sum is up
    ///   - factors: the factors of the first terms of gate and up; nil for 1
    func gatedBackward(
        gate: [MLXArray], up: [MLXArray], factors: (gate: MLXArray?, up: MLXArray?) = (nil, nil), dAct: MLXArray
    ) -> (act: MLXArray, dGate: MLXArray, dUp: MLXArray) {
        let count = max(gate.count, up.count)
        let terms = [gate, up].flatMap { $0 + Array(repeating: MLXArray(Float(0)), count: count - $0.count) }
        let hasFactors = factors.gate != nil || factors.up != nil
        let results =
            hasFactors
            ? kernels.scaledBackward.results(
                terms + [factors.gate, factors.up].map { $0 ?? MLXArray(Float(1)) } + [dAct])
            : kernels.gatedBackward.results(terms + [dAct])
        return (results[0], results[1], results[2])
    }

    private struct Kernels {
        let gated, gatedBackward, scaledBackward: Fused

        init(_ activation: Activation) {
            gated = Fused { activation.values($0[0]).f * $0[1] }
            gatedBackward = Fused(3) {
                let (count, dAct) = ($0.count / 2, $0[$0.count - 1])
                let (gate, up) = (sum($0.prefix(count)), sum($0.dropFirst(count).prefix(count)))
                return activation.backward(gate: gate, up: up, dAct: dAct)
            }
            scaledBackward = Fused(3) { all in
                let count = (all.count - 3) / 2
                func scaledSum(_ number: Int) -> MLXArray {
                    let terms = all[number * count..<(number + 1) * count]
                    return sum([terms[terms.startIndex].asType(.float32) * all[2 * count + number]] + terms.dropFirst())
                }
                return activation.backward(gate: scaledSum(0), up: scaledSum(1), dAct: all[all.count - 1])
            }
        }
    }
    private func backward(gate: MLXArray, up: MLXArray, dAct: MLXArray) -> [MLXArray] {
        let (f, slope) = values(gate)
        return [f * up, dAct * up * slope, dAct * f]
    }

    private var kernels: Kernels { self == .silu ? Self.silus : Self.gelus }
    private static let silus = Kernels(.silu)
    private static let gelus = Kernels(.gelu)

    func values(_ x: MLXArray) -> (f: MLXArray, slope: MLXArray) {
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

private func sum(_ terms: some Collection<MLXArray>) -> MLXArray {
    let terms = terms.map { $0.asType(.float32) }
    return terms.dropFirst().reduce(terms[0]) { $0 + $1 }
}
