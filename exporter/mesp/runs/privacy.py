"""Computes the differential privacy of noise, with Google's dp-accounting.

In DP-SGD, each step draws each of N examples with probability q = B / N (Poisson sampling). The
step adds Gaussian noise of Z times the clipping norm. The Rényi differential privacy of this
subsampled Gaussian mechanism composes over the steps (Mironov et al., arXiv:1908.10530).

Its ε is exact (the analytic Gaussian mechanism, arXiv:1805.06530). k releases have the ε of one
release with 1/√k of the noise.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

from mesp.errors import MespError


@dataclass(frozen=True)
class Steps:
    """`count` steps with Gaussian noise.

    `noise` is the noise's standard deviation as a multiple of the clipping norm. Each step draws
    each example with probability `sampled`.
    """

    count: int
    noise: float
    sampled: float


def epsilon(steps: Iterable[Steps], delta: float) -> float:
    """Returns the ε of all `steps` together.

    Raises MespError if dp-accounting is not installed.
    """
    try:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise MespError(
            "The ε of --dp-noise needs dp-accounting: `pip install 'mesp[privacy]'`."
        ) from error
    # Hides the library's warnings about Rényi orders that it leaves out. Leaving an order out can
    # only increase ε.
    logging.getLogger("absl").setLevel(logging.ERROR)
    accountant = RdpAccountant()
    for each in steps:
        if each.count > 0 and each.noise == 0:
            return math.inf
        drawn = PoissonSampledDpEvent(each.sampled, GaussianDpEvent(each.noise))
        accountant.compose(drawn, each.count)
    return float(accountant.get_epsilon(delta))


def gaussian_epsilon(noise: float, delta: float, releases: int = 1) -> float:
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    return float(get_epsilon_gaussian(noise / math.sqrt(releases), delta))


def noise_for(epsilon: float, delta: float) -> float:
    """Returns the smallest noise with which one release has this ε, as a multiple of its
    sensitivity."""
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    return float(get_sigma_gaussian(epsilon, delta))
