import time
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx

from mesp import reference
from mesp.bundle.reader import Bundle
from studies.benchmarks.footprint import report


def h(bundle: Bundle, settings: dict[str, Any]) -> None:
    arch, weights = bundle.architecture, bundle.block(0)
    described = arch.blocks[0]
    lora = mx.random.normal((described.lora_size(settings["rank"]),)) * 0.01
    x, dy = mx.random.normal((2, 1, settings["seq_len"], arch.hidden_size))
    sizes = {size for _, size in described.sizes().values()}
    inputs = {size: mx.random.normal((settings["seq_len"], size)) for size in sizes}
    mx.eval(weights, lora, x, dy, inputs)

    def recompute_h() -> list[mx.array]:
        matrices = reference.unpack_lora(lora, described)
        return [inputs[a.shape[0]] @ a for a, _ in matrices.values()]

    def gradient() -> tuple[mx.array, mx.array]:
        block = (lora, settings["scale"], weights, described)
        return reference.mesp_block_gradient(x, dy, *block)[:2]

    h_bytes = sum(array.nbytes for array in recompute_h())
    h_seconds, gradient_seconds = (
        measured(compute, settings["steps"]) for compute in (recompute_h, gradient)
    )
    report(
        "event",
        steps=settings["steps"],
        h_bytes_of_block=h_bytes,
        h_bytes=h_bytes * arch.num_hidden_layers,
        h_seconds_of_block=h_seconds,
        gradient_seconds_of_block=gradient_seconds,
        share_of_time=h_seconds / gradient_seconds,
    )


def measured(compute: Callable[[], Any], times: int) -> float:
    seconds = []
    for _ in range(times + 1):
        began = time.perf_counter()
        mx.eval(compute())
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])
