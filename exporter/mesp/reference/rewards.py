"""Group relative policy optimization (arXiv:2402.03300)."""

from __future__ import annotations

import math
from collections.abc import Sequence


def grpo(
    rewards: Sequence[float], tokens: Sequence[int], longest: int | None = None
) -> tuple[float, list[float]]:
    """Returns the loss of a group's answers, and the weight a of each answer's targets in the
    gradient.

        GRPO        A = (r - mean r) / (std r + 1e-4)      a = A / (G n)
        Dr. GRPO    A = r - mean r                         a = A / (G n_max)

    The loss is -Σ a n, because the answers are sampled from the model before the update. std is the
    sample standard deviation.

    Args:

    - rewards: r of G answers to one prompt, G at least 2.
    - tokens: n, the number of targets of each answer.
    - longest: n_max of Dr. GRPO (arXiv:2503.20783); None for GRPO.
    """
    group = len(rewards)
    mean = sum(rewards) / group
    advantages = [reward - mean for reward in rewards]
    if longest is None:
        deviation = math.sqrt(sum(each**2 for each in advantages) / (group - 1))
        advantages = [each / (deviation + 1e-4) for each in advantages]
    weights = [each / (group * (longest or n)) for each, n in zip(advantages, tokens, strict=True)]
    return -sum(a * n for a, n in zip(weights, tokens, strict=True)), weights
