"""Computes with `mesp.reference` what the Swift tests compare the trainer with.

    python tests/make_fixtures.py BUNDLE OUT_DIR --seq-len T --rank R

`gradients.safetensors`: one backward pass, T tokens, L blocks, P LoRA parameters a block.

    tokens      int32 [T + 1]       window 0 of the bundle's train data
    lora.N      [P]                 block N's LoRA parameters: A as at the start, B random too
    loss        [1]
    x.N         [1, T, hidden]      block N's input
    y, dy       [1, T, hidden]      the last block's output, and the loss's gradient by it
    attn_in, q, k, v, attn_out, x_mid, gate, up     block 0's intermediates,
    o_out, mlp_out                                  and these where there are post norms
    dx.N        [1, T, hidden]      the loss's gradient by block N's input
    grad.N      [P]                 the loss's gradient by block N's LoRA parameters

`losses.safetensors`: the losses of training from the initial LoRA parameters with SGD, each step's
before its update: `mesp` and `mebp` [steps], `mezo` [mezo steps].

All arrays but the tokens are float32. Both files' metadata hold the settings.
"""

import argparse
from pathlib import Path

import mlx.core as mx

from mesp import reference
from mesp.bundle.reader import Bundle


def random_lora(model: reference.Model, rank: int, seed: int) -> list[mx.array]:
    """Flat LoRA vectors with A as at the start and B normal, so that no gradient is zero."""
    lora = []
    block_keys = mx.random.split(mx.random.key(seed + 1), model.arch.num_hidden_layers)
    for flat, key in zip(reference.init_lora(model.arch, rank, seed), block_keys, strict=True):
        matrices = reference.unpack_lora(flat, model.arch, rank)
        keys = mx.random.split(key, len(matrices))
        for (name, (A, B)), b_key in zip(matrices.items(), keys, strict=True):
            matrices[name] = (A, 0.02 * mx.random.normal(B.shape, key=b_key))
        lora.append(reference.pack_lora(matrices, model.arch))
    return lora


def gradient_arrays(
    model: reference.Model, window: mx.array, lora: list[mx.array], scale: float
) -> dict[str, mx.array]:
    """The contents of gradients.safetensors."""
    g = reference.gradients(model, lora, window, scale)
    *x, y = g.x
    *dx, dy = g.dx
    first = (lora[0], scale, model.blocks[0], model.arch, model.arch.kind(0))
    _, *intermediates = reference.block_forward(x[0], *first)
    names = reference.INTERMEDIATES + (reference.POST_NORMED if model.arch.post_norms else ())
    arrays = {"tokens": window.astype(mx.int32), "loss": g.loss[None], "y": y, "dy": dy}
    arrays |= dict(zip(names, intermediates, strict=True))
    for name, blocks in {"lora": lora, "x": x, "dx": dx, "grad": g.lora}.items():
        arrays |= {f"{name}.{i}": array for i, array in enumerate(blocks)}
    return arrays


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
    metadata = {"model": bundle.manifest["name"]} | {k: str(v) for k, v in numbers.items()}
    settings.out.mkdir(parents=True, exist_ok=True)

    lora = random_lora(model, settings.rank, settings.seed)
    arrays = gradient_arrays(model, tokens[: settings.seq_len + 1], lora, scale)
    mx.save_safetensors(str(settings.out / "gradients.safetensors"), arrays, metadata)

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
