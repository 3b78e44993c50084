from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from http.server import BaseHTTPRequestHandler
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from helpers.commands import HANG, run, wait_for
from helpers.federations import (
    RANK,
    RECORDS,
    SGD,
    B,
    equal,
    federation,
    trained_here,
    write_records,
)
from helpers.models import FAMILIES
from helpers.records import as_json, content
from helpers.superlink import SuperLink, an_object, asking, field, message, question
from mesp.bundle.manifest import read_manifest
from mesp.commands.command import Failed
from mesp.commands.federate import write_index
from mesp.engine.build import find_engine
from mesp.errors import MespError
from mesp.federate import federation as federations
from mesp.federate.exchange import (
    Arrays,
    averaging_error,
    check_arrays,
    drift,
    from_bfloat16,
    read_arrays,
    select_exchanged,
    to_bfloat16,
    write_arrays,
)
from mesp.federate.federation import STATE_NAME, Federation, Rounds, write_app
from mesp.federate.local_training import train
from mesp.federate.partition import Partition, read_topics, share_out
from mesp.models.architecture import Architecture
from mesp.runs.log import RunLog

Federate = Callable[..., Federation]
Joined = Callable[..., AbstractContextManager[tuple[SuperLink, "Node"]]]


@pytest.fixture
def begin(federate: Federate) -> Federate:
    """Makes a federation for which round 0 is saved."""

    def begun(*options: object) -> Federation:
        made = federate(*options)
        made.rounds.save(0, None, {})
        return made

    return begun


def a_round(federation: Federation, number: int, start: Arrays, client: int = 0):
    return train(federation.client(client), start, {**federation.config, "server-round": number})


@pytest.mark.slow
@pytest.mark.parametrize("frozen", ["--no-freeze-a", "--freeze-a"])
@pytest.mark.parametrize("update", [SGD, ()], ids=["sgd", "adamw8bit"])
def test_a_client_with_all_data_does_what_mesp_train_does(
    bundle: Path, tmp_path: Path, begin: Federate, update: tuple, frozen: str
):
    options = ("--steps", 5, "--batch-size", 2, *update, frozen)
    whole = begin("--clients", 1, "--rounds", 1, *options)
    for folder in ("adapters", "adapters/peft"):
        assert "license: mit\n" in (whole.rounds.path(0) / folder / "README.md").read_text()
    trained = a_round(whole, 1, whole.rounds.arrays(0))
    expected = trained_here(bundle, tmp_path / "run", *options)
    assert equal(trained.arrays, select_exchanged(expected, frozen == "--freeze-a"))
    log = RunLog.load(tmp_path / "run")
    assert trained.targets == sum(step["tokens"] for step in log.steps)
    assert trained.loss == pytest.approx(sum(log.losses) / 5)


@pytest.mark.slow
def test_rounds_of_sgd_are_one_run(bundle: Path, tmp_path: Path, begin: Federate):
    whole = begin("--clients", 1, "--rounds", 3, "--steps", 2, *SGD, "--no-freeze-a")
    arrays = whole.rounds.arrays(0)
    for number in (1, 2, 3):
        arrays = a_round(whole, number, arrays).arrays
        whole.rounds.save(number, arrays, {})
        arrays = whole.rounds.arrays(number)
    assert equal(arrays, trained_here(bundle, tmp_path / "run", "--steps", 6, *SGD))


@pytest.mark.slow
def test_the_moments_of_adamw_begin_again_each_round(bundle: Path, tmp_path: Path, begin: Federate):
    options = ("--optimizer", "adamw", "--clients", 1, "--rounds", 2, "--no-freeze-a")
    whole = begin(*options, "--steps", 1)
    first = a_round(whole, 1, whole.rounds.arrays(0)).arrays
    second = a_round(whole, 2, first).arrays
    one = trained_here(bundle, tmp_path / "run", "--steps", 2, "--optimizer", "adamw")
    # From zero moments, the first step of AdamW without bias correction changes each coordinate
    # with a nonzero gradient by about 0.1 / sqrt(0.001) times the learning rate, for any size of
    # the gradient.
    rate = whole.options["learning_rate"] * 0.1 / 0.001**0.5
    moved = np.abs(second[B] - first[B])
    assert np.median(moved) == pytest.approx(rate, rel=1e-2)
    assert not equal(second, one)


@pytest.mark.slow
@pytest.mark.parametrize("batches", [1, 2])
def test_a_step_of_clients_with_a_frozen_is_a_step_on_their_union(
    bundle: Path, data: Path, tmp_path: Path, batches: int
):
    """With A frozen, the average of the clients' B is a step on all of their targets:

        Σ pᵢ (B - η gᵢ) = B - η Σ pᵢ gᵢ

    pᵢ is client i's share of all targets, and gᵢ is the gradient of its mean loss.
    """
    clients = 4
    records = [
        each | {"completion": each["completion"] * (1 + number % 3)}
        for number, each in enumerate(RECORDS[: clients * batches])
    ]
    write_records(tmp_path / "d" / "train.jsonl", records)
    shutil.copy(data / "valid.jsonl", tmp_path / "d")
    options = ("--rounds", 2, "--steps", 1, "--freeze-a", *SGD)
    options += ("--grad-accumulation-steps", batches)
    many = federation(bundle, tmp_path / "d", tmp_path / "f", "--clients", clients, *options)
    many.rounds.save(0, None, {})
    own = shutil.copytree(bundle, tmp_path / "own.mesp")
    assert run("data", own, "--data", tmp_path / "d").returncode == 0
    arrays = many.rounds.arrays(0)
    for number in (1, 2):
        trained = [a_round(many, number, arrays, client) for client in range(clients)]
        targets = sum(each.targets for each in trained)
        assert len({each.targets for each in trained}) > 1
        arrays = {
            name: sum(each.targets / targets * each.arrays[name] for each in trained)
            for name in arrays
        }
    union = ("--steps", 2, "--batch-size", clients * batches, "--freeze-a", *SGD)
    expected = select_exchanged(trained_here(own, tmp_path / "run", *union), True)
    # The tolerance is for sums in float32 in another order.
    for name, array in arrays.items():
        assert np.linalg.norm(array - expected[name]) <= 1e-6 * np.linalg.norm(expected[name])


@pytest.mark.slow
def test_fedprox_adds_its_term_to_the_gradient(begin: Federate):
    whole = begin("--clients", 1, "--rounds", 1, *SGD)
    start = whole.rounds.arrays(0)
    one = whole.client(0)

    def trained(steps: int, mu: float) -> np.ndarray:
        config = {**whole.config, "server-round": 1, "steps": steps, "proximal-mu": mu}
        return train(one, start, config).arrays[B].astype(np.float64)

    pulled = trained(2, 0.25) - trained(2, 0.0)
    expected = -0.5 * 0.25 * (trained(1, 0.25) - start[B])
    assert np.linalg.norm(pulled - expected) <= 1e-5 * np.linalg.norm(expected)


def test_a_client_refuses_in_a_sentence(begin: Federate):
    whole = begin("--clients", 1, "--rounds", 1)
    start = whole.rounds.arrays(0)
    one, config = whole.client(0), {**whole.config, "server-round": 1}
    with pytest.raises(MespError, match="is a bundle of demo, and the round is for other"):
        train(one, start, config | {"model": "other"})
    with pytest.raises(MespError, match="took more than 1e-09 s"):
        train(one, start, config | {"timeout": 1e-9})
    with pytest.raises(MespError, match="lora_b has the shape"):
        train(one, start | {B: np.zeros((6, RANK, 3), np.float32)}, config)


def test_bfloat16_is_rounded_as_mlx_rounds():
    generator = np.random.default_rng(0)
    numbers = generator.normal(size=4096).astype(np.float32)
    numbers = np.append(numbers, np.array([0, -0.0, 1.00390625, 1.01171875, 3e38], np.float32))
    expected = np.array(mx.array(numbers).astype(mx.bfloat16).astype(mx.float32))
    assert np.array_equal(from_bfloat16(to_bfloat16(numbers)), expected)


def test_folders_of_the_last_blocks_are_read_as_they_were_written(tmp_path: Path):
    arch = Architecture.from_config(FAMILIES["qwen3_5"] | {"num_hidden_layers": 8})
    arrays = {
        "self_attn.o_proj.lora_b": np.ones((2, 2, 5), np.float32),
        "linear_attn.out_proj.lora_b": np.arange(4 * 2 * 5, dtype=np.float32).reshape(4, 2, 5),
        "mlp.up_proj.lora_b": np.zeros((6, 2, 7), np.float32),
    }
    write_arrays(tmp_path / "a", arrays, 2, 8.0, arch)
    assert equal(read_arrays(tmp_path / "a"), arrays)
    names = load_file(tmp_path / "a" / "adapters.safetensors").keys()
    prefix = arch.mlx_prefix + ".layers"
    assert {n for n in names if "mlp" not in n} == {
        *(f"{prefix}.{block}.self_attn.o_proj.lora_b" for block in (5, 7)),
        *(f"{prefix}.{block}.linear_attn.out_proj.lora_b" for block in (0, 2, 4, 6)),
    }
    with pytest.raises(MespError, match="no 5 blocks with a self_attn"):
        five = {"self_attn.o_proj.lora_b": np.ones((5, 2, 5), np.float32)}
        write_arrays(tmp_path / "b", five, 2, 8.0, arch)


def random_adapters(generator: np.random.Generator, start: Arrays | None = None) -> Arrays:
    shapes = {"m.lora_a": (6, 2), "m.lora_b": (2, 5), "n.lora_a": (4, 2), "n.lora_b": (2, 3)}
    return {
        name: (start[name] if start else 0) + generator.normal(size=(3, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def test_drift_and_the_error_of_averaging_are_as_their_formulas():
    generator = np.random.default_rng(0)
    start = random_adapters(generator)
    clients, weights = [random_adapters(generator, start) for _ in range(3)], [1, 2, 5]
    p = [weight / 8 for weight in weights]

    def flat(arrays: Arrays) -> np.ndarray:
        return np.concatenate([arrays[name].ravel() for name in sorted(arrays)])

    def products(arrays: Arrays) -> np.ndarray:
        made = [arrays[f"{module}.lora_a"] @ arrays[f"{module}.lora_b"] for module in "mn"]
        return np.concatenate([each.ravel() for each in made])

    mean = {name: sum(q * c[name] for q, c in zip(p, clients, strict=True)) for name in start}
    apart = sum(q * np.square(flat(c) - flat(mean)).sum() for q, c in zip(p, clients, strict=True))
    expected = np.sqrt(apart) / np.linalg.norm(flat(mean) - flat(start))
    assert drift(clients, weights, start) == pytest.approx(expected, rel=1e-5)

    exact = sum(q * products(c) for q, c in zip(p, clients, strict=True))
    wrong = np.linalg.norm(exact - products(mean)) / np.linalg.norm(exact - products(start))
    assert averaging_error(clients, weights, start) == pytest.approx(wrong, rel=1e-5)
    only_b = [select_exchanged(each, True) for each in clients]
    assert averaging_error(only_b, weights, select_exchanged(start, True)) == 0

    def of_experts(arrays: Arrays) -> Arrays:
        return {name: array.swapaxes(-1, -2)[None] for name, array in arrays.items()}

    stacked = [of_experts(each) for each in clients]
    assert averaging_error(stacked, weights, of_experts(start)) == pytest.approx(wrong, rel=1e-5)
    assert drift([start], [1], start) == 0


def test_matrices_that_do_not_fit_are_named():
    start = random_adapters(np.random.default_rng(0))
    check_arrays(dict(start), start)
    wrong = {
        "lacks n.lora_b": {name: start[name] for name in [*start][:3]},
        "has other": start | {"other": start["m.lora_a"]},
        "m.lora_a is float32": start | {"m.lora_a": start["n.lora_a"]},
        "float64": start | {"m.lora_a": start["m.lora_a"].astype(np.float64)},
        "not finite": start | {"n.lora_b": np.full((3, 2, 3), np.nan, np.float32)},
    }
    for said, arrays in wrong.items():
        with pytest.raises(MespError, match=said):
            check_arrays(arrays, start)


def test_shares_are_a_partition_in_the_datas_order(data: Path):
    topics, held_out = read_topics(str(data))
    everything = as_json(topics["train"])
    assert everything == [json.dumps(record) for record in RECORDS[:32]]
    assert len(held_out) == 8
    for split in ("iid", "dirichlet:0.5"):
        shares = share_out(str(data), topics, 3, Partition.parse(split), seed=1)
        orders = [[everything.index(each) for each in as_json(share)] for share in shares]
        assert sorted(index for order in orders for index in order) == list(range(32))
        assert all(a < b for order in orders for a, b in pairwise(order))
    sizes = [len(share) for share in share_out(str(data), topics, 3, Partition("iid"), seed=1)]
    assert max(sizes) - min(sizes) <= 1


def test_a_file_is_a_topic(tmp_path: Path):
    for name, start in (("a", 0), ("b", 10), ("c", 20), ("valid", 30)):
        write_records(tmp_path / f"{name}.jsonl", RECORDS[start : start + 10])
    topics, held_out = read_topics(str(tmp_path))
    assert [*topics] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert len(held_out) == 10
    shares = share_out("", topics, 2, Partition("by-file"), seed=0)
    assert [len(share) for share in shares] == [20, 10]
    with pytest.raises(MespError, match="Client 3 of 4 would get nothing"):
        share_out("", topics, 4, Partition("by-file"), seed=0)
    most = []
    for alpha in (0.05, 100):
        shares = share_out("", topics, 2, Partition("dirichlet", alpha), seed=3)
        most.append(max(len(share) for share in shares))
    assert most[0] > most[1]


def test_data_are_taken_as_the_export_takes_them(bundle: Path, tmp_path: Path):
    records = [{"question": f"What is {i}?", "reply": f"It is {i}."} for i in range(40)]
    write_records(tmp_path / "asked.jsonl", records)
    columns = ("--columns", "prompt=question,completion=reply")
    options = ("--clients", 2, "--rounds", 1, *columns)

    def held_out(name: str, *others: object) -> dict[str, object]:
        made = federation(bundle, tmp_path / "asked.jsonl", tmp_path / name, *options, *others)
        return json.loads((made.held_out / "data.json").read_text())["valid"]

    assert held_out("all", "--loss-on", "all") != held_out("answers")
    with pytest.raises(MespError, match="leave out `columns`"):
        federation(bundle, tmp_path / "asked.jsonl", tmp_path / "all", "--resume", *columns)


def test_held_out_data_alone_trains_nobody(tmp_path: Path):
    (tmp_path / "valid.txt").write_text("What is held out.\n", encoding="utf-8")
    topics, held_out = read_topics(str(tmp_path))
    assert not topics
    assert [content(each) for each in held_out] == ["What is held out.\n"]
    with pytest.raises(MespError, match="has nothing to train on"):
        share_out(str(tmp_path), topics, 2, Partition("iid"), 0)


def test_texts_are_shared_out_by_paragraphs(tmp_path: Path):
    text = "\n\n".join(f"Paragraph {number}." for number in range(20))
    (tmp_path / "train.txt").write_text(text)
    (tmp_path / "valid.txt").write_text("Held out.")
    topics, _ = read_topics(str(tmp_path))
    (whole,) = share_out("", topics, 1, Partition("iid"), seed=0)
    assert [content(each) for each in whole] == [text]
    shares = share_out("", topics, 2, Partition("iid"), seed=0)
    parts = [each.text.split("\n\n") for share in shares for each in share]
    assert sorted(each for part in parts for each in part) == sorted(text.split("\n\n"))


def test_a_topics_last_tenth_is_held_out(tmp_path: Path):
    write_records(tmp_path / "a.jsonl", RECORDS[:20])
    write_records(tmp_path / "b.jsonl", RECORDS[20:30])
    topics, held_out = read_topics(str(tmp_path))
    assert [len(units) for units in topics.values()] == [18, 9]
    wanted = [*RECORDS[18:20], RECORDS[29]]
    assert [content(each) for each in held_out] == wanted


@pytest.mark.parametrize("kind", ["json", "csv", "txt.gz", "MD"])
@pytest.mark.parametrize("split", ["validation", "val", "Dev", "eval", "evaluation"])
def test_every_kind_of_file_is_a_topic_and_every_name_its_split(
    tmp_path: Path, kind: str, split: str
):
    text = {
        "json": json.dumps(RECORDS[:4]),
        "csv": "prompt,completion\n" + "".join(f"{i},{i}\n" for i in range(4)),
    }.get(kind, "\n\n".join("abcd"))
    for stem in ("one", split, "test"):
        file = tmp_path / f"{stem}.{kind}"
        file.write_bytes(gzip.compress(text.encode()) if kind.endswith("gz") else text.encode())
    (tmp_path / "README.md").write_text("What they are.")
    topics, held_out = read_topics(str(tmp_path))
    assert {name: len(units) for name, units in topics.items()} == {f"one.{kind}": 4}
    assert len(held_out) == (4 if kind in ("json", "csv") else 1)


def test_what_is_no_topic_is_refused(tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("Mine.")
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.txt", "b.jsonl.zst", "dev.txt", "valid.txt", "more/c.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("Words.")
    (folder / "link.txt").symlink_to(secret)
    os.mkfifo(folder / "pipe.txt")
    for name, said in (
        ("valid.txt", "has both dev.txt and valid.txt; keep one."),
        ("b.jsonl.zst", "has b.jsonl.zst, a kind of file that is not read; "),
        ("link.txt", "link.txt is a link that leads out of its folder; put the file there."),
        ("more/c.txt", "has more/c.txt, which is in no split"),
        ("pipe.txt", "pipe.txt is not a regular file; put the file there."),
    ):
        with pytest.raises(MespError, match=re.escape(said)):
            read_topics(str(folder))
        (folder / name).unlink()
    assert [*read_topics(str(folder))[0]] == ["a.txt"]


def test_another_part_of_each_topic_is_held_out(tmp_path: Path):
    write_records(tmp_path / "a.jsonl", RECORDS[:20])
    assert len(read_topics(str(tmp_path), hold_out=0.5)[1]) == 10
    with pytest.raises(MespError, match="are measured by held-out data: leave out `hold_out` 0"):
        read_topics(str(tmp_path), hold_out=0)
    write_records(tmp_path / "dev.jsonl", RECORDS[20:])
    topics, held_out = read_topics(str(tmp_path), hold_out=0)
    assert (len(topics["a.jsonl"]), len(held_out)) == (20, 20)


@pytest.mark.slow
def test_round_0_is_the_adapters_that_mesp_train_starts_from(
    bundle: Path, federate: Federate, tmp_path: Path
):
    whole = federate("--clients", 2, "--rounds", 1)
    record = whole.rounds.save(0, None, {})
    options = ("--steps", 1, "--val-batches", 25, "--learning-rate", 1e-30)
    run("train", bundle, "--out", tmp_path / "run", *options)
    assert record["held_out_loss"] == RunLog.load(tmp_path / "run").held_out[0]
    arrays = read_arrays(whole.rounds.path(0) / "adapters")
    assert not any(arrays[name].any() for name in arrays if name.endswith("lora_b"))
    assert (whole.rounds.path(0) / "adapters" / "peft" / "adapter_model.safetensors").exists()
    assert whole.rounds.last == 0
    assert not (whole.rounds.folder / "partial").exists()


def test_a_round_that_was_not_finished_is_none(federate: Federate):
    whole = federate("--clients", 1, "--rounds", 1)
    assert whole.rounds.last is None
    (whole.rounds.folder / "partial" / "run").mkdir(parents=True)
    assert whole.rounds.last is None
    whole.rounds.save(0, None, {})
    assert whole.rounds.last == 0


SAVE_IN_FORKS = """
import json, os, sys
from pathlib import Path
from mesp.errors import MespError
from mesp.federate.exchange import read_arrays
from mesp.federate.federation import Federation

for folder, kind, number in json.loads(sys.argv[1]):
    process = os.fork()  # which has imported all that a process of its own would have to
    if process == 0:
        os.environ |= {"FAULTS_UNDER": folder, "FAULTS_KIND": kind, "FAULTS_AT": str(number)}
        rounds = Federation.read(Path(folder)).rounds
        said = ""
        try:
            rounds.save(1, read_arrays(rounds.path(0) / "adapters"), {"drift": 0}, b"moments")
        except MespError as error:
            said = str(error)
        except BaseException as error:
            said = repr(error)
        os.write(1, f"{json.dumps([folder, said])}\\n".encode())
        os._exit(0)
    os.waitpid(process, 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "crash", "power"])
def test_a_round_is_whole_or_not_there_whichever_call_failed(
    federate: Federate, tmp_path: Path, faults: Path, kind: str
):
    options = ("--clients", 1, "--rounds", 1, "--val-batches", 1)
    whole = federate(*options, name="whole")
    whole.write()
    whole.rounds.save(0, None, {})
    expected = whole.rounds.arrays(0)
    numbers = random.Random(kind).sample(range(1, 40), 6)
    folders = {tmp_path / f"{kind}-{number}": number for number in numbers}
    for folder in folders:
        shutil.copytree(whole.folder, folder)
    cases = json.dumps([(str(folder), kind, number) for folder, number in folders.items()])
    line = [sys.executable, "-c", SAVE_IN_FORKS, cases]
    environment = os.environ | {"LD_PRELOAD": str(faults)}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    said = dict(map(json.loads, done.stdout.splitlines()))
    assert list(said.values()).count("") < 3, "most of them failed"
    for folder, number in folders.items():
        problem = said.get(str(folder))
        if kind == "full" and problem:
            assert re.search("space|disk is full", problem), (number, problem)
            assert problem.startswith("Cannot"), (number, problem)
        kept = Federation.read(folder).rounds
        assert kept.last == (1 if problem == "" else kept.last), number
        if kept.last == 0:
            kept.save(1, expected, {"drift": 0}, b"moments")
        assert kept.last == 1 and kept.record(1)["drift"] == 0, number
        assert equal(kept.arrays(1), expected), number
        assert (kept.path(1) / STATE_NAME).read_bytes() == b"moments"
        assert not (kept.folder / "partial").exists() or problem is None, number


class PowerLoss(BaseException):
    """An error that `except Exception` does not catch."""


def test_a_loss_of_power_at_any_call_leaves_whole_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def engine(settings: dict) -> RunLog:
        output = Path(settings["output"])
        (output / "adapters" / "peft").mkdir(parents=True)
        for name in ("state.safetensors", "adapters/a", "adapters/peft/b"):
            (output / name).write_text(name)
        return RunLog(evals=({"type": "eval", "step": 0, "loss": 1.5, "split": "valid"},))

    monkeypatch.setattr(federations, "run_engine", engine)
    done: list[tuple[str, object]] = []
    calls, stop_at = 0, 0

    def counted(kind: str, call: Callable) -> Callable:
        def counting(*arguments: object) -> object:
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise PowerLoss
            result = call(*arguments)
            at = os.fstat(arguments[0]).st_ino if kind == "fsync" else arguments[1]
            done.append((kind, at))
            return result

        return counting

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, counted(name, getattr(os, name)))
    ended = False
    while not ended:
        stop_at += 1
        calls = 0
        done.clear()
        kept = Rounds(tmp_path / str(stop_at), {}, {})
        try:
            kept.save(0, None, {}, b"state")
            ended = True
        except PowerLoss:
            assert kept.last in (None, 0)
        names = {path for kind, path in done if kind == "replace"}
        assert (kept.last == 0) == (kept.path(0) in names)
        if kept.last == 0:
            assert kept.record(0)["held_out_loss"] == 1.5
            before = done[: done.index(("replace", kept.path(0)))]
            synced = {inode for kind, inode in before if kind == "fsync"}
            whole = {kept.path(0), *kept.path(0).rglob("*")}
            assert {path.stat().st_ino for path in whole} <= synced
        else:
            kept.save(0, None, {}, b"state")
            assert kept.last == 0
    assert done[-1] == ("fsync", kept.folder.stat().st_ino)
    assert stop_at > 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--split", "by-mood"), "--split is iid, by-file or dirichlet:ALPHA"),
        (("--split", "dirichlet:0"), "--split is iid, by-file or dirichlet:ALPHA"),
        (("--noise", 1), "--noise needs --clip"),
        (("--clip", 1, "--noise", 1e-9), "--noise is 0 or at least 0.001"),
        (("--min-clients", 3), "--min-clients 3 is more than --clients 2"),
        (("--clients", 33), "would get nothing"),
        (("--strategy-options", "eta"), "takes NAME=NUMBER"),
        (("--dora",), "no magnitudes of DoRA"),
        (("--fine-tune-type", "dora"), "no magnitudes of DoRA"),
        (("--fine-tune-type", "full"), "weights are frozen"),
    ],
)
def test_what_does_not_go_together_is_refused(
    federate: Federate, tmp_path: Path, options: tuple, said: str
):
    with pytest.raises((MespError, Failed)) as caught:
        federate("--clients", 2, "--rounds", 1, *options)
    assert said in caught.value.message
    assert not (tmp_path / "f" / "settings.json").exists()


def test_without_flower_a_sentence_says_what_to_install(
    bundle: Path, data: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    done = run("federate", bundle, "--data", data, "--clients", 2, "--rounds", 1)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: mesp federate needs Flower: ")


def test_a_federation_goes_on_with_its_settings(federate: Federate):
    first = federate(
        "--clients", 2, "--rounds", 1, "--steps", 3, "--split", "dirichlet:5", "--freeze-a"
    )
    on = federate("--resume", "--rounds", 4)
    assert on.options == first.options | {"rounds": 4, "resume": True}
    with pytest.raises(MespError, match="`steps` is 3 and cannot become 4"):
        federate("--resume", "--steps", 4)
    with pytest.raises(MespError, match="already holds a federation"):
        federate("--clients", 2, "--rounds", 1)


@pytest.mark.parametrize(
    ("given", "options"), [((), {}), (("--strategy-options", "eta=0.01"), {"eta": 0.01})]
)
def test_strategy_options_are_kept(federate: Federate, tmp_path: Path, given: tuple, options: dict):
    first = federate("--clients", 2, "--rounds", 1, *given)
    path = tmp_path / "f" / "settings.json"

    def goes_on() -> dict:
        return federate("--resume", "--rounds", 4).options

    kept = goes_on()
    assert (kept["strategy_options"], kept["rounds"]) == (options, 4)
    for bad in ({"eta": "0.01"}, {"eta": None}, ["eta"], None):
        path.write_text(json.dumps(first.options | {"strategy_options": bad}))
        with pytest.raises(MespError, match="is not the settings of a run"):
            goes_on()


@pytest.mark.parametrize("name", ["settings.json", "app/pyproject.toml", "data.json"])
def test_a_federation_is_written_through_no_link(tmp_path: Path, name: str):
    kept, output = tmp_path / "kept", tmp_path / "f"
    (output / "app").mkdir(parents=True)
    kept.write_text("kept")
    (output / name).symlink_to(kept)
    whole = Federation(output, {})
    whole.write()
    write_app(whole)
    write_index(output, {})
    assert kept.read_text() == "kept"
    assert (output / name).is_file() and not (output / name).is_symlink()


@pytest.mark.parametrize("name", ["held-out", "clients/0", "rounds"])
def test_a_federation_keeps_to_its_folder(bundle: Path, data: Path, tmp_path: Path, name: str):
    output, elsewhere = tmp_path / "f", tmp_path / "elsewhere"
    link, options = output / name, ("--clients", 2, "--rounds", 1)
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    for again in (options, ("--resume",)):
        with pytest.raises(MespError, match=f"{link} is a symbolic link"):
            federation(bundle, data, output, *again)
        assert [each.name for each in elsewhere.iterdir()] == ["kept"]
        link.unlink()
        if again == options:
            federation(bundle, data, output, *options)
            shutil.rmtree(link, ignore_errors=True)
            link.symlink_to(elsewhere)


def test_a_round_is_written_through_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def engine(settings: dict) -> RunLog:
        output = Path(settings["output"])
        output.mkdir(parents=True)
        (output / "state.safetensors").write_text("state")
        for name in ("round.json", "strategy.npz"):
            (output / name).symlink_to(kept / "file")
        return RunLog(evals=({"type": "eval", "step": 0, "loss": 1.5, "split": "valid"},))

    monkeypatch.setattr(federations, "run_engine", engine)
    kept, folder = tmp_path / "kept", tmp_path / "rounds"
    for each in (kept, folder):
        each.mkdir()
    (kept / "file").write_text("kept")
    (folder / "partial").symlink_to(kept)
    whole = Rounds(folder, {}, {})
    whole.save(0, None, {}, b"state")
    assert [each.name for each in kept.iterdir()] == ["file"]
    assert (kept / "file").read_text() == "kept"
    assert whole.record(0)["held_out_loss"] == 1.5


@pytest.mark.parametrize("name", ["settings.json", "rounds/000/round.json"])
@pytest.mark.parametrize("content", ["[]", "[" * 100_000, None], ids=["list", "deep", "pipe"])
def test_damaged_files_of_a_federation_are_named(tmp_path: Path, name: str, content: str | None):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content)
    with pytest.raises(MespError, match=f"{path.name} is missing or damaged"):
        if name == "settings.json":
            Federation.read(tmp_path)
        else:
            Rounds(tmp_path / "rounds", {}, {}).record(0)


def test_a_client_is_told_no_paths(bundle: Path, federate: Federate, tmp_path: Path):
    whole = federate("--clients", 1, "--rounds", 1)
    assert whole.config["model"] == str(read_manifest(bundle).model) == "demo"
    assert not {"bundle", "data", "output", "adapters"} & whole.config.keys()
    assert str(tmp_path) not in json.dumps(whole.config)


OWN_FILES = {"node.key", "node.pub", "node.id", ".lock"}


class Node:
    def __init__(self, settings: Path, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [find_engine(), "federate", settings],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ended(self) -> tuple[int, str, str]:
        out, error = self.process.communicate(timeout=HANG)
        return self.process.returncode, out, error

    def stop(self) -> str:
        """Returns its output."""
        self.process.send_signal(signal.SIGTERM)
        code, out, error = self.ended()
        assert (code, error) == (0, "")
        return out

    def refusal(self) -> str:
        code, _, error = self.ended()
        assert code == 2
        return error

    def peak_bytes(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s+(\d+)", text)[1])


@pytest.fixture
def node_at(bundle: Path, tmp_path: Path) -> Callable[..., Node]:
    def start(superlink: str, **environment: str) -> Node:
        settings, folder = tmp_path / "n.json", tmp_path / "n"
        given = {"superlink": superlink, "folder": str(folder), "bundle": str(bundle)}
        settings.write_text(json.dumps(given))
        return Node(settings, os.environ | environment)

    return start


@pytest.fixture
def joined(node_at: Callable[..., Node]) -> Joined:
    @contextlib.contextmanager
    def joined(environment: dict[str, str] | None = None, /, **answers: Callable) -> Iterator:
        with SuperLink(**answers) as link, node_at(link.url, **environment or {}) as node:
            yield link, node

    return joined


def begin_answer(handler: BaseHTTPRequestHandler, status: int = 200, **headers: object) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()


def forever(handler: BaseHTTPRequestHandler) -> None:
    begin_answer(handler, content_length=1 << 20)
    while True:
        handler.wfile.write(b"\x08")
        handler.wfile.flush()
        time.sleep(1)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["register_node", "pull_messages", "deactivate_node"])
def test_a_node_ends_at_once_whatever_its_server_does(joined: Joined, call: str):
    with joined(**{call: forever}) as (link, node):
        name = "pull-messages" if call == "deactivate_node" else call.replace("_", "-")
        wait_for(lambda: name in link.names())
        node.stop()


def long(handler: BaseHTTPRequestHandler) -> None:
    begin_answer(handler, content_length=600_000_000)
    # On Linux, Foundation keeps reading until the node cancels the request. The pauses limit what
    # it reads before that.
    for _ in range(600):
        handler.wfile.write(bytes(1_000_000))
        time.sleep(0.01)


def endless(handler: BaseHTTPRequestHandler) -> None:
    begin_answer(handler)
    while True:
        handler.wfile.write(bytes(1_000_000))
        time.sleep(0.01)


def write_forever(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    while True:
        handler.wfile.write(data)
        handler.server.sent += len(data)


def endless_chunks(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    write_forever(handler, b"1;" + b"x" * 1000 + b"\r\na\r\n")


def endless_trailers(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n")
    handler.wfile.write(b"transfer-encoding: chunked\r\n\r\n0\r\n")
    write_forever(handler, b"x: " + b"a" * 1000 + b"\r\n")


def endless_headers(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    write_forever(handler, b"x: " + b"a" * 1000 + b"\r\n")


def compressed(handler: BaseHTTPRequestHandler, status: int = 200) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    content = packer.compress(bytes(1_000_000_000)) + packer.flush()
    begin_answer(handler, status, content_encoding="gzip", content_length=len(content))
    handler.wfile.write(content)


def of_length(body: bytes, kind: str = "application/protobuf") -> Callable:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        begin_answer(handler, content_type=kind, content_length=len(body))
        handler.wfile.write(body)

    return answer


LONG, UNSAID, DAMAGED = "more bytes than any answer", "compressed or without a length", "protobuf"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (long, LONG),
        (endless, UNSAID),
        (endless_chunks, UNSAID),
        (endless_trailers, UNSAID),
        (compressed, UNSAID),
        (of_length(message(["0" * 64])[:-3]), DAMAGED),
        (of_length(random.Random(1).randbytes(5000)), DAMAGED),
        (of_length(b"\x08\x00" * 500_000), DAMAGED),
        (of_length(b"<html>Sign in</html>", "text/html"), DAMAGED),
    ],
    ids=["long", "endless", "chunks", "trailers", "gzip", "cut", "garbage", "fields", "page"],
)
@pytest.mark.parametrize("call", ["register_node", "pull_messages"])
def test_an_answer_that_is_none_ends_a_node(
    joined: Joined, tmp_path: Path, answer: Callable, said: str, call: str
):
    peak = 0
    with joined(**{call: answer}) as (_, node):

        def has_ended() -> bool:
            nonlocal peak
            with contextlib.suppress(OSError, TypeError):
                peak = max(peak, node.peak_bytes())
            return node.process.poll() is not None

        wait_for(has_ended, pause=0.005)
        code, out, error = node.ended()
    assert code == 2 and said in error and error.count("\n") == 1
    assert peak < 150_000_000
    assert {each.name for each in (tmp_path / "n").rglob("*")} <= OWN_FILES
    types = [json.loads(line)["type"] for line in out.splitlines()]
    assert types == ["joined", "end"][: len(types)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("status", [404, 500])
def test_an_answer_of_an_error_that_is_compressed_ends_a_node(joined: Joined, status: int):
    with joined(pull_messages=partial(compressed, status=status)) as (link, node):
        if status == 500:
            wait_for(lambda: link.names().count("pull-messages") > 3)
            assert node.peak_bytes() < 150_000_000
            assert "is busy (500)" in node.stop()
        else:
            assert "it answers 404 to pull-messages" in node.refusal()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_object_of_any_length_is_answered_as_a_failure(joined: Joined):
    root, leaf = an_object("Message", [], b"1")[0], an_object("ArrayChunk", [], b"2")[0]
    messages = iter([message([root, leaf])])
    pull = {"pull_messages": lambda _: next(messages, b""), "pull_object": long}
    with joined(**pull) as (link, node):
        wait_for(lambda: "push-messages" in link.names())
        assert node.peak_bytes() < 150_000_000
        assert LONG in node.stop()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("answer", [endless_headers, of_length(b"")], ids=["headers", "nothing"])
def test_a_node_waits_for_a_server_that_says_nothing(joined: Joined, answer: Callable):
    with joined(pull_messages=answer) as (link, node):
        wait_for(lambda: link.names().count("pull-messages") > 2)
        assert node.peak_bytes() < 150_000_000
        node.stop()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("age", [0, 7200], ids=["useless", "expired"])
def test_many_messages_leave_nothing(joined: Joined, tmp_path: Path, age: int):
    count = iter(range(60))

    def pull(_: BaseHTTPRequestHandler) -> bytes:
        number = next(count, None)
        if number is None:
            return b""
        root = an_object("Message", [], str(number).encode())[0]
        return message([root], created=time.time() - age)

    with joined(pull_messages=pull) as (link, node):
        wait_for(lambda: link.names().count("pull-messages") > 61)
        assert node.peak_bytes() < 150_000_000
        out = node.stop()
    types = [json.loads(line)["type"] for line in out.splitlines()]
    assert types.count("dropped") == (60 if age else 0)
    assert {each.name for each in (tmp_path / "n").rglob("*")} == OWN_FILES


@pytest.fixture(scope="module")
def asked(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Arrays, dict]:
    arrays = trained_here(bundle, tmp_path_factory.mktemp("asked") / "run", "--steps", 1, *SGD)
    config = {
        **{"model": str(read_manifest(bundle).model), "exchange": "float32", "server-round": 1},
        **{"timeout": 600.0, "steps": 1, "seq_len": 32, "rank": RANK, "alpha": 8.0, "seed": 0},
        **{"optimizer": "sgd", "learning_rate": 0.1},
    }
    return arrays, config


def wrong_shape(arrays: Arrays, config: dict) -> tuple[Arrays, dict]:
    return {name: each[:, :-1] for name, each in arrays.items()}, config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda arrays, config: (arrays, {**config, "model": "another"}), "for another model"),
        (lambda arrays, config: ({"x.lora_a": arrays[B]}, config), "sent x.lora_a, in a form"),
        (wrong_shape, "in a form that this model does not have"),
        (lambda arrays, config: ({}, config), ""),
        (lambda arrays, config: (arrays, {**config, "steps": -1}), "steps"),
        (lambda arrays, config: (arrays, {**config, "seq_len": 0}), "seq_len"),
        (lambda arrays, config: (arrays, {**config, "timeout": -1.0}), "timeout"),
        (lambda arrays, config: (arrays, {**config, "exchange": "x"}), "exchanges adapters"),
        (lambda a, c: ({n: x * np.float32(np.nan) for n, x in a.items()}, c), "not finite"),
    ],
    ids=["model", "name", "shape", "none", "steps", "length", "timeout", "exchange", "nan"],
)
def test_a_message_of_something_else_is_answered_as_a_failure(
    joined: Joined, tmp_path: Path, asked: tuple, change: Callable, said: str
):
    with joined(**asking(question(*change(*asked)), question(*asked))) as (link, node):
        wait_for(lambda: link.names().count("push-messages") == 2)
        wait_for(lambda: not (tmp_path / "n" / "message").exists())
        out = node.stop()
    records = [json.loads(line) for line in out.splitlines()]
    failed = [record["message"] for record in records if record["type"] == "failed"]
    assert len(failed) == 1 and said in failed[0] and "\n" not in failed[0]
    assert {each.name for each in (tmp_path / "n").iterdir()} == OWN_FILES


@pytest.mark.slow
def test_a_round_ends_in_time_whatever_happens_to_the_clock(
    joined: Joined, asked: tuple, clock_set_back: dict
):
    arrays, config = asked
    config = {**config, "steps": 100_000, "timeout": 20.0}
    with joined(clock_set_back, **asking(question(arrays, config))) as (link, node):
        wait_for(lambda: "push-messages" in link.names())
        assert "longer than the server waits" in node.stop()


@pytest.mark.slow
def test_a_message_takes_no_more_disk_than_the_adapters(joined: Joined, tmp_path: Path):
    """The server offers 150 objects of 5 MB, more than the adapters take."""
    asked: list[int] = []

    def chunk(number: int) -> tuple[str, bytes]:
        return an_object("ArrayChunk", [], number.to_bytes(4, "big") + bytes(5_000_000))

    def pull(handler: BaseHTTPRequestHandler) -> bytes:
        asked.append(len(asked))
        return field(1, 1) + field(2, 1) + field(3, chunk(asked[-1])[1])

    root = an_object("Message", [], b"1")[0]
    messages = iter([message([root, *(chunk(number)[0] for number in range(150))])])
    answers = {"pull_messages": lambda _: next(messages, b""), "pull_object": pull}
    with joined(**answers) as (link, node):
        wait_for(lambda: "push-messages" in link.names())
        assert "more than this model's adapters take" in node.stop()
    assert len(asked) == 1
    files = (file for file in (tmp_path / "n").rglob("*") if file.is_file())
    assert sum(file.stat().st_size for file in files) < 100_000


@pytest.mark.slow
def test_a_redirect_is_not_followed(joined: Joined):
    with SuperLink() as other:
        there = {"location": f"{other.url}/v1/fleet/register-node", "content_length": 0}
        with joined(register_node=partial(begin_answer, status=307, **there)) as (_, node):
            assert "answers 307 to register-node" in node.refusal()
        assert other.calls == []


@pytest.mark.slow
def test_an_address_without_tls_is_of_this_machine(node_at: Callable[..., Node], tmp_path: Path):
    with node_at("http://192.168.0.1:8000") as node:
        assert "an address without TLS" in node.refusal()
    assert not (tmp_path / "n").exists()


@pytest.mark.slow
def test_two_nodes_do_not_share_a_folder(
    joined: Joined, node_at: Callable[..., Node], tmp_path: Path
):
    with joined() as (link, first):
        wait_for(lambda: "pull-messages" in link.names())
        with node_at(link.url) as second:
            assert f"is writing to {tmp_path / 'n'}; wait for it" in second.refusal()
        first.stop()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sees a file for a moment")
def test_a_key_is_its_owners_from_the_moment_it_is_there(joined: Joined, tmp_path: Path):
    before = os.umask(0)
    try:
        with joined() as (link, node):
            seen = set()
            while "pull-messages" not in link.names():
                with contextlib.suppress(OSError):
                    for file in os.scandir(tmp_path / "n"):
                        if "node.key" in file.name:
                            seen.add(file.stat().st_mode & 0o777)
            node.stop()
    finally:
        os.umask(before)
    assert seen == {0o600}
