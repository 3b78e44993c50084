from typing import Any

import mlx.core as mx
import numpy as np

from mesp import reference
from mesp.bundle.reader import Bundle
from studies.benchmarks.footprint import report
from studies.benchmarks.in_python.steps import windows

# Number of exact steps before the comparison. They make B nonzero: while B = 0, A's gradient is
# zero.
WARM_UP_STEPS = 3
WARM_UP_LEARNING_RATE = 0.1
QUALITIES = ("cosine", "sign_agreement", "relative_error")


def mezo_quality(bundle: Bundle, settings: dict[str, Any]) -> None:
    model, seed = reference.Model.of(bundle), settings["seed"]
    scale, epsilon = settings["scale"], settings["mezo_epsilon"]
    lora = reference.init_lora(bundle.architecture, settings["rank"], seed)
    *training, window = windows(bundle, settings["seq_len"], seed, WARM_UP_STEPS + 1)
    for each in training:
        reference.mesp_step(model, lora, each, scale, WARM_UP_LEARNING_RATE)
    exact = reference.gradients(model, lora, window, scale).lora
    mx.eval(exact)

    def loss_at(move: float, z: list[mx.array]) -> float:
        moved = [w + move * noise for w, noise in zip(lora, z, strict=True)]
        return reference.loss(model, moved, window, scale).item()

    draws = []
    for draw in range(settings["steps"]):
        z = reference.mezo_noise(lora, seed, draw)
        slope = (loss_at(epsilon, z) - loss_at(-epsilon, z)) / (2 * epsilon)
        draws.append([quality(slope * n, g) for n, g in zip(z, exact, strict=True)])
    for layer, of_layer in enumerate(zip(*draws, strict=True)):
        means = zip(QUALITIES, np.mean(of_layer, axis=0).tolist(), strict=True)
        how = {"draws": len(draws), "mezo_epsilon": epsilon}
        report("event", **how, layer=layer, **dict(means))


def quality(estimate: mx.array, exact: mx.array) -> tuple[float, float, float]:
    """Returns the cosine, the share of equal signs, and ‖estimate - exact‖₂ / ‖exact‖₂."""
    norm = mx.linalg.norm
    cosine = (estimate * exact).sum() / (norm(estimate) * norm(exact))
    signs = mx.mean(mx.sign(estimate) == mx.sign(exact))
    return cosine.item(), signs.item(), (norm(estimate - exact) / norm(exact)).item()
