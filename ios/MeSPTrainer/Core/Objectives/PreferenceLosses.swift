import Foundation

/// The terms of an answer y in an objective.
struct AnswerProbability {
    let answer: PreferenceAnswer
    /// log π(y), the sum over its targets, in nats.
    let logProbability: Double
    /// log π₀(y); nil for an objective that has no π₀.
    let reference: Double?

    /// n, the number of its targets.
    var tokens: Int { answer.example.counted.count }
    /// ρ = log π(y) − log π₀(y)
    var ratio: Double { logProbability - (reference ?? 0) }
    /// μ = log π(y) / n
    var mean: Double { logProbability / Double(tokens) }
}

/// The loss of a pair of answers, or of one that is good or bad by itself, as TRL 1.9.0 has it, and what follows from it.
struct PreferenceLoss {
    let loss: Double
    /// Of each answer, the chosen one first, the derivative of the loss by −log π: the weight of all of its targets in the gradient.
    let weights: [Double]
    /// The weight of the targets of the chosen answer's prompt: ORPO's supervised loss is over these too.
    var context = 0.0
    /// Of each answer β times what answers are compared by.
    let rewards: [Double]
    /// Whether the chosen answer has the higher reward; of a single one, whether its reward is on the right side of β k.
    let isRight: Bool

    /// The loss of a pair:
    ///
    ///     DPO     m = β (ρ_c − ρ_r)                     ℒ = −log σ(m)
    ///     IPO     h = ρ_c / n_c − ρ_r / n_r − 1 / 2β    ℒ = h²
    ///     SimPO   m = β (μ_c − μ_r) − γ                 ℒ = −log σ(m)
    ///     ORPO    o = f(μ_c) − f(μ_r)                   ℒ = −β log σ(o) + the chosen's supervised loss
    ///
    /// with c for the chosen answer, r for the rejected one, and f(x) = x − log(1 − eˣ), the logit of eˣ.
    /// - Parameter supervisedTargets: of ORPO, whose supervised loss is a mean over all targets of a batch's chosen answers and their
    ///   prompts, how many those are for each pair. The loss here is without the prompt's part.
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
            let odds = logit(chosen.mean) - logit(rejected.mean)
            let slope = beta * sigmoid(-odds)
            loss = beta * softplus(-odds) - chosen.logProbability / supervisedTargets
            weights = [
                slope / -expm1(chosen.mean) / Double(chosen.tokens) + 1 / supervisedTargets,
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

    /// The loss of a single answer (KTO):
    ///
    ///     ℒ = w (1 − σ(± β (ρ − k)))
    ///
    /// with + and w = `desirableWeight` for a good one, − and `undesirableWeight` for a bad one. k is what π is away from π₀ anyway: no
    /// less than 0, the mean ρ of the batch's prompts, each with the answer before it. It is not a function of the parameters.
    init(_ scored: AnswerProbability, kl: Double, _ settings: RunSettings) {
        let (beta, sign) = (settings.preferenceBeta, scored.answer.isGood ? 1.0 : -1.0)
        let factor = Double((scored.answer.isGood ? settings.desirableWeight : settings.undesirableWeight) ?? 1)
        let value = sigmoid(sign * beta * (scored.ratio - kl))
        loss = factor * (1 - value)
        weights = [sign * factor * beta * value * (1 - value)]
        rewards = [beta * scored.ratio]
        isRight = (scored.ratio > kl) == scored.answer.isGood
    }

    /// k, of the mismatched answers of a batch.
    static func kl(_ mismatched: [AnswerProbability]) -> Double {
        max(0, mismatched.reduce(0) { $0 + $1.ratio } / Double(mismatched.count))
    }
}

extension RunSettings {
    /// β
    fileprivate var preferenceBeta: Double { Double(beta ?? 0.1) }
}

private func sigmoid(_ x: Double) -> Double { x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x)) }

/// −log σ(−x)
private func softplus(_ x: Double) -> Double { max(x, 0) + log1p(exp(-abs(x))) }
