"""Tests that training options of the real engine give the results of a training loop in Python.

The loop has the blocks of `mesp.reference` and automatic differentiation of the whole model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from helpers.commands import call, refused, run
from helpers.oracle import (
    ALPHA,
    RANK,
    SEQ_LEN,
    STEPS,
    Oracle,
    Recipe,
    Trained,
    distance,
    saved,
)
from helpers.schedules import learning_rate
from mesp import reference
from mesp.bundle.reader import Bundle
from mesp.engine.build import find_engine
from mesp.runs.log import RunLog

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fast_oracle")]
LEARNING_RATE = 0.1
VAL_BATCHES = 1


def train(bundle: Path, output: Path, *options: object, steps: int = STEPS) -> RunLog:
    usual = ("--steps", steps, "--optimizer", "sgd", "--learning-rate", LEARNING_RATE)
    call("train", bundle, *usual, "--val-batches", VAL_BATCHES, "--out", output, *options)
    return RunLog.load(output)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    find_engine()
    path = tmp_path_factory.mktemp("demo") / "demo.mesp"
    call("export", "--model", "demo", "--out", path, "--seq-len", SEQ_LEN, "--rank", RANK)
    tokens = Bundle(path).tokens("valid")
    add_data(path, "test", tokens[len(tokens) // 2 :])
    return path


@pytest.fixture(scope="module")
def bundle_of_examples(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = shutil.copytree(bundle, tmp_path_factory.mktemp("examples") / "demo.mesp")
    generator = np.random.default_rng(0)
    tokens = Bundle(path).tokens("train")
    examples, mask, start = [], np.ones(len(tokens)), 0
    for _ in range(30):
        length = int(generator.integers(8, 2 * SEQ_LEN))
        examples.append((start, length))
        mask[start : start + int(generator.integers(0, min(length, SEQ_LEN) - 2))] = 0
        mask[start + 4 : start + length - 2] = 0
        start += length
    add_data(path, "train", tokens, examples, mask)
    return path


def add_data(
    path: Path,
    split: str,
    tokens: np.ndarray,
    examples: list | None = None,
    mask: np.ndarray | None = None,
    pack: bool = False,
) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    entry = {"file": f"data/{split}.bin", "tokens": len(tokens)}
    arrays = {entry["file"]: np.asarray(tokens, "<u4")}
    if examples:
        entry["examples"] = {"file": f"data/{split}.examples.bin", "count": len(examples)}
        arrays[entry["examples"]["file"]] = np.asarray(examples, "<u4")
    if mask is not None:
        entry["mask"] = f"data/{split}.mask.bin"
        arrays[entry["mask"]] = mask.astype(np.uint8)
    if pack:
        entry["pack"] = True
    manifest["data"][split] = entry
    for name, array in arrays.items():
        (path / name).write_bytes(array.tobytes())
        sha256 = hashlib.sha256(array.tobytes()).hexdigest()
        listed = {"path": name, "size": array.nbytes, "sha256": sha256}
        manifest["files"] = [each for each in manifest["files"] if each["path"] != name] + [listed]
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def oracle(bundle: Path) -> Oracle:
    return Oracle.of(bundle)


def agree(
    run: RunLog, output: Path, expected: Trained, tolerance: float = 1e-4, ties: int = 0
) -> None:
    """The engine and Python compute in float32 and sum in different orders. Losses differ by 1e-6
    to 1e-5, and so do the changes of parameters, relative to their size. These differences grow
    from step to step. A moment that is half-way between two codes of 8 bits may become either code.
    So up to `ties` parameters may differ by up to a step. AdamW's longest step, without bias
    correction, is rate · (1 - β₁) / √(1 - β₂): 3.2e-3 with a rate of 1e-3, β₁ = 0.9 and β₂ = 0.999.
    """
    assert run.losses == pytest.approx(expected.losses, rel=max(2e-5, tolerance / 10))
    way = distance(expected.start, expected.end)
    assert way > 0
    end = saved(output)
    assert end.keys() == expected.end.keys()
    apart = np.sort(
        np.concatenate([np.ravel(mx.abs(end[name] - expected.end[name])) for name in end])
    )
    assert np.linalg.norm(apart[: apart.size - ties]) < tolerance * way
    assert ties == 0 or apart[-1] < 3.2e-3


class AdamW8bit(optim.Optimizer):
    def __init__(self, learning_rate: float, **constants: object) -> None:
        super().__init__()
        self._maybe_schedule("learning_rate", learning_rate)
        self.constants = constants

    def init_single(self, parameter: mx.array, state: dict) -> None:
        assert parameter.size % reference.MOMENT_BLOCK == 0
        for name, signed in (("m", True), ("v", False)):
            state[name] = reference.quantize(mx.zeros(parameter.size), signed)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict) -> mx.array:
        new, state["m"], state["v"] = reference.adamw8bit(
            parameter.reshape(-1), gradient.reshape(-1), reference.Quantized(*state["m"]),
            reference.Quantized(*state["v"]), self.learning_rate.item(), **self.constants,
        )  # fmt: skip
        return new.reshape(parameter.shape)


SGD, ADAMW = optim.SGD, optim.AdamW
RATE = LEARNING_RATE


def warm_up_and(decay: Callable, rate: float = RATE) -> Callable:
    # As in mlx-lm's build_schedule, the step after the warm-up has the full rate before any decay.
    return optim.join_schedules([optim.linear_schedule(0, rate, 2), decay], [3])


COSINE = warm_up_and(optim.cosine_decay(RATE, STEPS - 3))
LINEAR = warm_up_and(optim.linear_schedule(RATE, 0, STEPS - 3))
SLOW_COSINE = warm_up_and(optim.cosine_decay(1e-3, STEPS - 3), 1e-3)
# a step of AdamW changes each parameter by about the learning rate
SLOW = ("--learning-rate", 1e-3)

CASES = {
    "sgd": ((), Recipe(SGD(RATE))),
    "seed": (("--seed", 3), Recipe(SGD(RATE), seed=3)),
    "momentum and weight decay": (
        ("--momentum", 0.9, "--weight-decay", 0.1),
        Recipe(SGD(RATE, momentum=0.9, weight_decay=0.1)),
    ),
    "adamw": (
        ("--optimizer", "adamw", "--weight-decay", 0.01, *SLOW),
        Recipe(ADAMW(1e-3, weight_decay=0.01)),
    ),
    "adamw with its constants": (
        ("--optimizer", "adamw", "--beta1", 0.8, "--beta2", 0.9, "--epsilon", 1e-4, *SLOW),
        Recipe(ADAMW(1e-3, betas=[0.8, 0.9], eps=1e-4, weight_decay=0)),
    ),
    "adamw in 8 bits": (
        ("--optimizer", "adamw8bit", "--weight-decay", 0.01, "--beta2", 0.9, *SLOW),
        Recipe(AdamW8bit(1e-3, betas=(0.9, 0.9), weight_decay=0.01)),
    ),
    "adamw in 8 bits on disk": (
        ("--optimizer", "adamw8bit", "--max-grad-norm", 0.5, "--offload", "all", *SLOW),
        Recipe(AdamW8bit(1e-3), max_grad_norm=0.5),
    ),
    "another rate for B, with sgd": (
        ("--loraplus-lr-ratio", 3, "--momentum", 0.9, "--weight-decay", 0.1, "--warmup", 2),
        Recipe(
            SGD(warm_up_and(lambda _: RATE), momentum=0.9, weight_decay=0.1),
            SGD(warm_up_and(lambda _: 3 * RATE, 3 * RATE), momentum=0.9, weight_decay=0.1),
        ),
    ),
    "another rate for B, with adamw": (
        ("--loraplus-lr-ratio", 3, "--optimizer", "adamw", "--weight-decay", 0.5, *SLOW,
         "--max-grad-norm", 0.5, "--offload", "all"),
        Recipe(ADAMW(1e-3, weight_decay=0.5), ADAMW(3e-3, weight_decay=0.5), max_grad_norm=0.5),
    ),
    "another rate for B, with adamw in 8 bits": (
        ("--loraplus-lr-ratio", 0.5, "--optimizer", "adamw8bit", "--weight-decay", 0.5, *SLOW),
        Recipe(AdamW8bit(1e-3, weight_decay=0.5), AdamW8bit(5e-4, weight_decay=0.5)),
    ),
    "cosine": (("--schedule", "cosine"), Recipe(SGD(optim.cosine_decay(RATE, STEPS)))),
    "linear": (("--schedule", "linear"), Recipe(SGD(optim.linear_schedule(RATE, 0, STEPS)))),
    "warm-up": (("--warmup", 2), Recipe(SGD(warm_up_and(lambda _: RATE)))),
    "warm-up and cosine": (("--warmup", 2, "--schedule", "cosine"), Recipe(SGD(COSINE))),
    "warm-up and linear": (("--warmup", 2, "--schedule", "linear"), Recipe(SGD(LINEAR))),
    "batch": (("--batch-size", 2), Recipe(SGD(RATE), sequences=2)),
    "accumulation": (("--grad-accumulation-steps", 2), Recipe(SGD(RATE), sequences=2)),
    "clipping": (("--max-grad-norm", 0.5), Recipe(SGD(RATE), max_grad_norm=0.5)),
    "clipping that need not": (("--max-grad-norm", 1e4), Recipe(SGD(RATE), max_grad_norm=1e4)),
    "projections": (("--projections", "q,v"), Recipe(SGD(RATE), projections=("q", "v"))),
    "layers": (("--num-layers", 2), Recipe(SGD(RATE), num_layers=2)),
    "some of the blocks a step": (
        ("--blocks-per-step", 0.5, "--momentum", 0.9, "--weight-decay", 0.1),
        Recipe(SGD(RATE, momentum=0.9, weight_decay=0.1), blocks_per_step=0.5),
    ),
    "some of the last blocks a step, clipped, on disk": (
        ("--blocks-per-step", 0.3, "--num-layers", 3, "--optimizer", "adamw8bit", "--offload",
         "all", "--max-grad-norm", 0.5, "--grad-accumulation-steps", 2, "--seed", 3, *SLOW),
        Recipe(AdamW8bit(1e-3), blocks_per_step=0.3, num_layers=3, sequences=2, max_grad_norm=0.5,
               seed=3),
    ),
    "B alone": (
        ("--freeze-a", "--max-grad-norm", 0.5),
        Recipe(SGD(RATE), freeze_a=True, max_grad_norm=0.5),
    ),
    "dropout": (
        ("--dropout", 0.2, "--batch-size", 2),
        Recipe(SGD(RATE), dropout=0.2, sequences=2),
    ),
    "dropout of some, clipped, on disk": (
        ("--dropout", 0.1, "--projections", "v,down", "--freeze-a", "--grad-accumulation-steps", 2,
         "--max-grad-norm", 0.5, "--offload", "all"),
        Recipe(SGD(RATE), dropout=0.1, projections=("v", "down"), freeze_a=True, sequences=2,
               max_grad_norm=0.5),
    ),
    "rank-stabilized": (("--rslora",), Recipe(SGD(RATE), scale=ALPHA / math.sqrt(RANK))),
    "MeBP with nearly all": (
        ("--method", "mebp", "--projections", "k,down", "--num-layers", 3, "--max-grad-norm", 0.2,
         "--momentum", 0.5, "--batch-size", 2),
        Recipe(SGD(RATE, momentum=0.5), projections=("k", "down"), num_layers=3, max_grad_norm=0.2,
               sequences=2),
    ),
    "all at once, on disk": (
        ("--optimizer", "adamw", "--schedule", "cosine", "--warmup", 2, "--batch-size", 2,
         "--grad-accumulation-steps", 2, "--max-grad-norm", 0.5, "--projections", "q,k,v,o",
         "--num-layers", 2, "--rslora", "--offload", "all", *SLOW),
        Recipe(ADAMW(SLOW_COSINE, weight_decay=0), sequences=4, max_grad_norm=0.5,
               projections=("q", "k", "v", "o"), num_layers=2, scale=ALPHA / math.sqrt(RANK)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_option_trains_as_in_python(bundle: Path, oracle: Oracle, tmp_path: Path, case: str):
    options, recipe = CASES[case]
    run = train(bundle, tmp_path / "run", *options)
    expected = oracle.train(recipe)
    # AdamW divides by the size of the gradient, which enlarges differences of small gradients.
    tolerance = 1e-4 if isinstance(recipe.optimizer, SGD) else 1e-3
    ties = 4 if isinstance(recipe.optimizer, AdamW8bit) else 0  # of 162,816 parameters
    agree(run, tmp_path / "run", expected, tolerance, ties)
    assert [each["learning_rate"] for each in run.steps] == pytest.approx(expected.rates, rel=1e-5)
    norms = [each["grad_norm"] for each in run.steps if each.get("grad_norm") is not None]
    assert norms == pytest.approx(expected.norms, rel=1e-4)
    assert all(each["forward_seconds"] > 0 for each in run.steps)
    parts = [
        sum(each[f"{phase}_seconds"] for phase in ("forward", "loss", "backward"))
        for each in run.steps
    ]
    assert all(part <= each["seconds"] for part, each in zip(parts, run.steps, strict=True))


@pytest.mark.parametrize(
    ("rate", "schedule", "steps", "warmup", "clip"),
    [
        (1e-45, "cosine", 3, 0, 1.0),
        (1e-40, "linear", 4, 2, 1e-40),
        (1e-30, "constant", 3, 2, 3e38),
        (1.0, "linear", 1, 0, 1e-10),
        (3e38, "cosine", 4, 1, 1e-40),
    ],
)
def test_rates_at_the_edges(
    bundle: Path, tmp_path: Path, rate: float, schedule: str, steps: int, warmup: int, clip: float
):
    options = ("--learning-rate", rate, "--schedule", schedule, "--warmup", warmup)
    run = train(bundle, tmp_path / "run", *options, "--max-grad-norm", clip, steps=steps)
    expected = [learning_rate(rate, schedule, steps, warmup, step) for step in range(steps)]
    rates = [each["learning_rate"] for each in run.steps]
    assert rates == pytest.approx(expected, rel=1e-6, abs=2.0**-149)
    assert all(mx.isfinite(each).all() for each in saved(tmp_path / "run").values())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("beta2", [0.999, 0.99999])
def test_a_step_has_the_size_of_mlx_optimizers(
    bundle: Path, tmp_path: Path, optimizer: str, beta2: float
):
    """Without a bias correction, the first step of AdamW is η (1 - β₁) / √(1 - β₂) for any gradient
    far above ε.
    """
    options = ("--optimizer", optimizer, "--beta2", beta2, "--epsilon", 1e-30, *SLOW)
    train(bundle, tmp_path / "run", *options, steps=1)
    zero, one = {"w": mx.zeros(1)}, {"w": mx.ones(1)}
    peer = optim.AdamW(1e-3, betas=[0.9, beta2], eps=1e-30, weight_decay=0)
    expected = abs(peer.apply_gradients(one, zero)["w"].item())
    arrays = saved(tmp_path / "run").items()
    steps = np.concatenate([np.array(b).ravel() for name, b in arrays if name.endswith("lora_b")])
    assert abs(np.median(np.abs(steps)) - expected) <= 1e-6 * expected


def test_adapters_that_are_not_finite_are_not_saved(bundle: Path, tmp_path: Path):
    options = ("--optimizer", "adamw", "--learning-rate", 3e38, "--val-batches", 0, "--steps", 1)
    done = run("train", bundle, "--out", tmp_path / "run", *options)
    assert done.returncode == 2 and "no adapters had been saved" in done.stderr
    assert "is not finite after step 1; start again with a lower learning rate" in done.stderr


@pytest.fixture(scope="module")
def bundle_of_lengths(bundle_of_examples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lengths") / "demo.mesp"
    lengths = f"{SEQ_LEN // 4},{SEQ_LEN // 2},{SEQ_LEN}"
    call("export", "--from", bundle_of_examples, "--seq-len", lengths, "--out", path)
    return path


@pytest.mark.parametrize(
    "options",
    [
        ("--val-batches", 5, "--batch-size", 2),
        ("--offload", "all"),
        ("--batch-size", 2, "--offload", "inputs"),
        ("--memory-limit", 1000),
        ("--method", "mebp"),
        ("--method", "mezo", "--learning-rate", 1e-4),
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_short_examples_run_at_short_lengths(
    bundle_of_examples: Path, bundle_of_lengths: Path, tmp_path: Path, options: tuple
):
    padded = train(bundle_of_examples, tmp_path / "padded", *options, steps=6)
    short = train(bundle_of_lengths, tmp_path / "short", *options, steps=6)
    assert [step["tokens"] for step in short.steps] == [step["tokens"] for step in padded.steps]
    pairs = list(zip(short.losses, padded.losses, strict=True))
    pairs += list(zip(short.held_out or (), padded.held_out or (), strict=True))
    # MeZO's step follows from the small difference of two losses, which enlarges their errors.
    tolerance = 1e-5 if "mezo" in options else 1e-6
    assert all(a == pytest.approx(b, rel=tolerance, abs=tolerance) for a, b in pairs)
    peaks = [[step["mlx_peak_bytes"] for step in each.steps] for each in (short, padded)]
    if options[0] in ("--offload", "--method"):
        # MeZO's parameters and z take more memory than a short sequence's activations.
        assert min(peaks[0]) < (0.98 if "mezo" in options else 0.95) * min(peaks[1])
    assert max(peaks[0]) <= 1.01 * max(peaks[1])


def test_a_run_goes_on_when_its_bundle_got_shorter_lengths(
    bundle_of_examples: Path, tmp_path: Path
):
    path = shutil.copytree(bundle_of_examples, tmp_path / "demo.mesp")
    straight = train(path, tmp_path / "straight", steps=6)
    train(path, tmp_path / "run", steps=3)
    call("export", "--from", path, "--seq-len", f"8,{SEQ_LEN}", "--overwrite")
    resumed = train(path, tmp_path / "run", "--resume", steps=6)
    assert resumed.losses == pytest.approx(straight.losses, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("batch", "accumulation", "order"),
    [(1, 1, None), (4, 1, "sequences"), (1, 4, "blocks"), (2, 2, "blocks")],
    ids=lambda value: str(value),
)
def test_what_counts_of_an_example_is_in_the_loss(
    bundle_of_examples: Path, tmp_path: Path, batch: int, accumulation: int, order: str | None
):
    options = ["--batch-size", batch, "--grad-accumulation-steps", accumulation]
    if order == "sequences":  # A limit on the norm makes the planner choose this order.
        options += ["--max-grad-norm", 1e9]
    run = train(bundle_of_examples, tmp_path / "run", *options)
    assert run.plan.get("order") == order
    recipe = Recipe(SGD(RATE), sequences=batch * accumulation)
    oracle = Oracle.of(bundle_of_examples)
    agree(run, tmp_path / "run", oracle.train(recipe))
    counts = [counted.size for ((_, counted),) in oracle.sequences]
    order = [reference.step_window(taken, 0, len(counts)) for taken in range(STEPS * 4)]
    each = batch * accumulation
    inputs = [counted.max().item() for ((_, counted),) in oracle.sequences]
    for name, numbers in (("tokens", counts), ("input_tokens", inputs)):
        assert [step[name] for step in run.steps] == [
            sum(numbers[index] for index in order[step * each : (step + 1) * each])
            for step in range(STEPS)
        ]


def test_batches_of_a_step_are_as_one(bundle_of_examples: Path, tmp_path: Path):
    train(bundle_of_examples, tmp_path / "first", steps=2)  # otherwise no A would have a gradient
    start = saved(tmp_path / "first")

    def gradients(*options: object) -> tuple[RunLog, dict[str, mx.array]]:
        # At a high rate, the step changes the parameters much, so that their difference is exact to
        # many digits.
        rate, run = 1e4, tmp_path / "-".join(map(str, options))
        done = train(
            bundle_of_examples, run, *options, "--adapters", tmp_path / "first" / "adapters",
            "--learning-rate", rate, "--val-batches", 0, steps=1,
        )  # fmt: skip
        return done, {name: (start[name] - end) / rate for name, end in saved(run).items()}

    counts = [counted.size for ((_, counted),) in Oracle.of(bundle_of_examples).sequences]
    taken = [counts[reference.step_window(position, 0, len(counts))] for position in range(4)]
    assert max(taken) > 2 * min(taken)
    one, expected = gradients("--batch-size", 4)
    for options in (("--batch-size", 2, "--grad-accumulation-steps", 2),
                    ("--grad-accumulation-steps", 4),
                    ("--grad-accumulation-steps", 4, "--offload", "all")):  # fmt: skip
        run, found = gradients(*options)
        assert run.losses == pytest.approx(one.losses, rel=1e-6)
        for name, gradient in expected.items():
            error = mx.linalg.norm(found[name] - gradient) / mx.linalg.norm(gradient)
            assert error.item() <= 1e-5, (options, name)


@pytest.fixture(scope="module")
def bundle_of_packed_examples(
    bundle_of_examples: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = shutil.copytree(bundle_of_examples, tmp_path_factory.mktemp("packed") / "demo.mesp")
    bundle = Bundle(path)
    examples = [
        (start, min(length, SEQ_LEN // 3)) for start, length in bundle.examples("train").tolist()
    ]
    add_data(path, "train", bundle.tokens("train"), examples, np.array(bundle.mask("train")), True)
    return path


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--batch-size", 2, "--grad-accumulation-steps", 2, "--offload", "all"),
        ("--batch-size", 2, "--offload", "inputs"),
        ("--memory-limit", 1000),
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_packed_records_train_as_a_batch(
    bundle_of_packed_examples: Path, tmp_path: Path, options: tuple
):
    oracle = Oracle.of(bundle_of_packed_examples)
    assert max(map(len, oracle.sequences)) >= 3
    run = train(bundle_of_packed_examples, tmp_path / "run", *options)
    named = dict(zip(options[::2], options[1::2], strict=True))
    sequences = named.get("--batch-size", 1) * named.get("--grad-accumulation-steps", 1)
    recipe = Recipe(SGD(RATE), sequences=sequences)
    agree(run, tmp_path / "run", oracle.train(recipe))


def test_a_run_on_packed_records_goes_on(bundle_of_packed_examples: Path, tmp_path: Path):
    straight = train(bundle_of_packed_examples, tmp_path / "straight", steps=6)
    train(bundle_of_packed_examples, tmp_path / "run", steps=3)
    resumed = train(bundle_of_packed_examples, tmp_path / "run", "--resume", steps=6)
    assert resumed.losses == straight.losses


def test_automatic_differentiation_refuses_packed_records(
    bundle_of_packed_examples: Path, tmp_path: Path
):
    with pytest.raises(AssertionError, match="mesp data --no-pack"):
        train(bundle_of_packed_examples, tmp_path / "run", "--method", "mebp")


def test_mezo_takes_the_options_too(bundle: Path, oracle: Oracle, tmp_path: Path):
    options = ("--method", "mezo", "--momentum", 0.5, "--batch-size", 2, "--num-layers", 3)
    run = train(bundle, tmp_path / "run", *options, "--learning-rate", 1e-3)
    arch = oracle.model.arch
    recipe = Recipe(SGD(1e-3, momentum=0.5), sequences=2, num_layers=3)
    parameters = start = oracle.initial(recipe)
    losses = []
    for step in range(STEPS):
        order = [reference.step_window(2 * step + i, 0, len(oracle.sequences)) for i in (0, 1)]
        batch = [record for index in order for record in oracle.sequences[index]]
        noise = reference.mezo_noise(
            [mx.zeros(block.lora_size(RANK)) for block in arch.blocks], 0, step
        )
        z = {
            f"model.layers.{index}.{name}.{part}": matrix
            for index, flat in enumerate(noise)
            for name, pair in reference.unpack_lora(flat, arch.blocks[index]).items()
            for part, matrix in zip(("lora_a", "lora_b"), pair, strict=True)
        }
        plus, minus = (
            oracle.loss(
                {n: w + e * z[n] for n, w in parameters.items()}, batch, recipe.scale
            ).item()
            for e in (1e-3, -1e-3)
        )
        slope = (plus - minus) / 2e-3
        parameters = recipe.optimizer.apply_gradients(
            {n: slope * z[n] for n in parameters}, parameters
        )
        losses.append((plus + minus) / 2)
    agree(run, tmp_path / "run", Trained(start, parameters, losses), 1e-2)


def test_a_start_from_adapters_of_either_form(bundle: Path, oracle: Oracle, tmp_path: Path):
    train(bundle, tmp_path / "first", steps=3)
    adapters = tmp_path / "first" / "adapters"
    run = train(bundle, tmp_path / "run", "--adapters", adapters)
    expected = oracle.train(Recipe(SGD(RATE), start=saved(tmp_path / "first")))
    agree(run, tmp_path / "run", expected)
    peft = train(bundle, tmp_path / "peft", "--adapters", adapters / "peft")
    assert peft.losses == run.losses


def test_bfloat16_adapters_follow_float32(bundle: Path, oracle: Oracle, tmp_path: Path):
    """Stochastic rounding has no bias, so the training stays near that in float32."""
    run = train(bundle, tmp_path / "run", "--lora-dtype", "bfloat16", "--batch-size", 4)
    expected = oracle.train(Recipe(SGD(RATE), sequences=4))
    adapters = saved(tmp_path / "run")
    for name, array in adapters.items():
        assert mx.array_equal(array, array.astype(mx.bfloat16).astype(mx.float32)), name
    # Each of the 5 steps may round a number by up to 1/128 of it. A loss averages such errors over
    # many numbers.
    assert run.losses == pytest.approx(expected.losses, rel=1e-2)
    difference = distance(adapters, expected.end)
    assert 0 < difference < 0.02 * distance(expected.end, {n: 0 * w for n, w in adapters.items()})


@pytest.mark.parametrize(
    "options",
    [
        ("--momentum", 0.9),
        ("--optimizer", "adamw8bit", "--lora-dtype", "bfloat16", *SLOW),
    ],
    ids=["momentum", "adamw8bit, bfloat16"],
)
def test_a_run_that_goes_on_is_as_if_it_had_not_stopped(
    bundle: Path, tmp_path: Path, options: tuple
):
    options = (*options, "--batch-size", 2)
    whole = train(bundle, tmp_path / "whole", *options, steps=6)
    train(bundle, tmp_path / "run", *options, steps=4)
    call("train", "--resume", "--out", tmp_path / "run", "--steps", 6)
    assert RunLog.load(tmp_path / "run").losses == whole.losses
    assert distance(saved(tmp_path / "run"), saved(tmp_path / "whole")) == 0


def contents(folder: Path) -> dict[Path, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.name != ".lock")
    return {file: file.read_bytes() for file in files}


def test_a_run_does_not_go_on_with_other_data_or_weights(bundle: Path, tmp_path: Path):
    path, output = shutil.copytree(bundle, tmp_path / "demo.mesp"), tmp_path / "run"
    train(path, output, "--optimizer", "adamw", steps=2)
    straight = shutil.copytree(output, tmp_path / "straight")
    before = contents(output)
    rounded = tmp_path / "rounded.mesp"
    call("export", "--model", "demo", "--bits", 8, "--seq-len", SEQ_LEN, "--out", rounded)
    sentence = refused(run("train", rounded, "--resume", "--out", output, "--steps", 4))
    assert sentence.startswith(f"The bundle's weights are not those that the run in {output} was")
    (tmp_path / "train.txt").write_text("Some other text to train on. " * 400)
    call("data", path, "--data", tmp_path / "train.txt")
    sentence = refused(run("train", "--resume", "--out", output, "--steps", 4))
    assert sentence.startswith(
        f"The train data has changed since the run in {output} was started; start a new run, with "
        f"--adapters {output / 'adapters'} to continue from its adapters."
    )
    assert contents(output) == before
    train(path, tmp_path / "new", "--adapters", output / "adapters", steps=1)
    longer = tmp_path / "longer.mesp"
    call("export", "--from", bundle, "--seq-len", f"16,{SEQ_LEN}", "--out", longer)
    call("train", longer, "--resume", "--out", output, "--steps", 4)
    call("train", bundle, "--resume", "--out", straight, "--steps", 4)
    assert RunLog.load(output).losses == RunLog.load(straight).losses


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_schedule_of_more_steps_is_said(bundle: Path, tmp_path: Path, schedule: str):
    train(bundle, tmp_path / "run", "--schedule", schedule, steps=2)
    done = call("train", "--resume", "--out", tmp_path / "run", "--steps", 3)
    line = "schedule: the schedule is now that of 3 steps; it was that of 2"
    assert (line in done.stderr.splitlines()) == (schedule == "linear")


def test_the_number_of_threads_changes_no_bit(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    adapters = set()
    for threads in (1, 2, 5):
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", str(threads))
        output = tmp_path / f"{threads}"
        train(bundle, output, steps=2)
        adapters.add((output / "adapters" / "adapters.safetensors").read_bytes())
    assert len(adapters) == 1


def test_threads_that_wait_take_no_processor(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Waiting threads must not spin. On a busy machine, spinning would take as much time as the
    work."""
    seconds = {}
    loops = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        for threads in (1, 5):
            monkeypatch.setenv("OPENBLAS_NUM_THREADS", str(threads))
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            train(bundle, tmp_path / f"{threads}", steps=20)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds[threads] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    # Waking threads takes time, and the processor's time depends on other users of its caches.
    assert seconds[5] < 2 * seconds[1]


def test_the_best_is_kept_and_a_run_that_gets_worse_ends(bundle: Path, tmp_path: Path):
    options = ("--learning-rate", 2.0, "--eval-every", 1, "--early-stopping", 3)
    run = train(bundle, tmp_path / "run", *options, steps=60)
    losses = {each["step"]: each["loss"] for each in run.evals_of("valid")}
    best = min(losses, key=losses.get)
    assert run.end["reason"] == "finished"
    assert run.last_step == best + 3 < 60, "three evaluations without a better one"
    if best > 0:
        steps = train(bundle, tmp_path / "again", "--learning-rate", 2.0, steps=best)
        assert steps.held_out[1] == losses[best]
        kept = mx.load(str(tmp_path / "run" / "best" / "adapters.safetensors"))
        assert distance(saved(tmp_path / "again"), kept) == 0


def test_the_test_data_is_evaluated_at_the_end(bundle: Path, oracle: Oracle, tmp_path: Path):
    run = train(bundle, tmp_path / "run", "--test", steps=2)
    (record,) = run.evals_of("test")
    assert record["step"] == 2
    tokens = mx.array(Bundle(bundle).tokens("test").astype(np.int64))
    count = record["tokens"] // SEQ_LEN
    every = mx.arange(1, SEQ_LEN + 1)
    batch = [(tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1], every) for i in range(count)]
    assert count >= VAL_BATCHES
    expected = oracle.loss(saved(tmp_path / "run"), batch, ALPHA / RANK).item()
    assert record["loss"] == pytest.approx(expected, rel=1e-5)
