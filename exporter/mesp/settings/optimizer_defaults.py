"""The optimizer and the learning rate of a run that names none: docs/decisions.md says why.

`Core/Run/OptimizerDefaults.swift` has the same rule for the app, and RunTests.swift holds both
together.
"""

from __future__ import annotations

import math
from typing import Any

# The paper's update, and the engine's where a settings file names none.
PAPER: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1e-4}

ADAMW = ("adamw8bit", "adamw")  # with its moments in 8 bits, and in float32


def choose_optimizer(method: str) -> str:
    """Returns AdamW with its moments in 8 bits, or SGD for MeZO."""
    return "sgd" if method == "mezo" else "adamw8bit"


def choose_learning_rate(
    method: str,
    optimizer: str,
    hidden_size: int,
    objective: str | None = None,
    is_rewarded: bool = False,
) -> float:
    """Returns 0.007 / √hidden_size for AdamW (5.1e-4 for the demo model, 2.3e-4 for Qwen2.5-0.5B)
    and 0.1 for SGD. An objective takes a tenth of these, a reward a third, and MeZO 1e-4."""
    if method == "mezo":
        return float(PAPER["learning_rate"])
    rate = 0.007 / math.sqrt(hidden_size) if optimizer in ADAMW else 0.1
    return rate / 10 if objective else rate / 3 if is_rewarded else rate
