"""Measures what a model reveals of its training records, with and without differential privacy.

    python tools/studies/canaries.py

A canary is a record with a secret of three random words. The study fine-tunes the demo model on
canaries and other records: without DP-SGD, with clipping alone, and with noise. All 1,000 possible
secrets are ranked by the model's loss. A canary's exposure (Carlini et al., "The Secret Sharer",
2019) is log₂ 1000 - log₂ rank, from 0 to 10 bits. The mean exposure of secrets that a model has not
seen is 1.4 bits.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from pathlib import Path
from statistics import mean

sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in ("tools", "tests"))
from helpers import openblas  # noqa: F401, before MLX

# isort: split
import click
import mlx.core as mx
import numpy as np
from mlx import nn

from demo import OUT, call, program
from mesp.bundle.reader import Bundle
from mesp.commands.command import Command
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.formatting import decimal
from mesp.runs.log import RunLog
from mesp.runs.privacy import Steps, epsilon
from studies.benchmarks.show import show
from studies.comparison.scores import model_with
from studies.comparison.trainers import multiply_dequantized
from studies.tasks.house_requests import cases

SEQ_LEN, RANK = 32, 4
BATCH_SIZE, STEPS = 8, 256
RECORDS, HELD_OUT = 256, 50
CLIP, NOISES, DELTA = 0.5, (0.5, 1.0), 1e-4
# Words of one token each for the demo model.
WORDS = ["school", "field", "war", "day", "man", "world", "year", "land", "home", "party"]
# A guest's secret is in one record, and an owner's is in eight. ε bounds the leakage of one record
# only.
ONCE = [f"Guest {letter}" for letter in "ABCDEFGHIJKLMNOP"]
OFTEN, TIMES = [f"Owner {letter}" for letter in "ABCD"], 8


def main_runs() -> dict[str, tuple]:
    clip = ("--dp-clip", CLIP, "--dp-delta", DELTA, "--dp-noise")
    runs = {"without": (), "clipping alone": (*clip, 0)}
    return runs | {f"noise {noise:g}": (*clip, noise) for noise in NOISES}


@click.command(cls=Command)
@click.option("--seed", type=int, default=0, help="Of the secrets and the adapters' start.")
@click.option("--steps", type=click.IntRange(min=1), default=STEPS)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=OUT.with_name("canary-study"),
    help="A folder, replaced.",
)
def main(seed: int, steps: int, out: Path) -> None:
    """Train in these ways, and print the exposure of the secrets."""
    shutil.rmtree(out, ignore_errors=True)
    draw = random.Random(seed)
    secrets = {name: tuple(draw.choices(WORDS, k=3)) for name in (*ONCE, *OFTEN)}
    data, bundle = out / "data", out / "demo.mesp"
    write_data(data, secrets, draw)
    call(
        *(program("mesp-export"), "--model", "demo", "--data", data, "--no-pack", "--out", bundle),
        *("--seq-len", SEQ_LEN, "--rank", RANK),
    )
    mx.set_default_device(mx.cpu)
    multiply_dequantized()
    opened, lines = Bundle(bundle), []
    lines.append(row("the demo model", opened, None, secrets, None, "-"))
    for name, options in main_runs().items():
        output = out / name.replace(" ", "-")
        call(
            *(program("mesp-train"), bundle, "--steps", steps, "--batch-size", BATCH_SIZE),
            *("--seed", seed, "--val-batches", HELD_OUT, "--out", output, *options),
        )
        run = RunLog.load(output)
        total = "∞"
        if noise := run.settings.get("dp_noise"):
            sampled = BATCH_SIZE / run.plan["examples"]
            total = decimal(epsilon([Steps(steps, noise, sampled)], DELTA), 1)
        adapters = output / "adapters"
        lines.append(row(name, opened, adapters, secrets, run.held_out[1], total))
    show(lines)


def write_data(folder: Path, secrets: dict[str, tuple[str, ...]], draw: random.Random) -> None:
    """Writes training data of `RECORDS` requests and canaries, and held-out requests."""
    planted = [text(name, secrets[name]) for name in (*ONCE, *(TIMES * OFTEN))]
    requests = cases(RECORDS - len(planted), seed=0, held_out=False)
    train = [*planted, *(case.prompt for case in requests)]
    draw.shuffle(train)
    valid = [case.prompt for case in cases(HELD_OUT, seed=1, held_out=True)]
    folder.mkdir(parents=True)
    for name, texts in (("train", train), ("valid", valid)):
        lines = "".join(json.dumps({"text": each}) + "\n" for each in texts)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def text(name: str, secret: tuple[str, ...]) -> str:
    return f"{name} says {' '.join(secret)}"


def row(
    name: str,
    bundle: Bundle,
    adapters: Path | None,
    secrets: dict[str, tuple[str, ...]],
    loss: float | None,
    total: str,
) -> dict[str, str]:
    """Returns a row of the table: a run's ε, its held-out loss and the exposure of its secrets."""
    model, tokenizer = model_with(bundle, adapters), load_bundle_tokenizer(bundle.path)
    found = {who: exposure(model, tokenizer, who, secret) for who, secret in secrets.items()}
    return {
        "run": name,
        f"ε at δ = {DELTA:g}": total,
        "held-out loss": decimal(loss, 3),
        "exposure in 1 record": decimal(mean(found[who] for who in ONCE), 1),
        "the highest": decimal(max(found[who] for who in ONCE), 1),
        f"exposure in {TIMES} records": decimal(mean(found[who] for who in OFTEN), 1),
    }


def exposure(model: nn.Module, tokenizer: object, name: str, secret: tuple[str, ...]) -> float:
    """Returns the exposure of a secret, in bits."""
    words = [tokenizer.encode(f" {word}") for word in WORDS]
    assert all(len(word) == 1 for word in words)
    prefix = tokenizer.encode(text(name, ()).rstrip())
    # One batch with all pairs of words gives the likelihoods of all secrets.
    rows = np.array([prefix + one + two for one in words for two in words])
    logits = model(mx.array(rows))[:, -3:]
    found = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    found = found[..., np.concatenate(words)].reshape(len(WORDS), len(WORDS), 3, len(WORDS))
    first, second, third = found[0, 0, 0], found[:, 0, 1], found[:, :, 2]
    likely = first[:, None, None] + second[:, :, None] + third
    own = likely[tuple(WORDS.index(word) for word in secret)]
    return math.log2(likely.size) - math.log2(1 + int((likely > own).sum()))


if __name__ == "__main__":
    sys.exit(main())
