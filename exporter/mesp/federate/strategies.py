"""Flower's strategies, made of options, and what they keep from round to round."""

from __future__ import annotations

import inspect
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mesp.errors import MespError

if TYPE_CHECKING:  # the command names the strategies without Flower
    from flwr.serverapp.strategy import Strategy

# Flower's strategies by their names here.
STRATEGIES = {
    "fedavg": "FedAvg",
    "fedadam": "FedAdam",
    "fedprox": "FedProx",
    "fedmedian": "FedMedian",
    "trimmed": "FedTrimmedAvg",
    "krum": "Krum",
    "multikrum": "MultiKrum",
}
# What FedAdam goes on from: its moments, by the matrices' names.
KEPT = ("m_t", "v_t")
# The metric of a client that is 1 for all: a weight.
ONE = "client"


def make_strategy(options: dict[str, Any]) -> Strategy:
    """Flower's strategy of that name with these options. Raises MespError where it takes none."""
    from flwr.serverapp import strategy

    kind = getattr(strategy, STRATEGIES[options["strategy"]])
    given = dict(options["strategy_options"])
    numbers = {
        name: each.default
        for name, each in inspect.signature(kind).parameters.items()
        if isinstance(each.default, int | float)
    }
    for name, value in given.items():
        if name not in numbers:
            raise MespError(
                f"--strategy {options['strategy']} has no option {name}; it has "
                f"{', '.join(sorted(numbers))}."
            )
        is_whole = isinstance(numbers[name], int)
        if not math.isfinite(value) or (is_whole and value != int(value)):
            raise MespError(
                f"--strategy-options {name}={value:g} is not a {'whole' if is_whole else 'finite'} "
                "number."
            )
        given[name] = int(value) if is_whole else value
    limits = {
        "min_available_nodes": options["clients"],
        "min_train_nodes": options["clients"],
        "fraction_train": 1,
    }
    for name, most in limits.items():
        if not 0 < given.get(name, most) <= most:
            raise MespError(
                f"--strategy-options {name} is above 0 and at most {most}, or a round would wait "
                "for clients forever."
            )
    clients = {"min_available_nodes": options["clients"], "min_train_nodes": 1}
    private = options["noise"] is not None
    # For the noise to hide any one client, all must count the same.
    weight = {"weighted_by_key": ONE if private else "num-examples"}
    try:
        inner = kind(**{**clients, **weight, **given})
    except ValueError as error:
        raise MespError(f"--strategy-options do not suit {options['strategy']}: {error}") from error
    if not private:
        return inner
    # The answers are clipped when they are screened; this one adds noise to their mean.
    return strategy.DifferentialPrivacyClientSideFixedClipping(
        inner, options["noise"], options["clip"], options["clients"]
    )


def state_of(inner: Strategy) -> bytes | None:
    """What a strategy keeps from round to round: FedAdam's moments."""
    arrays = {
        f"{field}/{name}": array
        for field in KEPT
        for name, array in (getattr(_innermost(inner), field, None) or {}).items()
    }
    if not arrays:
        return None
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def restore(inner: Strategy, path: Path) -> None:
    """Gives a strategy what `state_of` kept in a file, or, where there is none, nothing."""
    kept = dict(np.load(path)) if path.exists() else {}
    for field in KEPT:
        if hasattr(_innermost(inner), field):
            arrays = {n.partition("/")[2]: kept[n] for n in kept if n.startswith(f"{field}/")}
            setattr(_innermost(inner), field, arrays or None)


def _innermost(inner: Strategy) -> Strategy:
    return getattr(inner, "strategy", inner)
