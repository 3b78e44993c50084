import time
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from mesp import reference
from mesp.bundle.reader import Bundle
from studies.benchmarks.footprint import Peak, footprint, report

# Seconds after which a run begins no further step. mlx-lm as shipped needs minutes for a step on a
# CPU.
PATIENCE = 120.0


class Steps:
    def __init__(self) -> None:
        self.count, self.peak = 0, Peak()

    def report(self, loss: float, seconds: float) -> None:
        self.count += 1
        memory = {"footprint_peak_bytes": self.peak.bytes, "mlx_peak_bytes": mx.get_peak_memory()}
        report("step", step=self.count, loss=loss, seconds=seconds, **memory)


def report_baseline() -> None:
    mx.eval(mx.ones((256, 256)) @ mx.ones((256, 256)))
    report("start", baseline_bytes=footprint())


def windows(bundle: Bundle, seq_len: int, seed: int, steps: int) -> Iterator[mx.array]:
    tokens = bundle.tokens("train")
    count = (len(tokens) - 1) // seq_len
    began = time.monotonic()
    for step in range(steps):
        if time.monotonic() - began > PATIENCE:
            return
        start = reference.step_window(step, seed, count) * seq_len
        mx.reset_peak_memory()
        yield mx.array(tokens[start : start + seq_len + 1].astype(np.int32))
