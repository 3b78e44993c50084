"""The differential privacy of a run with DP-SGD, by Google's dp-accounting.

Each step draws each of N examples with the probability q = B / N (Poisson sampling) and adds
Gaussian noise of Z times the norm that an example's gradient is clipped to: the subsampled Gaussian
mechanism, of which Rényi differential privacy composes over the steps (Mironov et al.,
arXiv:1908.10530). Adjacent are data sets of which one has one example more.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from mesp.errors import MespError


class Steps(NamedTuple):
    """So many steps with Gaussian noise of `noise` times an example's largest norm, each of which
    draws each example with the probability `sampled`."""

    count: int
    noise: float
    sampled: float


def epsilon(steps: Iterable[Steps], delta: float) -> float:
    """The ε of all of these steps together; infinite without noise.

    Raises MespError where dp-accounting is not installed.
    """
    try:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise MespError(
            "The ε of --dp-noise needs dp-accounting: `pip install 'mesp[privacy]'`."
        ) from error
    # It warns of each order that it leaves out, which only makes ε larger.
    logging.getLogger("absl").setLevel(logging.ERROR)
    accountant = RdpAccountant()
    for count, noise, sampled in steps:
        if count > 0 and noise == 0:
            return math.inf
        accountant.compose(PoissonSampledDpEvent(sampled, GaussianDpEvent(noise)), count)
    return float(accountant.get_epsilon(delta))


def describe_privacy(settings: dict[str, Any], examples: int, steps: int) -> str:
    """The ε of so many steps of a run with DP-SGD, in a sentence."""
    if settings["dp_noise"] == 0:
        return "Differential privacy: none, as gradients are clipped and get no noise."
    sampled = settings["batch_size"] / examples
    total = epsilon([Steps(steps, settings["dp_noise"], sampled)], settings["dp_delta"])
    return (
        f"Differential privacy of each of {examples:,} training examples: ε {total:.3g} at "
        f"δ {settings['dp_delta']:g} over {steps:,} step{'s' * (steps != 1)}."
    )
