import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mesp
from helpers.commands import HANG, call, run, wait_for
from helpers.oracle import RANK, Oracle, Recipe, distance, saved
from mesp import rewards
from mesp.engine.process import running
from mesp.engine.train import TrainingJob
from mesp.errors import MespError
from mesp.settings.train_settings import TrainSettings

SEQ_LEN = 32
GROUP = 4
RATE = 0.05
RECORDS = [
    {"prompt": f"Say the number {number}.", "completion": f" It is {number}."}
    for number in range(20)
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    data, out = folder / "data.jsonl", folder / "demo.mesp"
    data.write_text("\n".join(map(json.dumps, RECORDS)))
    options = ("--data", data, "--no-chat", "--seq-len", SEQ_LEN, "--rank", RANK)
    call("export", "--model", "demo", "--out", out, *options)
    return out


def grpo(oracle: Oracle, parameters: dict, groups: list[dict], scores: list, dr: bool) -> mx.array:
    scores, longest = mx.array(scores), len(groups[0]["answers"][0])
    advantages = scores - scores.mean(axis=1, keepdims=True)
    if not dr:
        advantages = advantages / (mx.sqrt(mx.var(scores, axis=1, keepdims=True, ddof=1)) + 1e-4)
    losses = []
    for group, advantage in zip(groups, advantages, strict=True):
        for i, answer in enumerate(group["answers"]):
            tokens = mx.array(group["prompt"] + answer)
            counted = mx.arange(len(group["prompt"]), len(tokens))
            log_probability = -len(answer) * oracle.loss(parameters, [(tokens, counted)], SCALE)
            ratio = log_probability - mx.stop_gradient(log_probability)
            surrogate = advantage[i] * (len(answer) + ratio)
            losses.append(-surrogate / (longest if dr else len(answer)))
    return mx.stack(losses).mean()


SCALE = Recipe(optimizer=None).scale


@pytest.mark.parametrize("dr", [False, True], ids=["GRPO", "Dr. GRPO"])
@pytest.mark.parametrize("offload", ["none", "all"])
def test_a_step_is_that_of_automatic_differentiation(
    bundle: Path, tmp_path: Path, dr: bool, offload: str
):
    options = {"steps": 2, "optimizer": "sgd", "learning_rate": RATE, "reward": "exact"}
    options |= {"group_size": GROUP, "max_tokens": 6, "batch_size": 2, "dr_grpo": dr}
    options |= {"val_batches": 0, "seq_len": SEQ_LEN, "rank": RANK, "offload": offload}
    manifest, out = mesp.load(bundle).manifest, tmp_path / "run"
    job = TrainingJob(bundle, manifest, TrainSettings(**options).complete(manifest), out)
    oracle = Oracle.of(bundle, SEQ_LEN)
    start = parameters = oracle.initial(Recipe(optimizer=None))
    drawn, losses, steps = np.random.default_rng(0), [], []
    settings = job.to_json() | {"stop": []}
    with running([], settings, stdin=subprocess.PIPE) as engine:
        for record in engine:
            if record["type"] == "step":
                steps.append(record)
            if record["type"] != "samples":
                continue
            scores = drawn.random((2, GROUP)).tolist()
            objective = partial(grpo, oracle, groups=record["groups"], scores=scores, dr=dr)
            loss, gradient = mx.value_and_grad(objective)(parameters)
            parameters = {name: each - RATE * gradient[name] for name, each in parameters.items()}
            mx.eval(parameters)
            losses.append(loss.item())
            engine.send(scores)
            expected = np.mean(scores)
    assert engine.process.returncode == 0, engine.said
    assert [step["loss"] for step in steps] == pytest.approx(losses, abs=1e-5)
    assert steps[-1]["reward"] == pytest.approx(expected)
    assert steps[-1]["sampled_tokens"] == 2 * GROUP * 6
    assert distance(saved(out), parameters) < 1e-4 * distance(start, parameters)


def test_the_reward_rises(bundle: Path, tmp_path: Path):
    run = mesp.train(
        bundle, out=tmp_path / "run", steps=20, reward="length:1", max_tokens=8, val_batches=0,
        batch_size=2, group_size=4, learning_rate=2e-3,
    )  # fmt: skip
    by_step = run.to_pandas()["reward"]
    assert by_step[-5:].mean() > by_step[:5].mean()


def test_a_run_that_goes_on_samples_the_same_answers(bundle: Path, tmp_path: Path):
    options = ("--reward", "length:1", "--max-tokens", 8, "--group-size", 3, "--val-batches", 0)
    call("train", bundle, "--steps", 4, "--out", tmp_path / "whole", *options)
    call("train", bundle, "--steps", 2, "--out", tmp_path / "parts", *options)
    call("train", "--resume", "--steps", 4, "--out", tmp_path / "parts")
    whole, parts = (mesp.RunLog.load(tmp_path / name) for name in ("whole", "parts"))
    assert [step["reward"] for step in parts.steps] == [step["reward"] for step in whole.steps]
    assert distance(saved(parts.folder), saved(whole.folder)) == 0


def test_a_reward_that_fails_ends_the_run_in_order(bundle: Path, tmp_path: Path):
    module, divisor, out = (tmp_path / name for name in ("own_reward.py", "divisor", "run"))
    module.write_text(
        "def reward(*, completions, **_):\n"
        "    divisor = int(open('divisor').read())\n"
        "    open('divisor', 'w').write(str(divisor - 1))\n"
        "    return [len(each) / divisor for each in completions]\n"
    )
    divisor.write_text("2")
    options = ("--reward", "own_reward:reward", "--max-tokens", 4, "--val-batches", 0)
    done = run("train", bundle, "--steps", 5, "--out", out, *options, cwd=tmp_path)
    assert done.returncode == 2
    assert "ZeroDivisionError" in done.stderr and "Traceback" not in done.stderr
    assert mesp.RunLog.load(out).last_step == 2 and saved(out)
    divisor.write_text("5")
    again = ("--resume", "--reward", "own_reward:reward", "--steps", 3, "--out", out)
    other = run("train", *again, "--reward", "own_reward:other", cwd=tmp_path)
    assert other.returncode == 2 and "cannot become own_reward:other" in other.stderr
    done = run("train", *again, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert mesp.RunLog.load(out).last_step == 3


@pytest.mark.parametrize("dr", [False, True], ids=["GRPO", "Dr. GRPO"])
def test_equal_rewards_teach_nothing(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dr: bool
):
    (tmp_path / f"same_{dr}.py").write_text(
        "def reward(*, completions, **_):\n    return [0.1] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "run"
    mesp.train(
        bundle, out=out, steps=2, reward=f"same_{dr}:reward", max_tokens=4, val_batches=0,
        dr_grpo=dr, group_size=7,
    )  # fmt: skip
    assert all(not mx.any(each) for name, each in saved(out).items() if name.endswith("b"))


def test_packed_records_are_refused(tmp_path: Path):
    data, packed = tmp_path / "data.jsonl", tmp_path / "packed.mesp"
    data.write_text("\n".join(map(json.dumps, RECORDS)))
    options = ("--data", data, "--no-chat", "--seq-len", 64, "--pack")
    call("export", "--model", "demo", "--out", packed, *options)
    with pytest.raises(MespError, match="--no-pack"):
        mesp.train(packed, out=tmp_path / "run", steps=1, reward="exact")


@pytest.mark.parametrize(
    ("turns", "options"),
    [
        (["one", "a", "two", "b"], ()),
        (["one", "a"], ("--loss-on", "all")),
        (["one", "a " * 90], ("--long", "split")),
    ],
    ids=["two answers", "all", "split"],
)
def test_records_of_other_than_one_answer_are_refused(tmp_path: Path, turns: list, options: tuple):
    roles = ["user", "assistant"] * 2
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    if "all" in options:
        messages.insert(0, {"role": "assistant", "content": "not trained", "weight": 0})
    data = tmp_path / "data.jsonl"
    data.write_text(f"{json.dumps({'messages': messages})}\n" * 4)
    export = ("export", "--model", "demo", "--data", data, "--seq-len", 64, *options)
    call(*export, "--out", tmp_path / "demo.mesp")
    done = run("train", tmp_path / "demo.mesp", "--steps", 1, "--reward", "exact", "--dry-run")
    assert done.returncode == 2
    assert "--reward needs records of a prompt and one answer, and record" in done.stderr


# A reward that never returns. It writes a file when it begins, and one after a signal's handler.
HANGS = """
import pathlib, signal, time

def reward(**_):
    handler = signal.getsignal(signal.SIGTERM)

    def noted(*arguments):
        handler(*arguments)
        pathlib.Path("signalled").touch()

    signal.signal(signal.SIGTERM, noted)
    pathlib.Path("begun").touch()
    while True:
        time.sleep(600)
"""


def test_a_second_signal_ends_a_reward_that_hangs(bundle: Path, tmp_path: Path):
    (tmp_path / "hangs.py").write_text(HANGS)
    command = [sys.executable, "-m", "mesp", "train", bundle, "--steps", "1", "--out", "run"]
    options = ["--reward", "hangs:reward", "--max-tokens", "4", "--val-batches", "0"]
    process = subprocess.Popen(
        [*command, *options], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    for event in ("begun", "signalled"):
        wait_for((tmp_path / event).exists, process)
        process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=HANG)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert b"ended at once" in said and b"Traceback" not in said


@pytest.mark.parametrize(
    "options, said",
    [
        (("--group-size", 4), "--group-size has no use without --reward"),
        (("--reward", "nothing"), "There is no reward nothing"),
        (("--reward", "regex:("), "is not valid"),
        (("--reward", "regex:a{99999999999}"), "is not valid"),
        (("--reward", ":f"), "There is no reward :f"),
        (("--reward", "length:²"), "cannot be imported"),
        (("--reward", "no_such_module:f"), "cannot be imported"),
        (("--reward", ".a:b"), "cannot be imported"),
        (("--reward", "exits:f"), "cannot be imported: SystemExit"),
        (("--reward", "exact", "--max-forgetting", 3), "does not go together with --reward"),
        (("--reward", "exact", "--max-tokens", 10**7), "1000000"),
        (("--reward", "exact", "--batch-size", 65, "--group-size", 1024), "at most 65,536"),
        (("--reward", "exact", "--method", "mezo"), "--method mezo does not go together"),
        (("--reward", "exact", "--dp-clip", 1, "--dp-noise", 1), "--dp-clip does not go together"),
    ],
    ids=str,
)
def test_refuses(bundle: Path, tmp_path: Path, options: tuple, said: str):
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    done = run("train", bundle, "--steps", 1, "--out", tmp_path / "run", *options, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "name, answer, right, expected",
    [
        ("exact", " 12", "12", 1), ("exact", "13", "12", 0),
        ("json", '{"a": 1}', "", 1), ("json", "{a: 1}", "", 0),
        ("json-equal", '{"b": 2, "a": 1.0}', '{"a": 1, "b": 2}', 1),
        ("json-equal", "[1]", "[2]", 0),
        (r"regex:^\d+$", "123", "", 1), (r"regex:^\d+$", "x1", "", 0),
        ("length:4", "abcd", "", 1), ("length:4", "abcdefgh", "", 0.5),
    ],
)  # fmt: skip
def test_built_in_rewards(name: str, answer: str, right: str, expected: float):
    reward = rewards.find_reward(name, False)
    assert rewards.compute_rewards(reward, ["p"], [answer], [right]) == [expected]


def test_a_reward_function_returns_a_number_for_each():
    for given in ([1.0], [1.0, float("nan")], [1.0, 1e39], ["a", "b"]):
        with pytest.raises(MespError, match="reward function"):
            rewards.compute_rewards(
                lambda given=given, **_: given, ["p", "p"], ["a", "b"], ["r", "r"]
            )
