"""The default optimizer and learning rate of a run; docs/decisions.md has the reasons.

`Core/Run/OptimizerDefaults.swift` has the same rule for the app, and RunTests.swift compares the
two.
"""

from __future__ import annotations

import math
from typing import Any

# The paper's update, and the engine's default in a settings file.
PAPER: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1e-4}

ADAMW = ("adamw8bit", "adamw")  # with its moments in 8 bits, and in float32


def choose_optimizer(method: str) -> str:
    """Returns AdamW with its moments in 8 bits; for MeZO, SGD."""
    return "sgd" if method == "mezo" else "adamw8bit"


def choose_learning_rate(
    method: str,
    optimizer: str,
    hidden_size: int,
    objective: str | None = None,
    is_rewarded: bool = False,
) -> float:
    """Returns the default learning rate.

    For AdamW it is 0.007 / √hidden_size: 5.1e-4 for the demo model, 2.3e-4 for Qwen2.5-0.5B. For
    SGD it is 0.1. With an objective, a run gets a tenth of these rates, and with a reward a third.
    For MeZO the rate is 1e-4.
    """
    if method == "mezo":
        return float(PAPER["learning_rate"])
    rate = 0.007 / math.sqrt(hidden_size) if optimizer in ADAMW else 0.1
    return rate / 10 if objective else rate / 3 if is_rewarded else rate
