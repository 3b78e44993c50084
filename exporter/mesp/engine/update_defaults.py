"""The optimizer and learning rate of a run that names none: docs/decisions.md says why.

`Core/Run/RunSettings.swift` has the same for the app; a test holds them together.
"""

from __future__ import annotations

import math

# The paper's update, and the engine's where a settings file names none.
PAPER = {"optimizer": "sgd", "learning_rate": 1e-4}

OPTIMIZERS = ("sgd", "adamw8bit", "adamw")
ADAMW = ("adamw8bit", "adamw")  # with its moments in 8 bits, and in float32


def default_optimizer(method: str) -> str:
    return "sgd" if method == "mezo" else "adamw8bit"


def default_learning_rate(
    method: str, optimizer: str, hidden_size: int, objective: str | None = None
) -> float:
    """0.014 / √hidden_size for AdamW: 1.0e-3 for the demo model, 4.7e-4 for Qwen2.5-0.5B; a tenth
    of it with an objective."""
    if method == "mezo":
        return PAPER["learning_rate"]
    rate = 0.014 / math.sqrt(hidden_size) if optimizer in ADAMW else 0.1
    return rate / 10 if objective else rate
