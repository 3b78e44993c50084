"""What differential privacy the noise of a federation gives, by Google's dp-accounting.

Both guarantees are of the Gaussian mechanism, whose ε is computed exactly (the analytic Gaussian
mechanism, arXiv:1805.06530). k answers with noise, also where each depends on those before, have
the ε of one with 1/√k of the noise. No sampling of clients is assumed, so none makes ε smaller.
"""

from __future__ import annotations

import math

from dp_accounting.gaussian_mechanism import get_epsilon_gaussian, get_sigma_gaussian


def epsilon(noise: float, delta: float, releases: int = 1) -> float:
    """The ε of so many releases together, with Gaussian noise whose standard deviation is `noise`
    times the sensitivity of one."""
    return float(get_epsilon_gaussian(noise / math.sqrt(releases), delta))


def noise_for(epsilon: float, delta: float) -> float:
    """The smallest noise of a single release that has this ε, as a multiple of its sensitivity."""
    return float(get_sigma_gaussian(epsilon, delta))
