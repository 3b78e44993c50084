from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mesp.reference.attention import Shared
from mesp.reference.block import block_backward, block_forward, shared_keys_and_values
from mesp.reference.dropout import Dropout
from mesp.reference.head import cross_entropy, cross_entropy_backward
from mesp.reference.model import Model, dequantize
from mesp.reference.per_layer import layer_input
from mesp.reference.pieces import scattered

Images = tuple[mx.array, mx.array]  # rows [R, hidden], and places [T]: 0, or 1 + a token's row


def embed(model: Model, tokens: mx.array, images: Images | None = None) -> mx.array:
    """Returns the first block's input [1, T, hidden]. tokens [T] are int."""
    packed = {name: array[tokens] for name, array in model.embedding.items() if name != "norm"}
    x = model.arch.embedding_scale * dequantize(packed, "", model.arch.hidden_size)
    if images:
        rows, places = images
        own = rows.astype(x.dtype)[mx.maximum(places, 1) - 1]
        x = mx.where((places > 0)[:, None], own, x)
    return x[None]


def forward(
    model: Model,
    lora: list[mx.array],
    tokens: mx.array,
    scale: float,
    starts: Sequence[int] = (0,),
    dropout: Dropout | None = None,
    images: Images | None = None,
) -> tuple[list[mx.array], dict[int, Shared]]:
    """Returns each block's input and the last block's output, [1, T, hidden] each, and the keys and
    values that several blocks use. tokens [T] are int.

    `starts` are the first positions of the records of a packed sequence. `dropout` is for training
    only.
    """
    hidden, shared = [embed(model, tokens, images)], {}
    for i, block in enumerate(model.arch.blocks):
        weights = model.blocks[i]
        y, *intermediates = block_forward(
            *(hidden[-1], lora[i], scale, weights, block),
            starts=starts,
            per_layer=layer_input(model, tokens, hidden[0], i),
            shared=shared.get(block.keys_of),
            masks=dropout and dropout.masks(i, block, tokens.size),
        )
        if i in model.arch.owners:
            shared[i] = shared_keys_and_values(intermediates, lora[i], weights, block, starts)
        hidden.append(y)
    return hidden, shared


def loss(
    model: Model,
    lora: list[mx.array],
    window: mx.array,
    scale: float,
    weights: mx.array | None = None,
    starts: Sequence[int] = (0,),
    dropout: Dropout | None = None,
) -> mx.array:
    """Returns the cross-entropy [] of a window of T + 1 tokens: T inputs, and T targets shifted by
    one.
    """
    x, _ = forward(model, lora, window[:-1], scale, starts, dropout)
    return cross_entropy(x[-1], window[1:], model.head, model.arch, weights)


# The arguments are those of `mesp_block_gradient`.
BlockGradient = Callable[..., tuple[mx.array, mx.array, Shared | None]]


def mesp_block_gradient(
    x: mx.array,
    dy: mx.array,
    *block: Any,
    shared: Shared | None = None,
    d_shared: Shared | None = None,
    **given: Any,
) -> tuple[mx.array, mx.array, Shared | None]:
    """Returns a block's dx, flat LoRA gradient and gradient of `shared`, by hand-derived formulas
    (MeSP).

    The intermediates are recomputed. `block` are the LoRA parameters, the scale, the weights and
    the block; `given` are `starts`, `per_layer` and `masks`, as in `block_forward`.
    """
    _, *intermediates = block_forward(x, *block, shared=shared, **given)
    return block_backward(x, intermediates, dy, *block, d_shared=d_shared, **given)


def mebp_block_gradient(
    x: mx.array,
    dy: mx.array,
    lora: mx.array,
    *block: Any,
    shared: Shared | None = None,
    d_shared: Shared | None = None,
    **given: Any,
) -> tuple[mx.array, mx.array, Shared | None]:
    """Returns the same gradients as `mesp_block_gradient`, by automatic differentiation (MeBP)."""

    def outputs(x: mx.array, lora: mx.array, *shared: mx.array) -> list[mx.array]:
        y, *intermediates = block_forward(x, lora, *block, shared=shared, **given)
        if not d_shared:
            return [y]
        _, weights, described = block
        starts = given.get("starts", (0,))
        return [y, *shared_keys_and_values(intermediates, lora, weights, described, starts)]

    inputs, gradients = [x, lora, *(shared or ())], [dy, *(d_shared or ())]
    _, (dx, d_lora, *by_shared) = mx.vjp(outputs, inputs, gradients)
    return dx, d_lora, tuple(by_shared) or None


BLOCK_GRADIENTS = {"mesp": mesp_block_gradient, "mebp": mebp_block_gradient}


class Gradients(NamedTuple):
    loss: mx.array  # []
    x: list[mx.array]  # each block's input and the last block's output, [1, T, hidden]
    dx: list[mx.array]
    lora: list[mx.array]


def gradients(
    model: Model,
    lora: list[mx.array],
    window: mx.array,
    scale: float,
    block_gradient: BlockGradient = mesp_block_gradient,
    weights: mx.array | None = None,
    starts: Sequence[int] = (0,),
    dropout: Dropout | None = None,
) -> Gradients:
    """Returns the loss and gradients of a window [T + 1] int.

    `weights` are as in `cross_entropy`, `starts` and `dropout` as in `forward`. Of the forward
    pass, only each block's input, the last block's output, and the keys and values that several
    blocks use are kept.
    """
    arch, tokens, targets = model.arch, window[:-1], window[1:]
    x, shared = forward(model, lora, tokens, scale, starts, dropout)
    window_loss = cross_entropy(x[-1], targets, model.head, arch, weights)
    dx = [cross_entropy_backward(x[-1], targets, model.head, arch, weights)]
    d_lora: list[mx.array] = []
    sums: dict[int, Shared] = {}
    for i in reversed(range(len(lora))):
        block, owner = arch.blocks[i], arch.blocks[i].keys_of
        d_input, d_block, by_shared = block_gradient(
            *(x[i], dx[0], lora[i], scale, model.blocks[i], block),
            shared=shared.get(owner),
            d_shared=sums.get(i),
            starts=starts,
            per_layer=layer_input(model, tokens, x[0], i),
            masks=dropout and dropout.masks(i, block, tokens.size),
        )
        if by_shared:
            dk, dv = sums.get(owner, (0, 0))
            sums[owner] = dk + by_shared[0], dv + by_shared[1]
        dx.insert(0, d_input)
        d_lora.insert(0, d_block)
    return Gradients(window_loss, x, dx, d_lora)


def mesp_step(
    model: Model,
    lora: list[mx.array],
    window: mx.array,
    scale: float,
    learning_rate: float,
    dropout: Dropout | None = None,
    block_gradient: BlockGradient = mesp_block_gradient,
) -> float:
    """Takes one step with SGD, which updates `lora` in place, and returns the loss before it."""
    g = gradients(model, lora, window, scale, block_gradient, dropout=dropout)
    for i, d_lora in enumerate(g.lora):
        lora[i] = lora[i] - learning_rate * d_lora
    mx.eval(g.loss, lora)
    return g.loss.item()


def mezo_noise(lora: list[mx.array], seed: int, step: int) -> list[mx.array]:
    """Returns z, a flat standard normal vector for each block."""
    keys = mx.random.split(mx.random.key((scattered(seed) + step) % 2**64), len(lora))
    return [mx.random.normal(w.shape, key=key) for w, key in zip(lora, keys, strict=True)]


def mezo_step(
    model: Model,
    lora: list[mx.array],
    window: mx.array,
    scale: float,
    learning_rate: float,
    *,
    seed: int,
    step: int,
    epsilon: float = 1e-3,
) -> float:
    """Takes one MeZO step with SGD, which updates `lora` in place.

        ℒ± = ℒ(lora ± ε z)        g = (ℒ₊ - ℒ₋) / 2ε ≈ z · ∇ℒ        lora -= lr g z

    Returns (ℒ₊ + ℒ₋) / 2, which equals the loss up to O(ε²).
    """
    z = mezo_noise(lora, seed, step)

    def loss_at(move: float) -> float:
        moved = [w + move * noise for w, noise in zip(lora, z, strict=True)]
        return loss(model, moved, window, scale).item()

    loss_plus, loss_minus = loss_at(epsilon), loss_at(-epsilon)
    g = (loss_plus - loss_minus) / (2 * epsilon)
    for i, noise in enumerate(z):
        lora[i] = lora[i] - learning_rate * g * noise
    mx.eval(lora)
    return (loss_plus + loss_minus) / 2


def draw_blocks(trained: Sequence[int], share: float, seed: int, step: int) -> Sequence[int]:
    """Returns the blocks that `step` (from 0) updates, of those that are trained.

    `share` cuts the blocks into groups of neighbours of about the same size. Each group has a turn
    in every round, in an order drawn from the seed.
    """
    most = max(1, math.floor(share * len(trained) + 0.5))
    groups = -(-len(trained) // most)
    start = step // groups * groups
    order = sorted(
        range(groups), key=lambda group: scattered((scattered(seed) + start + group) % 2**64)
    )
    group = order[step - start]
    return trained[group * len(trained) // groups : (group + 1) * len(trained) // groups]


def step_window(step: int, seed: int, windows: int) -> int:
    """Returns the index of the window that `step` (from 0) trains on.

    Each window is visited once per epoch. Successive steps are a stride apart: the smallest integer
    ≥ 0.618 · windows that is coprime to windows.
    """
    stride = -(-618 * windows // 1000) if windows > 1 else 1
    while math.gcd(stride, windows) != 1:
        stride += 1
    return (step * stride + seed) % windows


def step_example(
    step: int, seed: int, examples: Sequence[Sequence[int]], mask: Sequence[int], seq_len: int
) -> tuple[int, int]:
    """Returns the example (start, length) that `step` (from 0) trains on.

    Examples without targets are skipped. `mask` has an entry for each token of the stream: 0 if the
    token is not a target.
    """
    cut = [(start, min(length, seq_len + 1)) for start, length in examples]
    usable = [(start, length) for start, length in cut if any(mask[start + 1 : start + length])]
    return usable[step_window(step, seed, len(usable))]


OPEN = 16  # the number of sequences that may take another record


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Packs records of these `lengths` in tokens into sequences of `seq_len` inputs.

    Returns the indices of the records in each sequence. A record goes into the first of the last
    `OPEN` sequences that has room for it, or else begins a new sequence.
    """
    sequences: list[list[int]] = []
    room: list[int] = []
    for record, length in enumerate(lengths):
        first = max(0, len(sequences) - OPEN)
        into = next((i for i in range(first, len(room)) if length <= room[i]), None)
        if into is None:
            into = len(sequences)
            sequences.append([])
            room.append(seq_len + 1)
        sequences[into].append(record)
        room[into] -= length
    return sequences


def train(
    model: Model,
    lora: list[mx.array],
    tokens: mx.array,
    method: str,
    steps: int,
    *,
    seq_len: int,
    scale: float,
    learning_rate: float,
    seed: int = 0,
    epsilon: float = 1e-3,
    dropout: float = 0.0,
) -> list[float]:
    """Trains `lora` in place on the stream `tokens` [N] int, and returns the loss of each step."""
    windows = (tokens.size - 1) // seq_len
    losses = []
    for step in range(steps):
        start = step_window(step, seed, windows) * seq_len
        window = tokens[start : start + seq_len + 1]
        settings = (model, lora, window, scale, learning_rate)
        if method == "mezo":
            losses.append(mezo_step(*settings, seed=seed, step=step, epsilon=epsilon))
        else:
            of_step = Dropout(dropout, seed, step) if dropout else None
            losses.append(mesp_step(*settings, of_step, BLOCK_GRADIENTS[method]))
    return losses
