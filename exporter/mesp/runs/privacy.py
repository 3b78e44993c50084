"""Computes the differential privacy of noise, with Google's dp-accounting.

In a run with DP-SGD, each step draws each of N examples with the probability q = B / N (Poisson
sampling), and adds Gaussian noise of Z times the norm that an example's gradient is clipped to.
This is the subsampled Gaussian mechanism. Its Rényi differential privacy composes over the steps
(Mironov et al., arXiv:1908.10530). Two data sets are adjacent if they are equal except that one of
them has one example more.

A federation's noise is the Gaussian mechanism. Its ε is computed exactly (the analytic Gaussian
mechanism, arXiv:1805.06530). k answers with noise, even if each depends on those before, have the ε
of one answer with 1/√k of the noise. A random choice of clients in each round could reduce ε, but
no such choice is assumed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass

from mesp.errors import MespError


@dataclass(frozen=True)
class Steps:
    """A number of steps, `count`, with Gaussian noise.

    The noise is `noise` times the largest norm of an example's gradient. Each step draws each
    example with the probability `sampled`.
    """

    count: int
    noise: float
    sampled: float


def epsilon(steps: Iterable[Steps], delta: float) -> float:
    """Returns the ε of all `steps` together; infinite if some steps have no noise.

    Raises MespError if dp-accounting is not installed.
    """
    try:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise MespError(
            "The ε of --dp-noise needs dp-accounting: `pip install 'mesp[privacy]'`."
        ) from error
    # The library warns of each Rényi order that it leaves out. The warnings are not shown, because
    # leaving an order out can only increase ε.
    logging.getLogger("absl").setLevel(logging.ERROR)
    accountant = RdpAccountant()
    for each in steps:
        if each.count > 0 and each.noise == 0:
            return math.inf
        drawn = PoissonSampledDpEvent(each.sampled, GaussianDpEvent(each.noise))
        accountant.compose(drawn, each.count)
    return float(accountant.get_epsilon(delta))


def gaussian_epsilon(noise: float, delta: float, releases: int = 1) -> float:
    """Returns the ε of this many releases together.

    Each release has Gaussian noise with a standard deviation of `noise` times its sensitivity.
    """
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    return float(get_epsilon_gaussian(noise / math.sqrt(releases), delta))


def noise_for(epsilon: float, delta: float) -> float:
    """Returns the smallest noise with which one release has this ε, as a multiple of the release's
    sensitivity.
    """
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    return float(get_sigma_gaussian(epsilon, delta))
