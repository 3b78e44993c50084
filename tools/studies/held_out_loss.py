"""Trains a model for some steps and returns its held-out losses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import mesp
from mesp.bundle.reader import Bundle
from mesp.runs.log import RunLog

HELD_OUT = 32


def learn(bundle: Bundle, out: Path, steps: int, seed: int, **settings: Any) -> tuple[float, float]:
    """Trains with further `settings` of `mesp.train`, and replaces a run in the folder `out`.

    Returns the loss on HELD_OUT sequences before and after, in nats per token.
    """
    shutil.rmtree(out, ignore_errors=True)
    mesp.train(
        bundle, out=out, steps=steps, warmup=steps // 20, schedule="linear", seed=seed,
        val_batches=HELD_OUT, **settings,
    )  # fmt: skip
    before, after = RunLog.load(out).held_out
    assert before is not None and after is not None
    return before, after
