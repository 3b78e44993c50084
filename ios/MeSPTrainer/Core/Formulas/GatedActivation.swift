import Foundation
import MLX

/// f of the MLP's gated activation  act = f(gate) ∘ up.
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
