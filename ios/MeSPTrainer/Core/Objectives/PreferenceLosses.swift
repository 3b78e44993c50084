import Foundation

/// The terms of an answer y in an objective.
struct AnswerProbability {
    let answer: PreferenceAnswer
    /// log π(y), the sum over its targets, in nats.
    let logProbability: Double
    /// log π₀(y); nil for an objective that has no π₀.
    let reference: Double?

    /// The number of its targets.
    var tokens: Int { answer.example.counted.count }
    /// log π(y) / π₀(y)
    var ratio: Double { logProbability - (reference ?? 0) }
    /// log π(y) a token.
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
    ///     DPO     m = β (ratio_w − ratio_l)                     L = −log σ(m)
    ///     IPO     h = ratio_w / n_w − ratio_l / n_l             L = (h − 1 / 2β)²
    ///     SimPO   m = β (mean_w − mean_l) − γ                   L = −log σ(m)
    ///     ORPO    o = logit(e^mean_w) − logit(e^mean_l)         L = −β log σ(o) + the chosen's supervised loss
    ///
    /// for the ratios log π / π₀ of a chosen answer w and a rejected one l of n targets, and their means of log π.
    /// - Parameter supervisedTargets: of ORPO, whose supervised loss is a mean over all targets of a batch's chosen answers and their
    ///   prompts, how many those are for each pair. The loss here is without the prompt's part.
    init(
        _ objective: Objective, chosen w: AnswerProbability, rejected l: AnswerProbability, supervisedTargets: Double,
        _ settings: RunSettings
    ) {
        let beta = settings.preferenceBeta
        switch objective {
        case .ipo:
            let difference = w.ratio / Double(w.tokens) - l.ratio / Double(l.tokens) - 1 / (2 * beta)
            loss = difference * difference
            weights = [-2 * difference / Double(w.tokens), 2 * difference / Double(l.tokens)]
            rewards = [beta * w.ratio, beta * l.ratio]
        case .simpo:
            let margin = beta * (w.mean - l.mean) - Double(settings.gamma ?? 0.5)
            loss = softplus(-margin)
            weights = [beta * sigmoid(-margin) / Double(w.tokens), -beta * sigmoid(-margin) / Double(l.tokens)]
            rewards = [beta * w.mean, beta * l.mean]
        case .orpo:
            func logit(_ mean: Double) -> Double { mean - log(-expm1(mean)) }
            let odds = logit(w.mean) - logit(l.mean)
            let slope = beta * sigmoid(-odds)
            loss = beta * softplus(-odds) - w.logProbability / supervisedTargets
            weights = [
                slope / -expm1(w.mean) / Double(w.tokens) + 1 / supervisedTargets,
                -slope / -expm1(l.mean) / Double(l.tokens),
            ]
            context = 1 / supervisedTargets
            rewards = [beta * w.mean, beta * l.mean]
        case .dpo, .kto:
            let margin = beta * (w.ratio - l.ratio)
            loss = softplus(-margin)
            weights = [beta * sigmoid(-margin), -beta * sigmoid(-margin)]
            rewards = [beta * w.ratio, beta * l.ratio]
        }
        isRight = rewards[0] > rewards[1]
    }

    /// The loss of a single answer (KTO):
    ///
    ///     L = w (1 − σ(± β (ratio − k)))
    ///
    /// with + and `desirableWeight` for a good one, − and `undesirableWeight` for a bad one. k is what π is away from π₀ anyway: no less
    /// than 0, the mean ratio of the batch's prompts, each with the answer before it. It is not a function of the parameters.
    init(_ answer: AnswerProbability, kl: Double, _ settings: RunSettings) {
        let (beta, sign) = (settings.preferenceBeta, answer.answer.isGood ? 1.0 : -1.0)
        let factor = Double((answer.answer.isGood ? settings.desirableWeight : settings.undesirableWeight) ?? 1)
        let value = sigmoid(sign * beta * (answer.ratio - kl))
        loss = factor * (1 - value)
        weights = [sign * factor * beta * value * (1 - value)]
        rewards = [beta * answer.ratio]
        isRight = (answer.ratio > kl) == answer.answer.isGood
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
