import math
from collections.abc import Callable

import mlx.core as mx
import mlx.optimizers as optim


def learning_rate(rate: float, schedule: str, steps: int, warmup: int, step: int) -> float:
    start = warmup + 1 if warmup else 0
    if step < start:
        return rate * step / warmup
    progress = (step - start) / max(1, steps - start)
    decays = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }
    return rate * decays[schedule]


def of_mlx(
    rate: float, schedule: str, steps: int, warmup: int
) -> Callable[[mx.array | int], mx.array]:
    start = warmup + 1 if warmup else 0
    decay: Callable = lambda step: mx.array(rate)  # noqa: E731
    if schedule == "linear":
        decay = optim.linear_schedule(rate, 0, max(1, steps - start))
    if schedule == "cosine":
        decay = optim.cosine_decay(rate, max(1, steps - start))
    if not warmup:
        return decay
    return optim.join_schedules([optim.linear_schedule(0, rate, warmup), decay], [start])
