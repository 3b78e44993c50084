import time
from typing import Any

import numpy as np

from mesp.bundle.reader import Bundle
from studies.benchmarks.footprint import report


def products(bundle: Bundle, settings: dict[str, Any]) -> None:
    """Measures the time of y = x Wᵀ and dx = dy W for the linear layers and the head.

    x [T, in], dy [T, out] and W [out, in] are float32. With `recompute`, the blocks' forward
    products other than the down projections run twice, as in MeSP. The products of LoRA and of
    attention are left out, and dx for the input projections of the first block's mixer.
    """
    arch, rows = bundle.architecture, settings["seq_len"]
    random = np.random.default_rng(settings["seed"])

    def normal(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, np.float32)

    sizes = {"head": (arch.vocab_size, arch.hidden_size)}
    for block in arch.kinds:
        sizes |= block.sizes()
    matrices = {name: normal(out, inp) for name, (out, inp) in sizes.items()}
    inputs = {name: normal(rows, inp) for name, (_, inp) in sizes.items()}
    outputs = {name: np.empty((rows, out), np.float32) for name, (out, _) in sizes.items()}
    gradients = {name: np.empty((rows, inp), np.float32) for name, (_, inp) in sizes.items()}

    forward = [name for block in arch.blocks for name in block.modules] + ["head"]
    downs = {block.mlp.modules[-1][0] for block in arch.kinds}
    again = [name for name in forward[:-1] if name not in downs]
    # Nothing before the first block is trained, so its mixer's input projections need no gradient
    # by x.
    unused = [name for name, _ in arch.blocks[0].mixer.modules[:-1]]
    backward = forward[:]
    for name in unused:
        backward.remove(name)
    if settings["recompute"]:
        forward += again

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    report("start", blas=blas, tflop=2e-12 * rows * sum(
        np.prod(sizes[name], dtype=float) for name in (*forward, *backward)
    ))  # fmt: skip
    for step in range(1, settings["steps"] + 1):
        began = time.perf_counter()
        for name in forward:
            np.matmul(inputs[name], matrices[name].T, out=outputs[name])
        for name in backward:
            np.matmul(outputs[name], matrices[name], out=gradients[name])
        report("step", step=step, seconds=time.perf_counter() - began)
