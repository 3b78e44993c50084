import Foundation

struct AnswerProbability {
    let answer: PreferenceAnswer
    /// log π(y), the sum of the log-probabilities of the answer's tokens, in nats.
    let logProbability: Double
    /// log π₀(y) of the reference model; nil for an objective without a reference model.
    let reference: Double?

    var tokens: Int { answer.example.counted.count }
    /// ρ = log π(y) − log π₀(y)
    var ratio: Double { logProbability - (reference ?? 0) }
    /// μ = log π(y) / n
    var mean: Double { logProbability / Double(tokens) }
}

/// The loss of a pair of answers, or of a single good or bad answer, as in TRL 1.9.0.
struct PreferenceLoss {
    let loss: Double
    /// The gradient of the loss with respect to −log π of each answer, the chosen answer first.
    let weights: [Double]
    /// The weight of the targets in the chosen answer's prompt in ORPO's supervised loss; 0 for other objectives.
    var context = 0.0
    /// The reward of each answer, such as β ρ for DPO.
    let rewards: [Double]
    /// Whether the chosen answer has the higher reward, or whether a single answer's reward is on the right side of β k.
    let isRight: Bool

    /// Computes the loss of a pair:
    ///
    ///     DPO     m = β (ρ_c − ρ_r)                     ℒ = −log σ(m)
    ///     IPO     h = ρ_c / n_c − ρ_r / n_r − 1 / 2β    ℒ = h²
    ///     SimPO   m = β (μ_c − μ_r) − γ                 ℒ = −log σ(m)
    ///     ORPO    o = f(μ_c) − f(μ_r)                   ℒ = −β log σ(o) + the chosen answer's supervised loss
    ///
    /// c stands for the chosen answer and r for the rejected answer. f(x) = x − log(1 − eˣ) is the logit of eˣ. A chosen answer that is certain, with
    /// μ_c = 0, has the limit of the loss and of the gradient. It is computed at μ_c = −2⁻⁵³.
    /// - Parameter supervisedTargets: for ORPO, the number of targets in a batch's chosen answers and their prompts, divided by the number of pairs.
    ///   The supervised loss is a mean over these targets. `loss` contains only the part of the answer's targets.
    init(
        _ objective: Objective, chosen: AnswerProbability, rejected: AnswerProbability, supervisedTargets: Double,
        _ settings: RunSettings
    ) {
        let beta = settings.preferenceBeta
        switch objective {
        case .ipo:
            let difference =
                chosen.ratio / Double(chosen.tokens) - rejected.ratio / Double(rejected.tokens) - 1 / (2 * beta)
            loss = difference * difference
            weights = [-2 * difference / Double(chosen.tokens), 2 * difference / Double(rejected.tokens)]
            rewards = [beta * chosen.ratio, beta * rejected.ratio]
        case .simpo:
            let margin = beta * (chosen.mean - rejected.mean) - Double(settings.gamma ?? 0.5)
            loss = softplus(-margin)
            weights = [
                beta * sigmoid(-margin) / Double(chosen.tokens), -beta * sigmoid(-margin) / Double(rejected.tokens),
            ]
            rewards = [beta * chosen.mean, beta * rejected.mean]
        case .orpo:
            func logit(_ mean: Double) -> Double { mean - log(-expm1(mean)) }
            let mean = min(chosen.mean, -0x1p-53)
            let odds = logit(mean) - logit(rejected.mean)
            let slope = beta * sigmoid(-odds)
            loss = beta * softplus(-odds) - chosen.logProbability / supervisedTargets
            weights = [
                slope / -expm1(mean) / Double(chosen.tokens) + 1 / supervisedTargets,
                -slope / -expm1(rejected.mean) / Double(rejected.tokens),
            ]
            context = 1 / supervisedTargets
            rewards = [beta * chosen.mean, beta * rejected.mean]
        case .dpo, .kto:
            let margin = beta * (chosen.ratio - rejected.ratio)
            loss = softplus(-margin)
            weights = [beta * sigmoid(-margin), -beta * sigmoid(-margin)]
            rewards = [beta * chosen.ratio, beta * rejected.ratio]
        }
        isRight = rewards[0] > rewards[1]
    }

    /// Computes the loss of a single answer (KTO):
    ///
    ///     ℒ = w (1 − σ(± β (ρ − k)))
    ///
    /// A good answer has + and w = `desirableWeight`. A bad answer has − and w = `undesirableWeight`. k (`kl`) estimates the KL divergence of π from
    /// π₀, and is treated as a constant in the gradient.
    init(_ scored: AnswerProbability, kl: Double, _ settings: RunSettings) {
        let (beta, sign) = (settings.preferenceBeta, scored.answer.isGood ? 1.0 : -1.0)
        let factor = Double((scored.answer.isGood ? settings.desirableWeight : settings.undesirableWeight) ?? 1)
        let value = sigmoid(sign * beta * (scored.ratio - kl))
        loss = factor * (1 - value)
        weights = [sign * factor * beta * value * (1 - value)]
        rewards = [beta * scored.ratio]
        isRight = (scored.ratio > kl) == scored.answer.isGood
    }

    /// Returns k: the mean ρ of a batch's mismatched prompts and answers, but at least 0.
    static func kl(_ mismatched: [AnswerProbability]) -> Double {
        max(0, mismatched.reduce(0) { $0 + $1.ratio } / Double(mismatched.count))
    }
}

extension RunSettings {
    fileprivate var preferenceBeta: Double { Double(beta ?? 0.1) }
}

private func sigmoid(_ x: Double) -> Double { x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x)) }

/// Returns −log σ(−x).
private func softplus(_ x: Double) -> Double { max(x, 0) + log1p(exp(-abs(x))) }
