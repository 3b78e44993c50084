"""The messages between the server and its clients: LoRA matrices.

An array joins one module's A, or its B, of all trained blocks. For example,
`self_attn.q_proj.lora_b` has the shape [blocks, rank, out]. A phone needs several requests for each
array, so few arrays save requests.

A client gets the round's arrays and returns the trained arrays. With `freeze_a`, only each B is
sent, because every client makes the same A from the run's seed.

With `bfloat16`, the server sends rounded arrays, and a client returns its rounded change. The
server adds the change to its own float32 arrays.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from mesp.adapters.config import CONFIG
from mesp.adapters.load import WEIGHTS
from mesp.errors import MespError, plain_os_errors
from mesp.models.architecture import Architecture

Arrays = dict[str, np.ndarray]
EXCHANGES = ("float32", "bfloat16")
# The largest number in adapters that are averaged. Sums of a million such numbers or of their
# squares do not overflow in float32.
MOST = 1e6


def read_arrays(folder: Path) -> Arrays:
    """Returns the matrices of an adapter folder, float32 A [blocks, in, rank] and B [blocks, rank,
    out].

    Matrices of experts are A [blocks, experts, rank, in] and B [blocks, experts, out, rank].
    """
    try:
        matrices = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise MespError(f"{folder / WEIGHTS} cannot be read: {error}.") from error
    blocks: dict[str, dict[int, np.ndarray]] = {}
    for name, matrix in matrices.items():
        block, _, module = name.partition(".layers.")[2].partition(".")
        blocks.setdefault(module, {})[int(block)] = matrix
    return {name: np.stack([each[i] for i in sorted(each)]) for name, each in blocks.items()}


def write_arrays(folder: Path, arrays: Arrays, rank: int, scale: float, arch: Architecture) -> None:
    """Writes matrices as a folder of adapters that mesp-engine can start from.

    A module's matrices belong to the last blocks that have the module. Raises MespError if too few
    blocks have the module.
    """
    blocks: dict[str, list[int]] = {}
    for index, block in enumerate(arch.blocks):
        for module in (*block.modules, *block.stacked()):
            blocks.setdefault(module, []).append(index)
    for name, array in arrays.items():
        if len(array) > len(blocks.get(name.rpartition(".")[0], [])):
            raise MespError(f"The model has no {len(array)} blocks with a {name}.")
    config = {"fine_tune_type": "lora", "lora_parameters": {"rank": rank, "scale": scale}}
    matrices = {
        f"{arch.mlx_prefix}.layers.{block}.{name}": matrix
        for name, array in arrays.items()
        for block, matrix in zip(blocks[name.rpartition(".")[0]][-len(array) :], array, strict=True)
    }
    with plain_os_errors(f"Cannot write the adapters to {folder}"):
        folder.mkdir(parents=True)
        (folder / WEIGHTS).write_bytes(save(matrices))  # `save_file` would not raise OSError
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


def select_exchanged(arrays: Arrays, freeze_a: bool) -> Arrays:
    return {name: each for name, each in arrays.items() if not freeze_a or name.endswith("lora_b")}


def to_bfloat16(array: np.ndarray) -> np.ndarray:
    """Rounds finite float32 numbers to bfloat16, to nearest, ties to even. Returns the bits as
    uint16.
    """
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pack(arrays: Arrays) -> Arrays:
    return {name: to_bfloat16(array) for name, array in arrays.items()}


def unpack(arrays: Arrays) -> Arrays:
    return {name: from_bfloat16(array) for name, array in arrays.items()}


def check_arrays(arrays: Arrays, expected: Arrays) -> None:
    """Raises MespError unless names, shapes and dtypes agree, and all numbers are finite and
    between -`MOST` and `MOST`.
    """
    for name in expected.keys() ^ arrays.keys():
        what = "lacks" if name in expected else "has"
        raise MespError(f"it {what} {name}, and so is of another model or other settings")
    for name, array in arrays.items():
        wanted = expected[name]
        if (array.shape, array.dtype) != (wanted.shape, wanted.dtype):
            raise MespError(
                f"its {name} is {array.dtype} {list(array.shape)} and not "
                f"{wanted.dtype} {list(wanted.shape)}"
            )
        numbers = from_bfloat16(array) if array.dtype == np.uint16 else array
        if not np.isfinite(numbers).all():
            raise MespError(f"its {name} has a number that is not finite")
        if (np.abs(numbers) > MOST).any():
            raise MespError(f"its {name} has a number larger than {MOST:g}")


def clip_update(arrays: Arrays, start: Arrays, norm: float) -> Arrays:
    added = {name: array.astype(np.float64) - start[name] for name, array in arrays.items()}
    # In float32, the squares of small numbers would underflow to 0.
    own = math.sqrt(sum(float(np.square(each).sum()) for each in added.values()))
    if own <= norm:
        return arrays
    return {n: (start[n] + norm / own * each).astype(np.float32) for n, each in added.items()}


def drift(clients: list[Arrays], weights: list[float], start: Arrays) -> float:
    """Returns the distance of clients from their mean, relative to the mean's distance from
    `start`:

        √(Σ pᵢ ‖wᵢ - w̄‖²) / ‖w̄ - w‖

    pᵢ are the clients' shares of the `weights`, wᵢ their arrays, w̄ = Σ pᵢ wᵢ their mean, and w the
    arrays of `start`. Returns 0 if w̄ = w.
    """
    apart = moved = 0.0
    for name, before in start.items():
        mean = _mean(clients, weights, name)
        squares = (np.square(each[name] - mean).sum(dtype=np.float64) for each in clients)
        apart += sum(p * square for p, square in zip(_shares(weights), squares, strict=True))
        moved += np.square(mean - before).sum(dtype=np.float64)
    return math.sqrt(apart / moved) if moved else 0.0


def averaging_error(clients: list[Arrays], weights: list[float], start: Arrays) -> float:
    """Returns the error of averaging A and B separately, relative to the change of the products AB:

        ‖Σ pᵢ AᵢBᵢ - ĀB̄‖ / ‖Σ pᵢ AᵢBᵢ - AB‖

    The norms are over all modules. pᵢ are the clients' shares of the `weights`, Ā and B̄ the means,
    and A and B the matrices of `start`. Returns 0 if only B is sent. The products are not computed:
    for U [in, k] and V [k, out], ‖UV‖² = Σ (UᵀU) ∘ (VVᵀ).
    """
    wrong = moved = 0.0
    for name in start:
        if not name.endswith("lora_a"):
            continue
        b = name.removesuffix("a") + "b"
        left = [each[name] for each in clients]
        right = [p * each[b] for p, each in zip(_shares(weights), clients, strict=True)]
        mean = (_mean(clients, weights, name), _mean(clients, weights, b))
        wrong += _squared_norm([*left, mean[0]], [*right, -mean[1]])
        moved += _squared_norm([*left, start[name]], [*right, -start[b]])
    return math.sqrt(max(wrong, 0) / moved) if moved > 0 else 0.0


def _shares(weights: list[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def _mean(clients: list[Arrays], weights: list[float], name: str) -> np.ndarray:
    parts = zip(_shares(weights), clients, strict=True)
    products = (p * each[name].astype(np.float64) for p, each in parts)
    return sum(products, start=np.zeros(()))


def _squared_norm(left: list[np.ndarray], right: list[np.ndarray]) -> float:
    if left[0].ndim == 4:  # experts' matrices are stored as Aᵀ and Bᵀ
        left, right = [each.mT for each in left], [each.mT for each in right]
    u = np.concatenate(left, axis=-1).astype(np.float64)
    v = np.concatenate(right, axis=-2).astype(np.float64)
    return float(((u.mT @ u) * (v @ v.mT)).sum())
