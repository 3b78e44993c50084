"""Losses on preference data, as in TRL 1.9.0.

c is the chosen and r the rejected answer of a pair, ρ = log π - log π₀, and μ = log π / n for an
answer with n targets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Answer(NamedTuple):
    """The log-probabilities of an answer y of n tokens: log π(y) and, as `reference`, log π₀(y).

    Both are sums over the answer's targets, in nats. π₀ is the model before the run.
    """

    logp: float
    reference: float
    tokens: int

    @property
    def ratio(self) -> float:
        """ρ = log(π(y) / π₀(y))"""
        return self.logp - self.reference


class Preference(NamedTuple):
    """The loss of a pair, and the weights of the two answers.

    A weight is the derivative of the loss with respect to -log π of the answer. Every target of the
    answer has this weight in the gradient.
    """

    loss: float
    chosen: float
    rejected: float


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _softplus(x: float) -> float:
    """Returns -log sigmoid(-x)."""
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


def dpo(chosen: Answer, rejected: Answer, beta: float) -> Preference:
    """Returns the loss ℒ = -log sigmoid(m), with m = β (ρ_c - ρ_r), and its weights."""
    margin = beta * (chosen.ratio - rejected.ratio)
    weight = beta * _sigmoid(-margin)
    return Preference(_softplus(-margin), weight, -weight)


def ipo(chosen: Answer, rejected: Answer, beta: float) -> Preference:
    """Returns the loss ℒ = h², with h = ρ_c / n_c - ρ_r / n_r - 1 / 2β, and its weights."""
    difference = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens - 1 / (2 * beta)
    slope = 2 * difference
    return Preference(difference**2, -slope / chosen.tokens, slope / rejected.tokens)


def simpo(chosen: Answer, rejected: Answer, beta: float, gamma: float) -> Preference:
    """Returns the loss ℒ = -log sigmoid(m), with m = β (μ_c - μ_r) - γ, and its weights."""
    margin = beta * (chosen.logp / chosen.tokens - rejected.logp / rejected.tokens) - gamma
    weight = beta * _sigmoid(-margin)
    return Preference(_softplus(-margin), weight / chosen.tokens, -weight / rejected.tokens)


def orpo(chosen: Answer, rejected: Answer, beta: float) -> Preference:
    """Returns the loss ℒ = -β log sigmoid(o) and its weights.

    o = f(μ_c) - f(μ_r), with the log odds f(x) = x - log(1 - eˣ). The caller adds the chosen
    answer's mean loss. μ_c = 0 has the limit of the loss and of the weights, computed at -2⁻⁵³.
    """
    means = [answer.logp / answer.tokens for answer in (chosen, rejected)]
    means[0] = min(means[0], -(2.0**-53))
    odds = [mean - math.log(-math.expm1(mean)) for mean in means]
    slope = beta * _sigmoid(odds[1] - odds[0])
    # f'(μ) = 1 / (1 - e^μ)
    weights = [slope / -math.expm1(mean) for mean in means]
    return Preference(
        beta * _softplus(odds[1] - odds[0]),
        weights[0] / chosen.tokens,
        -weights[1] / rejected.tokens,
    )


def kto(
    answers: Sequence[Answer],
    labels: Sequence[bool],
    mismatched: Sequence[Answer],
    beta: float,
    desirable: float = 1.0,
    undesirable: float = 1.0,
) -> tuple[float, list[float]]:
    """Returns the mean loss of a batch, and the weight of each answer's targets.

        good answers:  ℒ = desirable (1 - sigmoid(β (ρ - k)))
        bad answers:   ℒ = undesirable (1 - sigmoid(-β (ρ - k)))

    k = max(0, mean ρ of `mismatched`) is a constant in the gradient. `mismatched` pairs each prompt
    of the batch with the answer of another record.
    """
    kl = max(0.0, sum(each.ratio for each in mismatched) / len(mismatched))
    total, weights = 0.0, []
    for answer, good in zip(answers, labels, strict=True):
        sign, factor = (1, desirable) if good else (-1, undesirable)
        value = _sigmoid(sign * beta * (answer.ratio - kl))
        total += factor * (1 - value) / len(answers)
        weights.append(sign * factor * beta * value * (1 - value) / len(answers))
    return total, weights
