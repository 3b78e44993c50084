"""Steps of training: the windows that they take, and what they report."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mesp import reference
from mesp.bundle.reader import Bundle

# A run ends early, with the steps it has, once it has taken this long: mlx-lm as shipped needs
# minutes a step on a CPU.
PATIENCE = 120.0
SAMPLED_EVERY = 0.002  # seconds between two looks at this process's memory


def report(kind: str, **fields: Any) -> None:
    """Prints a record."""
    print(json.dumps({"type": kind, **fields}), file=sys.__stdout__, flush=True)


def footprint() -> int:
    """This process's memory: RssAnon + VmSwap on Linux, phys_footprint on a Mac."""
    if sys.platform == "darwin":
        usage = (ctypes.c_uint64 * 64)()  # rusage_info_v0: a UUID, then 64-bit counters
        ctypes.CDLL("libproc.dylib").proc_pid_rusage(os.getpid(), 0, usage)
        return usage[9]
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    counted = (line for line in lines if line.startswith(("RssAnon:", "VmSwap:")))
    return sum(int(line.split()[1]) * 1024 for line in counted)


class Steps:
    """Reports steps, with the highest footprint since the first began.

    A thread looks at it: while MLX computes, Python is free.
    """

    def __init__(self) -> None:
        self.count, self.peak = 0, 0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.peak = max(self.peak, footprint())
            time.sleep(SAMPLED_EVERY)

    def report(self, loss: float, seconds: float) -> None:
        self.count += 1
        memory = {"footprint_peak_bytes": self.peak, "mlx_peak_bytes": mx.get_peak_memory()}
        report("step", step=self.count, loss=loss, seconds=seconds, **memory)


def report_baseline() -> None:
    """What Python, MLX and its BLAS take before anything is loaded."""
    mx.eval(mx.ones((256, 256)) @ mx.ones((256, 256)))
    report("start", baseline_bytes=footprint())


def windows(bundle: Bundle, seq_len: int, seed: int, steps: int) -> Iterator[mx.array]:
    """The windows [T + 1] that the engine trains on, until the patience ends."""
    tokens = bundle.tokens("train")
    count = (len(tokens) - 1) // seq_len
    began = time.monotonic()
    for step in range(steps):
        if time.monotonic() - began > PATIENCE:
            return
        start = reference.step_window(step, seed, count) * seq_len
        mx.reset_peak_memory()
        yield mx.array(tokens[start : start + seq_len + 1].astype(np.int32))
