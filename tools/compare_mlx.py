"""Compares this environment's MLX with another one, bit by bit.

\b
  pip install --target DIR 'mlx[cpu]==0.31.1' scipy-openblas32
  python tools/compare_mlx.py DIR BUNDLE... [--steps 20]

Each computes the operations that block functions and the trainer use, the random numbers that they
draw, and the block functions of the bundles, of which each MLX reads the files in its own layout.
With --steps each trains the first bundle by an engine that is built against it, which takes some
minutes. Ends with exit code 1 where something differs that --known does not name.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import click
import mlx.core as mx

from mesp.bundle.reader import Bundle
from mesp.commands.command import Command, several
from mesp.engine.build import build_engine
from mesp.errors import MespError
from mesp.models.layout import DTYPES

ROOT = Path(__file__).resolve().parents[1]
Arrays = dict[str, mx.array]

UNARY = (
    "abs", "arctan", "ceil", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "negative",
    "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "tanh",
)  # fmt: skip
BINARY = (
    "add", "divide", "logaddexp", "maximum", "minimum", "multiply", "power", "subtract", "greater",
    "less_equal",
)  # fmt: skip
REDUCTIONS = (
    "sum",
    "mean",
    "max",
    "min",
    "prod",
    "var",
    "logsumexp",
    "softmax",
    "cumsum",
    "argmax",
)


def operations() -> Iterator[tuple[str, Callable[[], mx.array]]]:
    """The name of each operation, and what computes it of the same numbers."""
    mx.random.seed(0)
    x, y = mx.random.normal((2, 8, 24, 64)), mx.random.normal((2, 8, 24, 64))
    positive, w = mx.abs(x) + 0.1, mx.random.normal((64,))
    for name in UNARY:
        of = positive if name in ("log", "log1p", "rsqrt", "sqrt", "reciprocal") else x
        yield name, lambda name=name, of=of: getattr(mx, name)(of)
    for name in BINARY:
        yield name, lambda name=name: getattr(mx, name)(positive, y)
    for name, axis in itertools.product(REDUCTIONS, (-1, 1)):
        yield f"{name} of axis {axis}", lambda name=name, axis=axis: getattr(mx, name)(x, axis=axis)
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        a, b = x.astype(dtype), y.astype(dtype)
        yield f"matmul {dtype}", lambda a=a, b=b: a @ b.swapaxes(-1, -2)
        yield (
            f"rms_norm {dtype}",
            lambda a=a, dtype=dtype: mx.fast.rms_norm(a, w.astype(dtype), 1e-6),
        )
        for mask, heads in itertools.product((None, "causal"), (8, 2)):
            yield (
                f"attention {dtype} {mask} {heads}",
                lambda a=a, b=b, mask=mask, heads=heads: mx.fast.scaled_dot_product_attention(
                    a, b[:, :heads], a[:, :heads], scale=0.125, mask=mask
                ),
            )
        for dims, traditional, offset in itertools.product((64, 32), (False, True), (0, 7)):
            yield (
                f"rope {dtype} {dims} {traditional} {offset}",
                (
                    lambda a=a, dims=dims, traditional=traditional, offset=offset: mx.fast.rope(
                        a, dims, traditional=traditional, base=1e4, scale=1.0, offset=offset
                    )
                ),
            )
    matrix = mx.random.normal((96, 256))
    for bits, group_size in itertools.product((2, 3, 4, 5, 6, 8), (32, 64, 128)):
        packed = mx.quantize(matrix, group_size, bits)
        said = {"group_size": group_size, "bits": bits}
        for i, part in enumerate(("codes", "scales", "biases")):
            yield f"quantize {bits} {group_size} {part}", lambda packed=packed, i=i: packed[i]
        yield (
            f"dequantize {bits} {group_size}",
            lambda packed=packed, said=said: mx.dequantize(*packed, **said),
        )
    codes = mx.random.randint(0, 1 << 31, (96, 64)).astype(mx.uint32)
    for mode, (bits, group_size) in {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}.items():
        width = 64 * 32 // bits // group_size
        scales = mx.random.randint(90, 120, (96, width)).astype(mx.uint8)
        # NaN, 0x7F, has had a value of its own in one of them.
        yield (
            f"dequantize {mode}",
            lambda mode=mode, scales=scales, bits=bits: mx.dequantize(
                codes & 0x3F3F3F3F if bits == 8 else codes, scales, mode=mode
            ),
        )
        for i, part in enumerate(("codes", "scales")):
            yield (
                f"quantize {mode} {part}",
                lambda mode=mode, i=i: mx.quantize(matrix, mode=mode)[i],
            )
    key = mx.random.key(3)
    draw = mx.random
    yield "random normal", lambda: draw.normal((1000,), key=key)
    yield "random uniform", lambda: draw.uniform(shape=(1000,), key=key)
    yield "random bernoulli", lambda: draw.bernoulli(0.3, (1000,), key=key)
    yield "random truncated normal", lambda: draw.truncated_normal(-1.0, 1.0, (1000,), key=key)
    yield "random permutation", lambda: draw.permutation(1000, key=key)
    yield "random categorical", lambda: draw.categorical(x[0, 0], key=key)


def functions(bundles: tuple[Path, ...]) -> Arrays:
    """The outputs of each bundle's block functions for random inputs."""
    results: Arrays = {}
    for path in bundles:
        bundle = Bundle(path)
        architecture, manifest = bundle.architecture, bundle.manifest
        for index in range(len(architecture.blocks)):
            for length in map(int, bundle.group(index).functions):
                mx.random.seed(index)
                x = mx.random.normal((1, length, architecture.hidden_size))
                lora = mx.random.normal((architecture.blocks[index].lora_size(manifest.ranks[0]),))
                x, words = x.astype(DTYPES[manifest.dtype]), bundle.block_words(index)
                given = map(mx.random.normal, architecture.blocks[index].given_shapes(length))
                inputs = [
                    0.1 * lora,
                    mx.array(2.0),
                    words,
                    *(each.astype(x.dtype) for each in given),
                ]
                outputs = bundle.function(length, index)(x, *inputs)
                for i, output in enumerate(outputs):
                    results[f"{path.name} block {index} of {length} tokens, output {i}"] = output
    return results


def train(bundle: Path, steps: int, scratch: Path) -> Arrays:
    """The losses of this many steps and the adapters, by an engine built against this MLX."""
    engine = build_engine(ROOT, scratch / "build")
    out = scratch / "run"
    command = [sys.executable, "-m", "mesp", "train", bundle, "--steps", steps, "--out", out]
    done = subprocess.run(
        [*map(str, command), "--optimizer", "adamw"], env=os.environ | {"MESP_ENGINE": str(engine)},
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise MespError(f"The engine did not train: {done.stderr.strip()}")
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if record["type"] == "step"]
    adapters = mx.load(str(out / "adapters" / "adapters.safetensors"))
    return {"losses": mx.array(losses), **{f"adapters {name}": a for name, a in adapters.items()}}


def write(file: Path, bundles: tuple[Path, ...], steps: int, scratch: Path) -> None:
    """The results of this process's MLX, as safetensors."""
    results = {name: operation() for name, operation in operations()} | functions(bundles)
    results |= train(bundles[0], steps, scratch) if steps else {}
    mx.save_safetensors(str(file), {name: mx.contiguous(a) for name, a in results.items()})


def computed(other: Path | None, arguments: list[str], folder: Path) -> Arrays:
    """The results of an MLX, in a process of its own."""
    folder.mkdir()
    environment = os.environ | ({"PYTHONPATH": str(other)} if other else {})
    command = [sys.executable, __file__, *arguments, "--into", folder / "arrays.safetensors"]
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise MespError(f"With {other or 'this MLX'}: {done.stderr.strip()}")
    click.echo(done.stdout.strip())
    return mx.load(str(folder / "arrays.safetensors"))


@click.command(cls=Command, help=__doc__)
@click.argument("other", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument(
    "bundles", nargs=-1, required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)  # fmt: skip
@click.option("--steps", default=0, help="How many each trains; none by default.")
@several(
    "--known", metavar="NAME,...", default=("quantize mxfp4", "quantize mxfp8"), show_default=True,
    help="Differences that are expected: those whose names begin so.",
)  # fmt: skip
@click.option("--into", type=click.Path(path_type=Path), hidden=True)
def main(
    other: Path, bundles: tuple[Path, ...], steps: int, known: tuple[str, ...], into: Path | None
) -> None:
    if into:
        write(into, bundles, steps, into.parent)
        click.echo(f"MLX {metadata.version('mlx')}")
        return
    arguments = [str(other.resolve()), *(str(path.resolve()) for path in bundles)]
    arguments += ["--steps", str(steps)]
    with tempfile.TemporaryDirectory() as scratch:
        ours = computed(None, arguments, Path(scratch, "ours"))
        theirs = computed(other.resolve(), arguments, Path(scratch, "theirs"))
        apart = [name for name in ours if not same(ours[name], theirs[name])]
    unknown = [name for name in apart if not name.startswith(known)]
    click.echo(f"{len(ours) - len(apart)} of {len(ours)} arrays have the same bits.")
    for name in apart:
        click.echo(f"  {'differs' if name in unknown else 'differs, as is known'}: {name}")
    if unknown:
        sys.exit(1)


def same(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays have the same type, shape and bits."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return mx.array_equal(a.reshape(-1).view(mx.uint8), b.reshape(-1).view(mx.uint8)).item()


if __name__ == "__main__":
    main()
