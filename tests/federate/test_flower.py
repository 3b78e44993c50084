"""Tests of federated rounds with Flower, which `make test-slow` installs."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import io
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytestmark = pytest.mark.federate
pytest.importorskip("flwr", reason="`make test-slow` installs flwr")

import flwr.app as flwr
from dp_accounting import dp_event, pld
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.serverapp.strategy import Strategy
from flwr.supercore.task_identity import TaskIdentity

from helpers.commands import HANG, command, succeeded
from helpers.federations import RECORDS, SGD, B, equal, federation, trained_here
from mesp.engine.build import find_engine
from mesp.errors import MespError
from mesp.federate import federation as federations
from mesp.federate.client_app import app, client_app
from mesp.federate.exchange import Arrays, pack, read_arrays, to_bfloat16
from mesp.federate.federation import STATE_NAME, Federation
from mesp.federate.flower_messages import to_numpy, to_record
from mesp.federate.rounds_progress import line, summary
from mesp.federate.server_app import serve
from mesp.federate.strategies import Screened, make_strategy
from mesp.runs.privacy import Steps, gaussian_epsilon, noise_for
from mesp.runs.privacy import epsilon as epsilon_of_steps


@pytest.fixture(autouse=True)
def a_task() -> None:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, SUPERLINK_NODE_ID


Federate = Callable[..., Federation]
Change = Callable[[flwr.Message], object]


def silent(_: flwr.Message) -> None:
    pass


@dataclass
class Here:
    federation: Federation
    changes: dict[int, Change] = field(default_factory=dict)
    node_config: dict = field(default_factory=dict)
    tells: bool = True
    states: dict[int, flwr.RecordDict] = field(default_factory=dict)

    def get_node_ids(self) -> list[int]:
        return [100 + number for number in range(self.federation.options["clients"])]

    def send_and_receive(
        self, messages: Iterable[flwr.Message], *, timeout: float | None = None
    ) -> list[flwr.Message]:
        replies = []
        for message in messages:
            number = message.metadata.dst_node_id - 100
            client = self.federation.client(number)
            state = self.states.setdefault(number, flwr.RecordDict())
            context = flwr.Context(1, 100 + number, self.node_config, state, {})
            app = client_app(lambda _, client=client: client, tells=self.tells)
            reply = app(copy.deepcopy(message), context)
            change = self.changes.get(number, lambda _: None)
            change(reply)
            replies += [] if change is silent else [reply]
        random.shuffle(replies)
        return replies


def served(
    federation: Federation, changes: dict[int, Change] | None = None, **of_clients: object
) -> Arrays:
    grid = Here(federation, changes or {}, **of_clients)
    serve(federation, grid, lambda _: None, timeout=None)
    return federation.rounds.arrays(federation.options["rounds"])


FLOAT32 = ("--exchange", "float32")


def keeping(sent: dict[int, Arrays], number: int) -> Change:
    return lambda reply: sent.update({number: to_numpy(reply.content["arrays"])})


def test_one_client_and_one_round_are_mesp_train(bundle: Path, federate: Federate, tmp_path: Path):
    options = ("--steps", 4, "--batch-size", 2, "--no-freeze-a")
    one = federate("--clients", 1, "--rounds", 1, *FLOAT32, *options)
    assert equal(served(one), trained_here(bundle, tmp_path / "run", *options))


def test_two_clients_with_equal_data_are_one(federate: Federate):
    options = ("--rounds", 2, "--steps", 2, *FLOAT32)
    two = federate("--clients", 2, *options, name="two")
    one = federate("--clients", 1, *options, name="one")
    for number in (0, 1):
        shutil.rmtree(two.client(number).data)
        shutil.copytree(one.client(0).data, two.client(number).data)
    assert equal(served(two), served(one))
    assert two.rounds.record(2)["drift"] == 0


def test_bfloat16_takes_half_the_bytes_and_rounds_what_is_added(federate: Federate):
    options = ("--clients", 2, "--rounds", 1, "--steps", 3, *SGD, "--freeze-a")
    found, records = [], []
    for exchange in ("float32", "bfloat16"):
        each = federate("--exchange", exchange, *options, name=exchange)
        found.append(served(each))
        records.append(each.rounds.record(1))
    exact, rounded = found
    for name, array in exact.items():
        # Rounding to bfloat16 changes each number of a client by at most 2⁻⁸ of it.
        assert np.linalg.norm(rounded[name] - array) <= 2**-8 * np.linalg.norm(array)
    numbers = 2 * sum(array.size for array in exact.values())  # of two clients
    headers = 2 * 128 * len(exact)  # NumPy's header takes 128 bytes an array
    for way in ("down", "up"):
        sizes = [record[f"bytes_{way}"] for record in records]
        assert sizes == [4 * numbers + headers, 2 * numbers + headers]


def test_a_small_update_of_a_large_number_is_not_lost_in_bfloat16(federate: Federate):
    whole = federate("--clients", 1, "--rounds", 1, "--steps", 1)
    whole.rounds.save(0, None, {})
    start = {name: array + 1000 for name, array in whole.rounds.arrays(0).items()}
    added = with_arrays(lambda a: {n: to_bfloat16(np.full(e.shape, 0.25)) for n, e in a.items()})
    screened = screening(make_strategy(whole.options), "bfloat16", 10**6)
    grid = Here(whole, {0: added})
    messages = screened.configure_train(1, to_record(start), flwr.ConfigRecord(whole.config), grid)
    averaged, _ = screened.aggregate_train(1, grid.send_and_receive(messages))
    for name, array in to_numpy(averaged).items():
        assert np.array_equal(array, start[name] + np.float32(0.25))


def screening(inner: Strategy, exchange: str, most: int, clip: float | None = None) -> Screened:
    return Screened(inner, 0, exchange, most, 1, clip, keep=lambda _, arrays, __: arrays)


def answer(node: int, arrays: Arrays) -> flwr.Message:
    question = flwr.Message(flwr.RecordDict(), dst_node_id=node, message_type="train")
    content = {
        "arrays": to_record(arrays),
        "metrics": flwr.MetricRecord({"num-examples": 3, "loss": 1.5, "footprint-bytes": 10}),
        "about": flwr.ConfigRecord({"name": "Ann"}),
    }
    return flwr.Message(flwr.RecordDict(content), reply_to=question)


def test_a_result_that_is_not_finite_is_refused():
    start = {"m.lora_b": np.ones((2, 3), np.float32)}
    infinite = to_record({name: array * np.inf for name, array in start.items()})
    inner = SimpleNamespace(aggregate_train=lambda *_: (infinite, None))
    screened = screening(inner, "float32", 10)
    screened.sent, screened.asked = start, {1}
    with pytest.raises(MespError, match="adapters of round 1 are not finite"):
        screened.aggregate_train(1, [answer(1, start)])


def test_with_a_frozen_every_a_is_that_of_the_seed(federate: Federate):
    frozen = federate("--clients", 2, "--rounds", 2, "--steps", 2, "--freeze-a")
    served(frozen)
    first, last = (read_arrays(frozen.rounds.path(n) / "adapters") for n in (0, 2))
    assert first.keys() == last.keys()
    for name, array in first.items():
        assert np.array_equal(array, last[name]) == name.endswith("lora_a")
    assert frozen.rounds.record(2)["averaging_error"] == 0


def test_a_mean_counts_targets(bundle: Path, tmp_path: Path):
    long = [{"prompt": "Count: ", "completion": " ".join(map(str, range(9)))}] * 4
    for name, records in (("a", RECORDS[:4]), ("b", long), ("valid", RECORDS[-4:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    options = ("--clients", 2, "--rounds", 1, "--steps", 1, "--split", "by-file", *FLOAT32, *SGD)
    two = federation(bundle, tmp_path, tmp_path / "f", *options)
    sent: dict[int, Arrays] = {}

    averaged = served(two, {number: keeping(sent, number) for number in (0, 1)})
    targets = [client["targets"] for client in two.rounds.record(1)["clients"]]
    assert targets[1] > 2 * targets[0]
    for name, array in averaged.items():
        expected = sum(t * sent[n][name] for n, t in enumerate(targets)) / sum(targets)
        assert np.linalg.norm(array - expected) <= 1e-6 * np.linalg.norm(expected)


def test_half_a_billion_parameters_travel_in_5_mb():
    outputs = {"q": 896, "k": 128, "v": 128, "o": 896, "gate": 4864, "up": 4864, "down": 896}
    random_bits = np.random.default_rng(0).integers  # equal arrays would travel once
    arrays = {
        f"self_attn.{name}_proj.lora_b": random_bits(2**16, size=(24, 8, size), dtype=np.uint16)
        for name, size in outputs.items()
    }
    content = flwr.RecordDict({"arrays": to_record(arrays)})

    def size(part) -> int:
        return len(part.deflate()) + sum(map(size, (part.children or {}).values()))

    assert 2 * 24 * 8 * sum(outputs.values()) < size(content) <= 5_000_000


def with_arrays(change: Callable[[Arrays], Arrays]) -> Change:
    def changed(reply: flwr.Message) -> None:
        reply.content["arrays"] = to_record(change(to_numpy(reply.content["arrays"])))

    return changed


def with_metric(name: str, value: float) -> Change:
    return lambda reply: reply.content["metrics"].update({name: value})


def with_data(change: Callable[[bytes], bytes]) -> Change:
    def changed(reply: flwr.Message) -> None:
        array = reply.content["arrays"][B]
        data = change(array.data)
        reply.content["arrays"][B] = flwr.Array(array.dtype, array.shape, array.stype, data)

    return changed


def npz(data: bytes) -> bytes:
    archive = io.BytesIO()
    np.savez(archive, np.load(io.BytesIO(data)))
    return archive.getvalue()


BAD = {
    "is silent": (silent, "node 101: did not answer in time"),
    "sends nothing": (lambda reply: reply.content.clear(), "node 101: its answer does not follow"),
    "sends NaN": (with_arrays(lambda a: a | {B: a[B] * np.nan}), "is not finite"),
    "sends another shape": (
        with_arrays(lambda a: a | {B: a[B][:, :, :-1].copy()}), "and not float32",
    ),
    "sends float64": (with_arrays(lambda a: a | {B: a[B].astype(float)}), "and not float32"),
    "is of another model": (
        with_arrays(lambda a: {n.replace("q_proj", "qkv_proj"): each for n, each in a.items()}),
        "is of another model",
    ),
    "has no name": (
        lambda reply: reply.content.pop("about"), "node 101: its answer does not follow",
    ),
    "claims too much": (with_metric("num-examples", 10**9), "counts 1000000000 targets"),
    "claims nothing": (with_metric("num-examples", 0), "counts 0 targets"),
    "has no loss": (with_metric("loss", float("nan")), "its metrics do not follow"),
    "sends an archive": (with_data(npz), "is an archive and not an array"),
    "sends no file": (with_data(lambda _: b"\x93NUMPY" + bytes(9)), "its answer does not follow"),
    "sends too much": (with_data(lambda data: data + bytes(1 << 20)), "bytes, more than the"),
    "sends 3e38": (with_arrays(lambda a: a | {B: np.full_like(a[B], 3e38)}), "larger than 1e+06"),
    "has footprints": (with_metric("footprint-bytes", -1), "its metrics do not follow"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_client_that_does_not_fit_is_left_out_and_named(federate: Federate, kind: str):
    change, said = BAD[kind]
    options = ("--clients", 3, "--rounds", 1, "--steps", 1, *FLOAT32)
    whole = federate(*options)
    sent: dict[int, Arrays] = {}

    averaged = served(whole, {0: keeping(sent, 0), 1: change, 2: keeping(sent, 2)})
    record = whole.rounds.record(1)
    assert [client["name"] for client in record["clients"]] == ["client 0", "client 2"]
    (sentence,) = record["left_out"]
    assert said in sentence
    weights = [client["targets"] for client in record["clients"]]
    mean = (weights[0] * sent[0][B] + weights[1] * sent[2][B]) / sum(weights)
    assert np.allclose(averaged[B], mean, rtol=1e-6, atol=1e-9)


HOSTILE = [
    *(0, 1, -1, 2**63, 1e308, -0.0, float("nan"), float("inf"), True, "", "x\0", "../x", b"\xff"),
    *([1], [], ["a"] * 3, [float("nan")]),
]


def damage(reply: flwr.Message, random: random.Random) -> None:
    content = reply.content
    kind = random.choice(("data", "data", "dtype", "name", "metrics", "about", "record"))
    if kind in ("data", "dtype", "name"):
        record = content["arrays"]
        name = random.choice([*record])
        array = record[name]
        data, dtype, shape, stype = array.data, array.dtype, array.shape, array.stype
        if kind == "data":
            at, more = random.randrange(len(data)), random.randbytes(random.randrange(9))
            rest = data[at + len(more) :] if random.random() < 0.7 else b""
            data = random.choice([data[:at] + more + rest, npz(array.data), data * 9, b""])
        elif kind == "dtype":
            dtype, shape = random.choice(["float64", "object", ""]), (2**40,)
            stype = random.choice([stype, "pickle", ""])
        else:
            del record[name]
            name = random.choice(["", "../x", "m.lora_c"])
        record[name] = flwr.Array(dtype, shape, stype, data)
    elif kind == "record":
        name = random.choice([*content])
        if random.random() < 0.5:
            del content[name]
        else:
            content[name] = content[random.choice([*content])]
    else:
        name = random.choice([*content[kind], "more"])
        content[kind][name] = random.choice(HOSTILE)


def test_no_answer_ends_a_federation(federate: Federate):
    options = ("--clients", 2, "--rounds", 1, "--clip", 1.0, "--noise", 0.5)
    inner = make_strategy(federate(*options).options)
    start = {"m.lora_a": np.ones((2, 3, 4), np.float32), "m.lora_b": np.zeros((2, 4, 3), "f4")}
    generator, left_out = random.Random(0), 0
    cases = int(os.environ.get("MESP_FUZZ_CASES", "400"))
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    for exchange in ("float32", "bfloat16"):
        screened = screening(inner, exchange, 10, clip=1.0)
        for _ in range(cases // 2):
            screened.sent, screened.asked = start, {1, 2}
            sent = start if exchange == "float32" else pack(start)
            replies = [answer(node, sent) for node in (1, 2)]
            with contextlib.suppress(TypeError, ValueError, KeyError):  # Flower's own checks
                damage(replies[1], generator)
            arrays, _ = screened.aggregate_train(1, replies)
            averaged = to_numpy(arrays)
            assert averaged.keys() == start.keys()
            assert all(np.abs(array).max() < 10 for array in averaged.values())
            left_out += len(screened.report["left_out"])
            assert all(each.isprintable() for each in screened.report["left_out"])
            json.dumps(screened.report, allow_nan=False)
    assert cases / 4 < left_out < cases


def test_nobody_can_spoil_a_round_with_more_than_is_asked_for(federate: Federate):
    def more(reply: flwr.Message) -> None:
        reply.content["metrics"]["other"] = 1.0
        reply.content["others"] = flwr.MetricRecord({"other": 1.0})
        reply.content["more"] = to_record({"more": np.zeros(3)})
        reply.content["about"]["name"] = "client 0"
        arrays = to_numpy(reply.content["arrays"])
        reply.content["arrays"] = to_record({name: arrays[name] for name in sorted(arrays)[::-1]})

    options = ("--clients", 2, "--rounds", 1, "--steps", 1, *FLOAT32)
    plain = federate(*options, name="plain")
    more_sent = federate(*options, name="more")
    assert equal(served(plain), served(more_sent, {1: more}))
    assert [each["name"] for each in more_sent.rounds.record(1)["clients"]] == ["client 0"] * 2


@pytest.mark.parametrize("tells", [True, False], ids=["here", "on another machine"])
def test_a_client_whose_run_fails_is_left_out(federate: Federate, tells: bool):
    whole = federate("--clients", 2, "--rounds", 1, "--steps", 1)
    shutil.rmtree(whole.client(1).data)
    served(whole, tells=tells)
    record = whole.rounds.record(1)
    assert [client["name"] for client in record["clients"]] == ["client 0"]
    (sentence,) = record["left_out"]
    if tells:
        assert sentence.startswith("client 1: ") and str(whole.client(1).data) in sentence
    else:
        assert sentence == "client 1: it could not train; its own log says why."


def test_what_a_stranger_sends_is_shown_without_what_a_terminal_obeys(federate: Federate):
    def named(reply: flwr.Message) -> None:
        reply.content["about"]["name"] = "\x1b[2J" + "Ann" * 1000

    whole = federate("--clients", 1, "--rounds", 1, "--steps", 1)
    served(whole, {0: named})
    (client,) = whole.rounds.record(1)["clients"]
    assert client["name"].startswith(" [2JAnn") and len(client["name"]) == 500


def test_one_server_at_a_time(federate: Federate):
    whole = federate("--clients", 1, "--rounds", 1, "--steps", 1)
    refused = []

    def another(record: dict) -> None:
        with pytest.raises(MespError, match=f"Another server is at work in {whole.folder}"):
            served(whole)
        refused.append(record["round"])

    serve(whole, Here(whole), another, timeout=None)
    assert refused == [0, 1]


def test_a_round_that_nobody_can_serve_ends_in_a_sentence(federate: Federate):
    whole = federate("--clients", 1, "--rounds", 1)
    shutil.rmtree(whole.client(0).data)
    with pytest.raises(MespError, match="Round 1 has adapters of 0 clients and needs 1: client 0"):
        served(whole)
    assert whole.rounds.last == 0


def test_a_killed_server_goes_on_to_the_same_adapters(federate: Federate):
    options = ("--clients", 2, "--rounds", 3, "--steps", 1, "--strategy", "fedadam")
    options += ("--strategy-options", "eta=0.01,beta_1=0.9", *FLOAT32)
    straight, killed = (federate(*options, name=name) for name in ("straight", "killed"))

    def kill(record: dict) -> None:
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve(killed, Here(killed), kill, timeout=None)
    assert killed.rounds.last == 2
    assert equal(served(straight), served(killed))
    assert [r["round"] for r in killed.rounds.records()] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("strategy", "given"),
    [
        ("fedprox", ("proximal_mu=0.1",)),
        ("fedmedian", ()),
        ("trimmed", ("beta=0.3",)),
        ("krum", ("num_malicious_nodes=1",)),
        ("multikrum", ("num_malicious_nodes=1", "num_nodes_to_select=2")),
    ],
)
def test_strategies_of_flower_lower_the_loss(federate: Federate, strategy: str, given: tuple):
    options = ("--clients", 4, "--rounds", 1, "--steps", 3, "--strategy", strategy)
    options += ("--strategy-options", ",".join(given)) if given else ()
    whole = federate(*options)
    served(whole)
    before, after = (record["held_out_loss"] for record in whole.rounds.records())
    assert after < before


def test_krum_passes_over_a_client_that_sends_noise(federate: Federate):
    options = ("--clients", 4, "--rounds", 1, "--steps", 3, *FLOAT32)
    krum = ("--strategy", "krum", "--strategy-options", "num_malicious_nodes=1")
    noise = with_arrays(lambda a: {n: each + 10 for n, each in a.items()})
    losses = []
    for name, more in (("mean", ()), ("krum", krum)):
        whole = federate(*options, *more, name=name)
        served(whole, {1: noise})
        losses.append(whole.rounds.record(1)["held_out_loss"])
    before = whole.rounds.record(0)["held_out_loss"]
    assert losses[1] < before < losses[0]


@pytest.mark.parametrize(
    ("strategy", "given", "sentence"),
    [
        ("fedavg", "eta=1", "`strategy` fedavg has no option eta; it has"),
        ("krum", "num_malicious_nodes=nan", "_nodes': nan}, and must be an object of numbers"),
        ("krum", "num_malicious_nodes=1.9", "num_malicious_nodes=1.9 is not a whole number"),
        ("fedadam", "eta=inf", "'eta': inf}, and must be an object of numbers"),
        ("trimmed", "beta=0.5", "do not suit trimmed: .*beta"),
        ("fedavg", "fraction_train=2", "fraction_train is above 0 and at most 1"),
        ("fedavg", "min_train_nodes=3", "min_train_nodes is above 0 and at most 2"),
    ],
)
def test_options_that_a_strategy_cannot_take_are_refused(
    federate: Federate, tmp_path: Path, strategy: str, given: str, sentence: str
):
    with pytest.raises(MespError, match=sentence):
        federate("--clients", 2, "--rounds", 1, "--strategy", strategy, "--strategy-options", given)
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize("size", [0, 1e-30], ids=str)
def test_a_client_that_changes_almost_nothing_is_averaged(federate: Federate, size: float):
    options = ("--clients", 2, "--rounds", 1, "--steps", 1, "--clip", 0.01)
    whole = federate(*options, *FLOAT32)
    sent: dict[int, Arrays] = {}
    small = with_arrays(
        lambda _: {n: a + np.float32(size) for n, a in whole.rounds.arrays(0).items()}
    )
    averaged = served(whole, {0: keeping(sent, 0), 1: small})
    record = whole.rounds.record(1)
    assert record["left_out"] == [] and len(record["clients"]) == 2
    start = whole.rounds.arrays(0)
    added = np.concatenate([(averaged[n] - start[n]).ravel() for n in start]).astype(np.float64)
    assert np.linalg.norm(added) == pytest.approx(0.01 / 2, rel=1e-5)


def test_adapters_that_cannot_be_evaluated_are_not_kept(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
):
    options = ("--clients", 1, "--rounds", 3, "--steps", 1, "--strategy", "fedadam", *FLOAT32)
    whole = federate(*options, "--strategy-options", "eta=0.01")
    evaluate, said = federations.run_engine, "The loss on the valid data is not finite."
    calls = itertools.count()

    def second_round_fails(settings: dict):
        if next(calls) == 2:
            raise MespError(said)
        return evaluate(settings)

    monkeypatch.setattr(federations, "run_engine", second_round_fails)
    served(whole)
    first, second, third = (whole.rounds.record(number) for number in (1, 2, 3))
    assert second["discarded"] == said and second["clients"]
    assert second["held_out_loss"] == first["held_out_loss"]
    assert equal(whole.rounds.arrays(2), whole.rounds.arrays(1))
    assert "discarded" not in third and third["held_out_loss"] < first["held_out_loss"]
    kept = [np.load(whole.rounds.path(number) / STATE_NAME) for number in (1, 2)]
    assert kept[0].files and all(np.array_equal(kept[0][n], kept[1][n]) for n in kept[0].files)


def test_where_nothing_can_be_evaluated_the_rounds_end(
    federate: Federate, monkeypatch: pytest.MonkeyPatch
):
    whole = federate("--clients", 1, "--rounds", 1, "--steps", 1)
    whole.rounds.save(0, None, {})

    def fails(settings: dict):
        raise MespError("The disk is full.")

    monkeypatch.setattr(federations, "run_engine", fails)
    with pytest.raises(MespError, match="The disk is full"):
        served(whole)
    assert whole.rounds.last == 0


def test_clipping_bounds_what_one_client_adds(federate: Federate):
    options = ("--clients", 2, "--rounds", 1, "--steps", 2, *FLOAT32)
    clipped = federate(*options, "--clip", 0.01)
    after, before = served(clipped), clipped.rounds.arrays(0)
    norm = sum(float(np.square(after[name] - before[name]).sum()) for name in after) ** 0.5
    assert 0 < norm <= 0.01 * (1 + 1e-4)  # 1e-4 for rounding in float32
    noisy = federate(*options, "--clip", 0.01, "--noise", 3, name="n")
    after = served(noisy)
    moved = np.concatenate([(after[name] - before[name]).ravel() for name in after])
    assert moved.std() == pytest.approx(3 * 0.01 / 2, rel=0.05)


@pytest.mark.parametrize("exchange", ["float32", "bfloat16"])
def test_a_client_adds_its_own_noise(federate: Federate, exchange: str):
    options = ("--clients", 1, "--rounds", 1, "--steps", 1, "--exchange", exchange)
    whole = federate(*options)
    after = served(whole, node_config={"clip": 0.01, "epsilon": 0.5, "delta": 1e-5})
    before = whole.rounds.arrays(0)
    added = np.concatenate([(after[name] - before[name]).ravel() for name in after])
    # The client's update is far smaller than its noise. The noise is for a sensitivity of 2 · 0.01.
    assert added.std() == pytest.approx(0.02 * noise_for(0.5, 1e-5), rel=0.05)


def delta_of(noise: float, epsilon: float) -> float:
    """Returns δ(ε) of the Gaussian mechanism, integrated over its privacy loss.

    δ is the mean of max(0, 1 - e^(ε - loss)).
    """
    losses = np.linspace(epsilon, epsilon + 60 / noise, 2_000_001)
    density = np.exp(-np.square(losses - 1 / (2 * noise**2)) * noise**2 / 2)
    density *= noise / np.sqrt(2 * np.pi)
    return float(np.trapezoid(density * -np.expm1(epsilon - losses), losses))


@pytest.mark.parametrize("epsilon", [0.1, 1, 8.5, 20])
def test_a_noise_has_the_privacy_that_is_said(epsilon: float):
    noise = noise_for(epsilon, 1e-5)
    assert delta_of(noise, epsilon) == pytest.approx(1e-5, rel=1e-3)
    assert gaussian_epsilon(noise, 1e-5) == pytest.approx(epsilon, rel=1e-6)
    classic = np.sqrt(2 * np.log(1.25e5)) / epsilon
    assert (delta_of(classic, epsilon) <= 1e-5) == (epsilon < 8.5)


def test_rounds_add_up_as_an_accountant_has_it():
    for noise, count in ((1.0, 8), (4.0, 100)):
        accountant = pld.PLDAccountant()
        accountant.compose(dp_event.GaussianDpEvent(noise), count)
        total = gaussian_epsilon(noise, 1e-5, count)
        assert total == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


def test_each_round_tells_the_privacy_of_all_so_far(federate: Federate):
    options = ("--clients", 2, "--rounds", 2, "--steps", 1, "--clip", 0.01, "--noise", 2)
    whole = federate(*options, "--delta", 1e-4)
    served(whole)
    records = whole.rounds.records()
    assert "epsilon" not in records[0]
    for number in (1, 2):
        assert records[number]["delta"] == 1e-4
        assert records[number]["epsilon"] == gaussian_epsilon(2, 1e-4, number)
    total = f"ε {gaussian_epsilon(2, 1e-4, 2):.2f} at δ 0.0001"
    assert f"{total} so far" in line(records[2], 2, records[1])
    assert f"over all rounds: {total}." in summary(whole)
    plain = federate(*options[:-2], name="p")
    served(plain)
    assert "epsilon" not in plain.rounds.record(1) and "ε" not in summary(plain)


def test_a_client_counts_its_answers(federate: Federate, caplog: pytest.LogCaptureFixture):
    options = ("--clients", 1, "--rounds", 2, "--steps", 1, *FLOAT32)
    whole = federate(*options)
    with caplog.at_level("INFO", logger="flwr"):
        served(whole, node_config={"clip": 0.01, "epsilon": 1.0, "delta": 1e-5})
    said = re.findall(r"Answer (\d) has noise: all so far are \((.*?), 1e-05\)", caplog.text)
    both = gaussian_epsilon(noise_for(1, 1e-5), 1e-5, 2)
    assert said == [("1", "1"), ("2", f"{both:.3g}")] and 1 < both < 2


def test_a_client_trains_privately(
    federate: Federate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    data, private = tmp_path / "data", {"dp_clip": 1.0, "dp_noise": 1.5, "dp_delta": 1e-4}
    data.mkdir()
    records = ({"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(60))
    (data / "records.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    options = ("--clients", 2, "--rounds", 2, "--steps", 3, "--batch-size", 2, *FLOAT32)
    whole = federate(*options)
    find = Federation.client
    monkeypatch.setattr(
        Federation,
        "client",
        lambda self, n: replace(find(self, n), privacy={} if n else private),
    )
    with caplog.at_level("INFO", logger="flwr"):
        served(whole)
    assert len(whole.rounds.record(2)["clients"]) == 2
    said = re.findall(r"Each of (\d+) training .*\((.*?), 0.0001\)-.* the (\d) steps", caplog.text)
    count = int(said[0][0])
    totals = [f"{epsilon_of_steps([Steps(n, 1.5, 2 / count)], 1e-4):.3g}" for n in (3, 6)]
    assert 20 < count < 30 and said == [(f"{count}", totals[0], "3"), (f"{count}", totals[1], "6")]


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"clip": 0.01, "eps": 1.0, "delta": 1e-5}, "needs the numbers clip, epsilon and delta"),
        ({"epsilon": 1.0}, "needs the numbers clip, epsilon and delta"),
        ({"clip": 0.01, "epsilon": 0.0, "delta": 1e-5}, "are finite and above 0"),
        ({"clip": 0.01, "epsilon": 1e9, "delta": 1e-5}, "is at most 1000: more hides nothing"),
        ({"clip": 0.01, "epsilon": 1.0, "delta": 1.25}, "delta of --node-config is a probability"),
        ({"clip": 0.01, "epsilon": 1.0, "delta": 0.0}, "delta of --node-config is a probability"),
        ({"bundle": "b", "eps": 1.0}, "has no eps, only name, bundle, data, clip, epsilon, delta"),
        ({"bundle": "b", "dp_clip": 1.0}, "needs the numbers dp_clip, dp_noise and dp_delta"),
    ],
)
def test_a_client_sends_nothing_without_the_noise_that_it_asked_for(own: dict, sentence: str):
    config = flwr.ConfigRecord({"exchange": "float32"})
    content = flwr.RecordDict({"arrays": to_record({}), "config": config})
    question = flwr.Message(content, dst_node_id=1, message_type="train")
    context = flwr.Context(1, 1, own, flwr.RecordDict(), {})
    with pytest.raises(ValueError, match=sentence):
        app(question, context)


def run_process(*arguments: object) -> subprocess.CompletedProcess:
    line = command("federate", *arguments)
    return succeeded(subprocess.run(line, capture_output=True, text=True))


def test_flowers_simulation_gives_the_same_adapters(
    federate: Federate, bundle: Path, data: Path, tmp_path: Path
):
    options = ("--clients", 2, "--rounds", 2, "--steps", 2, "--freeze-a")
    done = run_process(bundle, "--data", data, "--out", tmp_path / "f", *options)
    simulated = Federation.read(tmp_path / "f")
    here = federate(*options, name="here")
    assert equal(simulated.rounds.arrays(2), served(here))
    assert "Finished 2 rounds" in done.stdout
    shown = done.stderr.splitlines()
    assert [line.partition(":")[0] for line in shown] == ["round 0/2", "round 1/2", "round 2/2"]
    run_process("--out", tmp_path / "f", "--resume", "--rounds", 3)
    assert simulated.rounds.last == 3


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Relay:
    """Foundation for Linux trusts only the system's certificates."""

    def __init__(self, port: int, certificate: Path) -> None:
        self.link, self.trusted = port, ssl.create_default_context(cafile=certificate)
        # one thread, because a TLS connection must not be used by two
        self.loop = asyncio.new_event_loop()
        server = self.loop.run_until_complete(asyncio.start_server(self.bring, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    async def bring(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            link = await asyncio.open_connection("127.0.0.1", self.link, ssl=self.trusted)
            await asyncio.gather(self.copy(reader, link[1]), self.copy(link[0], writer))
        writer.close()

    @staticmethod
    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    def shutdown(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


class Deployment:
    def __init__(self, folder: Path) -> None:
        self.folder, self.log, self.port = folder, folder / "log", free_port()
        self.keys, self.home = folder / "keys", folder / "flwr"
        self.keys.mkdir()
        self.home.mkdir()
        openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-384", "-nodes"),
            *("-keyout", self.keys / "ca.key", "-out", self.keys / "ca.pem", "-days", 2),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        )
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "127.0.0.1:{self.port}"\nroot-certificates = "{self.keys / "ca.pem"}"\n'
        )
        self.tools = Path(sys.executable).parent
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{self.tools}{os.pathsep}{os.environ['PATH']}",
        }
        self.processes: list[subprocess.Popen] = []
        self.relay = Relay(self.port, self.keys / "ca.pem")

    def __enter__(self) -> Deployment:
        self.start(
            *(self.tools / "flower-superlink", "--host", "127.0.0.1", "--port", self.port),
            *("--ssl-ca-certfile", self.keys / "ca.pem", "--ssl-certfile", self.keys / "ca.pem"),
            *("--ssl-keyfile", self.keys / "ca.key", "--enable-supernode-auth"),
            "--disable-runtime-dependency-installation",
        )
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()
        self.relay.shutdown()

    def start(self, *arguments: object) -> subprocess.Popen:
        with self.log.open("a") as file:
            process = subprocess.Popen(
                [*map(str, arguments)],
                env=self.environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def flwr(self, *arguments: object) -> subprocess.CompletedProcess:
        return subprocess.run(
            [self.tools / "flwr", *map(str, arguments)],
            env=self.environment,
            capture_output=True,
            text=True,
        )

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        begun = time.monotonic()
        while not condition():
            hangs = time.monotonic() - begun > HANG
            assert not hangs, f"{what}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.5)

    def register(self, key: Path) -> None:
        self.wait_for(
            lambda: self.flwr("supernode", "register", key, "here").returncode == 0,
            "the SuperLink takes no key",
        )

    def python_node(self, name: str, bundle: Path, data: Path) -> None:
        key = self.keys / name
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", key], check=True
        )
        self.register(key.with_suffix(".pub"))
        self.start(
            *(self.tools / "flower-supernode", "--superlink", f"127.0.0.1:{self.port}"),
            *("--port", free_port(), "--root-certificates", self.keys / "ca.pem"),
            *("--auth-supernode-private-key", key),
            *("--node-config", f'name="{name}" bundle="{bundle}" data="{data}"'),
        )

    def swift_node(self, name: str, bundle: Path, data: Path) -> Callable[[], subprocess.Popen]:
        folder, settings = self.folder / name, self.folder / f"{name}.json"
        given = {"superlink": f"http://127.0.0.1:{self.relay.port}"}
        given |= {"folder": str(folder)}
        given |= {"bundle": str(bundle), "data": str(data), "name": name}
        settings.write_text(json.dumps(given))

        def start() -> subprocess.Popen:
            return self.start(find_engine(), "federate", settings)

        start()
        self.wait_for((folder / "node.pub").exists, "the node makes no key")
        self.register(folder / "node.pub")
        return start

    def run(self, server: Federation) -> None:
        run_process("--out", server.folder, "--resume", "--app")
        succeeded(self.flwr("run", server.folder / "app", "here"))


def test_real_processes_over_tls_with_authentication(
    bundle: Path, federate: Federate, tmp_path: Path
):
    """One of the phones' nodes is killed during the run and started again."""
    options = ("--clients", 3, "--rounds", 3, "--steps", 4, "--freeze-a")
    server = federate(*options, name="server")
    with Deployment(tmp_path) as deployment:
        deployment.python_node("client 0", bundle, server.client(0).data)
        deployment.swift_node("client 1", bundle, server.client(1).data)
        again = deployment.swift_node("client 2", bundle, server.client(2).data)
        joined = "[Fleet.ActivateNode] Activated"
        deployment.wait_for(lambda: deployment.log.read_text().count(joined) == 3, "one is missing")
        deployment.run(server)
        deployment.wait_for(lambda: (server.rounds.last or 0) >= 1, "the first round did not end")
        os.killpg(deployment.processes[-1].pid, signal.SIGKILL)
        again()
        deployment.wait_for(lambda: server.rounds.last == 3, "the rounds did not end")
    for number in (1, 2, 3):
        record = server.rounds.record(number)
        assert [client["name"] for client in record["clients"]] == [f"client {n}" for n in range(3)]
        assert record["left_out"] == []
    simulated = federate(*options, name="simulated")
    assert equal(server.rounds.arrays(3), served(simulated))
