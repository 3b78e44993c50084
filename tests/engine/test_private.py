from __future__ import annotations

import json
import math
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from helpers.commands import call, run
from helpers.oracle import ALPHA, RANK, Oracle, Parameters, Recipe, distance, saved
from mesp import reference
from mesp.bundle.reader import Bundle
from mesp.engine.build import find_engine
from mesp.engine.process import find_plan
from mesp.runs.log import RunLog
from mesp.runs.privacy import Steps, epsilon

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fast_oracle")]
SEQ_LEN = 32
KEY = bytes(range(32))
WORDS = [
    "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven",
    "wizards", "mix", "quartz",
]  # fmt: skip
STEPS = 3  # at least two, because A's gradient is 0 in the first step


def write_records(path: Path, count: int, seed: int = 0) -> Path:
    draw = np.random.default_rng(seed)
    texts = (" ".join(draw.choice(WORDS, draw.integers(3, 30))) for _ in range(count))
    return write_lines(path, [{"text": text} for text in texts])


def write_lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def export(folder: Path, data: Path, *options: object) -> Path:
    find_engine()
    path = folder / "demo.mesp"
    size = ("--seq-len", SEQ_LEN, "--rank", RANK)
    call("export", "--model", "demo", "--data", data, "--out", path, *size, *options)
    return path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    return export(folder, write_records(folder / "records.jsonl", 30), "--long", "cut")


def begin_with_key(bundle: Path, output: Path, **settings: object) -> Path:
    output.mkdir()
    (output / "metrics.jsonl").touch()
    (output / "secret.key").write_bytes(KEY)
    fixed = {"seq_len": SEQ_LEN, "rank": RANK, "steps": STEPS, "val_batches": 0, "resume": True}
    fixed |= {"bundle": str(bundle), "output": str(output)}
    path = output / "settings.json"
    path.write_text(json.dumps(fixed | settings))
    return path


def train_with_key(bundle: Path, output: Path, **settings: object) -> RunLog:
    path = begin_with_key(bundle, output, **settings)
    done = subprocess.run([find_engine(), path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return RunLog.load(output)


class Private:
    def __init__(self, bundle: Path, recipe: Recipe) -> None:
        self.oracle, self.recipe = Oracle.of(bundle), recipe
        self.blocks = self.oracle.model.arch.blocks
        self.start = self.oracle.initial(recipe)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def noise(self, step: int) -> Parameters:
        noise = {name: mx.zeros_like(matrix) for name, matrix in self.start.items()}
        trained = [name for name in noise if name.endswith("lora_b") or not self.recipe.freeze_a]
        blocks = [
            [name for name in trained if name.startswith(f"model.layers.{index}.")]
            for index in range(len(self.blocks))
        ]
        sizes = [sum(noise[name].size for name in names) for names in blocks]
        flat = reference.private_noise(KEY, step, sizes)
        for names, vector in zip(blocks, flat, strict=True):
            for name in names:
                matrix = noise[name]
                noise[name] = vector[: matrix.size].reshape(matrix.shape)
                vector = vector[matrix.size :]
        return noise

    def gradient(self, parameters: Parameters, example: tuple) -> tuple[float, Parameters]:
        loss, gradient = mx.value_and_grad(self.oracle.loss)(
            parameters, [example], self.recipe.scale
        )
        if self.recipe.freeze_a:
            gradient = {n: g * n.endswith("lora_b") for n, g in gradient.items()}
        return loss.item(), gradient

    def train(self, clip: float, multiplier: float, expected: int) -> Parameters:
        parameters, examples = self.start, [each[0] for each in self.oracle.sequences]
        for step in range(STEPS):
            drawn = reference.poisson_sample(KEY, step, expected, len(examples))
            found = [self.gradient(parameters, examples[index]) for index in drawn]
            noise = self.noise(step)
            names = list(parameters)
            parts = [[gradient[name] for name in names] for _, gradient in found]
            mean = reference.private_gradient(
                parts, [noise[name] for name in names], clip, multiplier, expected
            )
            parameters = self.recipe.optimizer.apply_gradients(
                dict(zip(names, mean, strict=True)), parameters
            )
            mx.eval(parameters, self.recipe.optimizer.state)
            if drawn:
                self.losses.append(float(np.mean([loss for loss, _ in found])))
                squares = ([mx.square(g).sum().item() for g in part] for part in parts)
                self.norms.append(float(np.mean([math.sqrt(sum(each)) for each in squares])))
        return parameters


SGD = {"optimizer": "sgd", "learning_rate": 0.1}
ADAMW = {"optimizer": "adamw", "learning_rate": 1e-3}
CASES = {
    # Without noise, the result is the sum of the clipped gradients, divided by the expected number
    # of examples. In the other cases the noise has about the norm of this result, so that neither
    # hides an error of the other.
    "clipping": ((0.5, 0.0, 27), SGD, Recipe(optim.SGD(0.1))),
    "clipping that need not": ((1e4, 0.0, 9), SGD, Recipe(optim.SGD(0.1))),
    "noise": ((0.5, 0.002, 4), SGD, Recipe(optim.SGD(0.1))),
    "momentum": ((0.5, 0.002, 4), SGD | {"momentum": 0.9}, Recipe(optim.SGD(0.1, momentum=0.9))),
    "adamw": ((1.0, 0.002, 6), ADAMW, Recipe(optim.AdamW(1e-3, weight_decay=0))),
    "some matrices": (
        (0.2, 0.002, 4), SGD | {"projections": ["q", "down"], "num_layers": 2},
        Recipe(optim.SGD(0.1), projections=("q", "down"), num_layers=2),
    ),
    "B alone": ((0.5, 0.002, 4), SGD | {"freeze_a": True}, Recipe(optim.SGD(0.1), freeze_a=True)),
    "on disk": ((0.5, 0.002, 4), SGD | {"offload": "all"}, Recipe(optim.SGD(0.1))),
    "MeBP": ((0.5, 0.002, 4), SGD | {"method": "mebp"}, Recipe(optim.SGD(0.1))),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_per_example_differentiation(bundle: Path, tmp_path: Path, case: str):
    (clip, noise, expected), settings, recipe = CASES[case]
    recipe.scale = ALPHA / RANK
    private = Private(bundle, recipe)
    assert len(private.oracle.sequences) == 27
    end = private.train(clip, noise, expected)
    settings = settings | {"dp_clip": clip, "dp_noise": noise, "batch_size": expected}
    run = train_with_key(bundle, tmp_path / "run", **settings)
    assert run.plan["examples"] == 27
    assert run.losses == pytest.approx(private.losses, rel=2e-5)
    assert [each["grad_norm"] for each in run.steps] == pytest.approx(private.norms, rel=1e-4)
    way = distance(private.start, end)
    adapters = saved(tmp_path / "run")
    assert distance({name: adapters[name] for name in end}, end) < 1e-4 * way
    if case == "clipping":
        assert min(private.norms) > 2 * clip, "clipping counts"


def test_an_empty_batch_is_a_step_of_noise(bundle: Path, tmp_path: Path):
    count, steps = 27, range(60)
    sizes = [len(reference.poisson_sample(KEY, step, 1, count)) for step in steps]
    empty = [step for step in steps if sizes[step] == 0]
    assert 0 < len(empty) < len(steps)
    settings = SGD | {"dp_clip": 1.0, "dp_noise": 1.0, "batch_size": 1, "steps": empty[0] + 2}
    run = train_with_key(bundle, tmp_path / "run", **settings)
    event = next(each for each in run.events if each["event"] == "empty_batch")
    assert f"step {empty[0] + 1} drew no example" in event["message"]
    assert empty[0] + 1 not in [each["step"] for each in run.steps]


def train(bundle: Path, output: Path, *options: object) -> subprocess.CompletedProcess:
    fixed = ("--steps", 3, "--val-batches", 0, "--dp-clip", 1, "--batch-size", 3)
    return run("train", bundle, *fixed, *options, "--out", output)


def test_what_a_run_gives_is_said_before_and_after(bundle: Path, tmp_path: Path):
    done = train(bundle, tmp_path / "run", "--dp-noise", 1.5, "--dp-delta", 1e-4)
    assert done.returncode == 0, done.stderr
    total = epsilon([Steps(3, 1.5, 3 / 27)], 1e-4)
    line = f"Differential privacy of each of 27 training examples: ε {total:.3g} at δ 0.0001"
    assert [each for each in done.stdout.splitlines() if "privacy" in each] == 2 * [
        f"{line} over 3 steps."
    ]
    assert not (tmp_path / "run" / "secret.key").exists(), "a finished run has no key"
    done = train(bundle, tmp_path / "none", "--dp-noise", 0)
    assert done.returncode == 0 and "Differential privacy: none" in done.stdout


def test_runs_of_one_seed_differ(bundle: Path, tmp_path: Path):
    for name in ("a", "b"):
        assert train(bundle, tmp_path / name, "--dp-noise", 1).returncode == 0
    assert distance(saved(tmp_path / "a"), saved(tmp_path / "b")) > 0


def end_run(path: Path, ended: int, is_time: Callable[[dict], bool]) -> None:
    with subprocess.Popen([find_engine(), path], stdout=subprocess.PIPE) as engine:
        for line in engine.stdout:
            if is_time(json.loads(line)):
                engine.send_signal(ended)


@pytest.mark.parametrize("ended", [signal.SIGKILL, signal.SIGTERM], ids=lambda each: each.name)
def test_a_run_that_was_ended_goes_on_with_its_key(bundle: Path, tmp_path: Path, ended: int):
    settings = {"dp_clip": 0.5, "dp_noise": 0.5, "batch_size": 4, "steps": 8, "save_every": 2}
    settings |= {"optimizer": "adamw8bit", "lora_dtype": "bfloat16", "learning_rate": 1e-3}
    whole = train_with_key(bundle, tmp_path / "whole", **settings)
    output = tmp_path / "run"
    path = begin_with_key(bundle, output, **settings)
    for last in (3, 6):
        end_run(path, ended, lambda record, last=last: record.get("step", 0) >= last)
        reason = "stopped" if ended == signal.SIGTERM else None
        assert RunLog.load(output).end.get("reason") == reason
        assert (output / "secret.key").read_bytes() == KEY
    assert subprocess.run([find_engine(), path], capture_output=True).returncode == 0
    losses = {step["step"]: step["loss"] for step in RunLog.load(output).steps}
    assert list(losses.values()) == whole.losses
    assert distance(saved(output), saved(tmp_path / "whole")) == 0


def test_a_new_run_has_a_key_that_its_owner_alone_can_read(bundle: Path, tmp_path: Path):
    path = begin_with_key(bundle, tmp_path / "run", dp_clip=1, dp_noise=1)
    for name in ("metrics.jsonl", "secret.key"):
        (path.parent / name).unlink()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"resume": False, "steps": 10_000}))
    end_run(path, signal.SIGTERM, lambda record: record["type"] == "step")
    key = path.parent / "secret.key"
    assert len(key.read_bytes()) == 32 and key.read_bytes() != KEY
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_the_planner_counts_two_copies_of_the_gradient(bundle: Path):
    settings = {"bundle": str(bundle), "seq_len": SEQ_LEN, "rank": RANK}

    def peak(**more: object) -> int:
        return find_plan(find_engine(), settings | more)["predicted_peak_bytes"]

    blocks = Bundle(bundle).architecture.blocks
    gradient = 4 * sum(block.lora_size(RANK) for block in blocks)
    # The planner adds a sixteenth of the lasting arrays, for malloc's gaps between them.
    assert peak(dp_clip=1, dp_noise=1) - peak() == 2 * gradient * 17 // 16
    assert peak(dp_clip=1, dp_noise=1, batch_size=20) == peak(dp_clip=1, dp_noise=1)


REFUSED = {
    "clip alone": ((), "--dp-clip and --dp-noise go together"),
    "MeZO": (("--dp-noise", 1, "--method", "mezo"), "--method mezo does not go together"),
    "KTO": (("--dp-noise", 1, "--objective", "kto"), "others: give it some with mesp data"),
    "clipping": (("--dp-noise", 1, "--max-grad-norm", 1), "--max-grad-norm 1.0 does not go"),
    "skipping": (("--dp-noise", 1, "--skip-bad-steps"), "--skip-bad-steps does not go together"),
    "accumulation": (
        ("--dp-noise", 1, "--grad-accumulation-steps", 2),
        "leave out --grad-accumulation-steps",
    ),
    "too few": (("--dp-noise", 1, "--batch-size", 28), "fewer examples than a step"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_go_together_is_one_sentence(bundle: Path, tmp_path: Path, case: str):
    options, sentence = REFUSED[case]
    done = train(bundle, tmp_path / "run", *options)
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"dp_noise": None}, "dp_noise must be set with dp_clip"),
        ({"dp_clip": 0}, "dp_clip must be above 0"),
        ({"dp_noise": -1}, "dp_noise must be at least 0"),
        ({"method": "mezo"}, "method must be mesp or mebp"),
        ({"objective": "kto", "batch_size": 2}, "objective must be other than kto"),
        ({"grad_accumulation_steps": 2}, "grad_accumulation_steps must be 1"),
        ({"order": "blocks"}, "order must be sequences"),
        ({"max_grad_norm": 1}, "max_grad_norm must be left out"),
        ({"skip_bad_steps": True}, "skip_bad_steps must be left out"),
    ],
)
def test_the_engine_refuses_it_too(bundle: Path, tmp_path: Path, settings: dict, sentence: str):
    path = begin_with_key(bundle, tmp_path / "run", **{"dp_clip": 1, "dp_noise": 1} | settings)
    done = subprocess.run([find_engine(), path], capture_output=True, text=True)
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("options", [("--pack",), ("--no-pack", "--long", "split")], ids=str)
def test_text_in_several_sequences_is_refused(tmp_path: Path, options: tuple):
    data = write_lines(tmp_path / "records.jsonl", 30 * [{"text": " ".join(WORDS * 4)}])
    bundle = export(tmp_path, data, *options)
    done = train(bundle, tmp_path / "run", "--dp-noise", 1)
    assert done.returncode == 2 and "mesp data --no-pack --long cut" in done.stderr


def test_a_run_goes_on_to_more_steps(bundle: Path, tmp_path: Path):
    assert train(bundle, tmp_path / "run", "--dp-noise", 1).returncode == 0
    done = call("train", "--resume", "--out", tmp_path / "run", "--steps", 5)
    assert f"ε {epsilon([Steps(5, 1, 3 / 27)], 1e-5):.3g} at δ 1e-05 over 5" in done.stdout
    assert "failed to converge" not in done.stderr
    assert RunLog.load(tmp_path / "run").end["step"] == 5


def test_other_data_is_refused_on_resuming(bundle: Path, tmp_path: Path):
    other = export(tmp_path, write_records(tmp_path / "other.jsonl", 40), "--long", "cut")
    assert train(bundle, tmp_path / "run", "--dp-noise", 1).returncode == 0
    done = run("train", other, "--resume", "--out", tmp_path / "run", "--steps", 5)
    assert done.returncode == 2 and "The train data has changed since the run" in done.stderr


def test_pairs_are_clipped_by_the_pair(tmp_path: Path):
    draw = np.random.default_rng(1)
    pairs = [
        {
            "prompt": " ".join(draw.choice(WORDS, 4)),
            "chosen": " " + " ".join(draw.choice(WORDS, 6)),
            "rejected": " " + " ".join(draw.choice(WORDS, 6)),
        }
        for _ in range(4)
    ]
    bundle = export(tmp_path, write_lines(tmp_path / "pairs.jsonl", pairs))
    settings = SGD | {"objective": "dpo", "steps": 1, "seed": 3}

    def moved(output: Path) -> Parameters:
        after = saved(output)
        return {name: array for name, array in after.items() if name.endswith("lora_b")}

    alone = {}
    for number in range(3):
        each = tmp_path / f"{number}"
        each.mkdir()
        one = export(each, write_lines(each / "pairs.jsonl", 2 * [pairs[number]]))
        train_with_key(one, each / "run", **settings, dp_clip=1e9, dp_noise=0)
        alone[number] = moved(each / "run")
    norms = {n: math.sqrt(sum(mx.square(a).sum().item() for a in g.values())) / 0.1
             for n, g in alone.items()}  # fmt: skip
    clip = sorted(norms.values())[1]
    done = train_with_key(
        bundle, tmp_path / "run", **settings, dp_clip=clip, dp_noise=0, batch_size=3
    )
    assert done.steps[0]["grad_norm"] == pytest.approx(np.mean(list(norms.values())), rel=1e-4)
    factors = {n: min(1, clip / (norm + 1e-6)) / 3 for n, norm in norms.items()}
    expected = {
        name: sum(factors[n] * alone[n][name] for n in alone) for name in moved(tmp_path / "run")
    }
    way = math.sqrt(sum(mx.square(a).sum().item() for a in expected.values()))
    assert distance(moved(tmp_path / "run"), expected) < 1e-4 * way


def test_epsilon_of_full_batches_is_the_gaussian_mechanisms():
    from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

    exact = get_epsilon_gaussian(5 / math.sqrt(10), 1e-5)
    assert exact <= epsilon([Steps(10, 5, 1)], 1e-5) < 1.2 * exact
    assert epsilon([Steps(4, 5, 1), Steps(6, 5, 1)], 1e-5) == epsilon([Steps(10, 5, 1)], 1e-5)


def test_epsilon_bounds_that_of_privacy_loss_distributions():
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant().compose(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)), 1000)
    exact = accountant.get_epsilon(1e-5)
    assert exact < epsilon([Steps(1000, 1.0, 0.01)], 1e-5) < 1.2 * exact
    assert epsilon([Steps(1000, 1.0, 1)], 1e-5) > 20 * exact, "sampling counts"


def test_without_noise_nothing_is_private():
    assert epsilon([Steps(1, 0, 0.1)], 1e-5) == math.inf


def test_draws_are_poisson_and_noise_is_normal():
    sizes = [len(reference.poisson_sample(KEY, step, 5, 100)) for step in range(400)]
    assert np.mean(sizes) == pytest.approx(5, abs=0.4)
    assert np.var(sizes) == pytest.approx(100 * 0.05 * 0.95, rel=0.25)
    assert reference.poisson_sample(KEY, 0, 100, 100) == list(range(100))
    first, second = reference.private_noise(KEY, 0, [50_000, 50_000])
    other = reference.private_noise(KEY, 1, [50_000])[0]
    for noise in (first, second, other):
        assert abs(noise.mean().item()) < 0.02 and noise.var().item() == pytest.approx(1, abs=0.03)
    for a, b in ((first, second), (first, other)):
        assert abs((a * b).mean().item()) < 0.02
