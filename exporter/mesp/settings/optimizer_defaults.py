"""`Core/Run/OptimizerDefaults.swift` must have the same rule."""

from __future__ import annotations

import math
from typing import Any

PAPER: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1e-4}

ADAMW = ("adamw8bit", "adamw")  # with 8-bit and float32 moments


def choose_optimizer(method: str) -> str:
    return "sgd" if method == "mezo" else "adamw8bit"


def choose_learning_rate(
    method: str,
    optimizer: str,
    hidden_size: int,
    objective: str | None = None,
    is_rewarded: bool = False,
) -> float:
    """Returns the default learning rate.

    The rate is 0.007 / √hidden_size for AdamW, 0.1 for SGD, and 1e-4 for MeZO.
    """
    if method == "mezo":
        return float(PAPER["learning_rate"])
    rate = 0.007 / math.sqrt(hidden_size) if optimizer in ADAMW else 0.1
    return rate / 10 if objective else rate / 3 if is_rewarded else rate
