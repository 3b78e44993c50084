"""Computes with `mesp.reference` what the Swift tests compare the trainer with.

    python tests/make_fixtures.py BUNDLE OUT_DIR --seq-len T --rank R

`gradients.safetensors`: one backward pass, T tokens, L blocks, P LoRA parameters a block.

    tokens      int32 [T + 1]       window 0 of the bundle's train data
    lora.N      [P]                 block N's LoRA parameters: A as at the start, B random too
    loss        [1]
    x.N         [1, T, hidden]      block N's input
    y, dy       [1, T, hidden]      the last block's output, and the loss's gradient by it
    mixer_in.N, m1.N, m2.N, m3.N, mixed.N,      intermediates of block N, the first of each kind
    x_mid.N, gate.N, up.N
    mixer_out.N, mlp_out.N                          and these where there are post norms
    dx.N        [1, T, hidden]      the loss's gradient by block N's input
    grad.N      [P]                 the loss's gradient by block N's LoRA parameters
    moments     [P]                 numbers to quantize, some of them between two of the map
    signed, unsigned                those, or their absolute values, in 8 bits: codes, uint8 [P],
    signed_scales, unsigned_scales      and scales
    answers     int32 [2, T + 1]    a chosen and a rejected answer, each with a prompt of its own,
    prompts, lengths    int32 [2]   padded; how many tokens are prompt, and how many there are
    O.loss, O.grad.N                of each objective O on these, with its defaults: loss and
                                    gradient; of kto as a batch of a good and a bad one
    floor.N, floor_loss             of a bfloat16 bundle: grad.N and loss where only what is stored
                                    (block inputs, intermediates, the gradients between blocks) is
                                    rounded to bfloat16, and all arithmetic is float32

`losses.safetensors`: the losses of training from the initial LoRA parameters with SGD, each step's
before its update: `mesp` and `mebp` [steps], `mezo` [mezo steps]. Not written for 0 steps.

The answers and what follows are not written for 0 steps. All arrays but the tokens and the codes
are float32. Both files' metadata hold the settings, and what mesp-train takes where none is given:
an optimizer by method, a learning rate by method and optimizer.
"""

import argparse
import itertools
from pathlib import Path

import mlx.core as mx

from mesp import reference
from mesp.bundle.reader import Bundle
from mesp.engine.settings import (
    OPTIMIZERS,
    default_learning_rate,
    default_optimizer,
)


def random_lora(model: reference.Model, rank: int, seed: int) -> list[mx.array]:
    """Flat LoRA vectors with A as at the start and B normal, so that no gradient is zero."""
    lora = []
    block_keys = mx.random.split(mx.random.key(seed + 1), model.arch.num_hidden_layers)
    vectors = reference.init_lora(model.arch, rank, seed)
    for flat, block, key in zip(vectors, model.arch.blocks, block_keys, strict=True):
        matrices = reference.unpack_lora(flat, block)
        keys = mx.random.split(key, len(matrices))
        for (name, (A, B)), b_key in zip(matrices.items(), keys, strict=True):
            matrices[name] = (A, 0.02 * mx.random.normal(B.shape, key=b_key))
        lora.append(reference.pack_lora(matrices, block))
    return lora


def gradient_arrays(
    model: reference.Model, window: mx.array, lora: list[mx.array], scale: float
) -> dict[str, mx.array]:
    """The contents of gradients.safetensors."""
    g = reference.gradients(model, lora, window, scale)
    *x, y = g.x
    *dx, dy = g.dx
    names = reference.INTERMEDIATES + (reference.POST_NORMED if model.arch.post_norms else ())
    arrays = {"tokens": window.astype(mx.int32), "loss": g.loss[None], "y": y, "dy": dy}
    for i in map(model.arch.layers.index, range(len(model.arch.mixers))):
        block = (lora[i], scale, model.blocks[i], model.arch.blocks[i])
        _, *intermediates = reference.block_forward(x[i], *block)
        named = zip(names, intermediates, strict=True)
        arrays |= {f"{name}.{i}": array for name, array in named}
    arrays |= moment_arrays(g.lora[0])
    for name, blocks in {"lora": lora, "x": x, "dx": dx, "grad": g.lora}.items():
        arrays |= {f"{name}.{i}": array for i, array in enumerate(blocks)}
    return arrays


def moment_arrays(gradient: mx.array) -> dict[str, mx.array]:
    """Of a gradient's size: a block of each map's middles, one of zeros, and the gradient's."""
    maps = [reference.dynamic_map(signed) for signed in (True, False)]
    middles = [
        mx.concatenate([(numbers[:-1] + numbers[1:]) / 2, mx.array([1.0])]) for numbers in maps
    ]
    moments = mx.concatenate([*middles, mx.zeros(256), gradient])[: gradient.size]
    arrays = {"moments": moments}
    for name, numbers in {"signed": moments, "unsigned": mx.abs(moments)}.items():
        codes, scales = reference.quantize(numbers, signed=name == "signed")
        arrays |= {name: codes, f"{name}_scales": scales}
    return arrays


def preference_arrays(
    model: reference.Model,
    tokens: mx.array,
    lora: list[mx.array],
    seq_len: int,
    rank: int,
    scale: float,
) -> dict[str, mx.array]:
    """A pair of answers, and what each objective makes of it with π₀ as training begins."""
    lengths, prompts = [seq_len + 1, seq_len // 2 + 2], [seq_len // 2, 2]
    windows = [tokens[: lengths[0]], tokens[seq_len : seq_len + lengths[1]]]
    start = reference.init_lora(model.arch, rank, 0)

    def counted(window: mx.array, prompt: int) -> mx.array:
        return (mx.arange(1, window.size) >= prompt).astype(mx.float32)

    def answer(window: mx.array, prompt: int) -> reference.Answer:
        mask = counted(window, prompt)
        logp, of_start = (
            -reference.loss(model, each, window, scale, mask).item() for each in (lora, start)
        )
        return reference.Answer(logp, of_start, window.size - prompt)

    def gradient(window: mx.array, weights: mx.array) -> list[mx.array]:
        return reference.gradients(model, lora, window, scale, weights=weights).lora

    pair = list(zip(windows, prompts, strict=True))
    chosen, rejected = (answer(*each) for each in pair)
    of_chosen, of_rejected = (gradient(each[0], counted(*each)) for each in pair)
    of_all = gradient(windows[0], mx.full(seq_len, 1 / seq_len))
    padded = [mx.pad(each, (0, seq_len + 1 - each.size)) for each in windows]
    arrays = {"answers": mx.stack(padded).astype(mx.int32)}
    arrays |= {"prompts": mx.array(prompts), "lengths": mx.array(lengths)}

    def add(name: str, loss: float, weights: list[float], supervised: float = 0.0) -> None:
        arrays[f"{name}.loss"] = mx.array([loss])
        for block, parts in enumerate(zip(of_chosen, of_rejected, of_all, strict=True)):
            w, r, every = parts
            total = weights[0] * w + weights[1] * r + supervised * every
            arrays[f"{name}.grad.{block}"] = total

    for name in ("dpo", "ipo", "simpo", "orpo"):
        more = (0.5,) if name == "simpo" else ()
        loss, *weights = getattr(reference, name)(chosen, rejected, 0.1, *more)
        if name == "orpo":
            loss += reference.loss(model, lora, windows[0], scale).item()
        add(name, loss, weights, supervised=float(name == "orpo"))
    mismatched = [
        answer(mx.concatenate([windows[i][: prompts[i]], windows[j][prompts[j] :]])[: seq_len + 1],
               prompts[i])
        for i, j in ((0, 1), (1, 0))
    ]  # fmt: skip
    add("kto", *reference.kto([chosen, rejected], [True, False], mismatched, 0.1))
    return arrays


def to_bfloat16(x: mx.array) -> mx.array:
    """x rounded to the nearest bfloat16, float32."""
    return x.astype(mx.bfloat16).astype(mx.float32)


def floor_arrays(
    model: reference.Model, window: mx.array, lora: list[mx.array], scale: float
) -> dict[str, mx.array]:
    """`reference.gradients` where only what is stored is rounded: no step that stores bfloat16 is

    more exact, but by chance.
    """
    arch, targets = model.arch, window[1:]
    blocks = [(lora[i], scale, model.blocks[i], arch.blocks[i]) for i in range(len(lora))]
    embeddings = reference.forward(model, lora, window[:-1], scale)[0]
    x, forward = to_bfloat16(embeddings), []
    for block in blocks:
        y, *intermediates = reference.block_forward(x, *block, stored=to_bfloat16)
        forward.append((x, intermediates))
        x = y
    floor = {"floor_loss": reference.cross_entropy(x, targets, model.head, arch)[None]}
    d = reference.cross_entropy_backward(x, targets, model.head, arch)
    for i in reversed(range(len(blocks))):
        d, floor[f"floor.{i}"] = reference.block_backward(*forward[i], to_bfloat16(d), *blocks[i])
    return floor


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=0.03)
    parser.add_argument("--mezo-steps", type=int, default=10)
    parser.add_argument("--mezo-learning-rate", type=float, default=1e-3)
    parser.add_argument("--mezo-epsilon", type=float, default=1e-3)
    settings = parser.parse_args(arguments)

    bundle = Bundle(settings.bundle)
    model, tokens = reference.Model.of(bundle), mx.array(bundle.tokens("train"))
    scale = settings.alpha / settings.rank
    numbers = {k: v for k, v in vars(settings).items() if not isinstance(v, Path)}
    metadata = {"model": bundle.manifest.name} | {k: str(v) for k, v in numbers.items()}
    for method, optimizer in itertools.product(("mesp", "mebp", "mezo"), OPTIMIZERS):
        rate = default_learning_rate(method, optimizer, model.arch.hidden_size)
        metadata |= {f"default {method} {optimizer}": str(rate)}
        rate = default_learning_rate(method, optimizer, model.arch.hidden_size, "dpo")
        metadata |= {f"default {method} {optimizer} dpo": str(rate)}
        metadata |= {f"default {method}": default_optimizer(method)}
    settings.out.mkdir(parents=True, exist_ok=True)

    lora = random_lora(model, settings.rank, settings.seed)
    arrays = gradient_arrays(model, tokens[: settings.seq_len + 1], lora, scale)
    if bundle.manifest.dtype == "bfloat16":
        arrays |= floor_arrays(model, tokens[: settings.seq_len + 1], lora, scale)
    if settings.steps:
        sizes = (settings.seq_len, settings.rank, scale)
        arrays |= preference_arrays(model, tokens, lora, *sizes)
    mx.save_safetensors(str(settings.out / "gradients.safetensors"), arrays, metadata)
    if not settings.steps:
        return

    losses = {}
    for method in ("mesp", "mebp", "mezo"):
        zeroth_order = method == "mezo"
        losses[method] = mx.array(
            reference.train(
                model,
                reference.init_lora(model.arch, settings.rank, settings.seed),
                tokens,
                method,
                settings.mezo_steps if zeroth_order else settings.steps,
                seq_len=settings.seq_len,
                scale=scale,
                learning_rate=(
                    settings.mezo_learning_rate if zeroth_order else settings.learning_rate
                ),
                seed=settings.seed,
                epsilon=settings.mezo_epsilon,
            )
        )
    mx.save_safetensors(str(settings.out / "losses.safetensors"), losses, metadata)


if __name__ == "__main__":
    main()
