import json
import math
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.utils import dequantize_model

import mesp
from helpers.commands import call, run
from mesp import reference
from mesp.adapters.held_out_loss import measure_held_out_loss
from mesp.adapters.load import apply_adapters, read_adapters, stack_adapters
from mesp.bundle.reader import Bundle
from mesp.data.load import read_general_text
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.engine.replay_texts import find_opening, sample_replay_texts
from mesp.errors import MespError
from mesp.runs.log import RunLog

pytestmark = pytest.mark.slow
SEQ_LEN = 32
VAL_BATCHES = 4
GENERAL_SEQUENCES = 16


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("forgetting") / "demo.mesp"
    call("export", "--model", "demo", "--out", out, "--seq-len", SEQ_LEN)
    return out


def train(bundle: Path, out: Path, *options: object, steps: int = 12) -> RunLog:
    typed = ("--steps", steps, "--val-batches", VAL_BATCHES, "--learning-rate", 2e-3)
    call("train", bundle, *typed, "--out", out, *options)
    return RunLog.load(out)


def model_with(bundle: Path, adapters: Path | None) -> nn.Module:
    opened = mesp.load(bundle)
    model = opened.to_mlx_lm()
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    if adapters is not None:
        read = read_adapters(adapters, opened.architecture)
        apply_adapters(model, stack_adapters([(read, 1.0)], model))
    return model


def general_logs(model: nn.Module, bundle: Path, file: Path | None = None) -> tuple:
    """Returns log p of all words at each position of the general text, and the targets."""
    vocab_size = mesp.load(bundle).manifest.architecture.vocab_size
    text = read_general_text(file, load_bundle_tokenizer(bundle), vocab_size)
    tokens = text.tokens.astype(np.int32)
    logs, targets = [], []
    for start in range(0, min(len(tokens) - 1, GENERAL_SEQUENCES * SEQ_LEN), SEQ_LEN):
        ids = mx.array(tokens[start : start + SEQ_LEN + 1])
        logits = np.array(model(ids[None, :-1])[0], dtype=np.float64)
        logs.append(logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True))
        targets += ids[1:].tolist()
    return np.concatenate(logs), targets


def general_loss(model: nn.Module, bundle: Path, file: Path | None = None) -> float:
    logs, targets = general_logs(model, bundle, file)
    return -logs[np.arange(len(targets)), targets].mean()


def test_the_losses_of_the_log_are_those_of_mlx_lm(bundle: Path, tmp_path: Path):
    plain = train(bundle, tmp_path / "plain")
    kept = train(bundle, tmp_path / "kept", "--max-forgetting", 0.5)
    untuned = model_with(bundle, None)
    before = general_loss(untuned, bundle)
    rise = math.exp(general_loss(model_with(bundle, plain.adapters), bundle) - before) - 1
    assert rise > 0.005
    record, tuned = kept.strength, model_with(bundle, kept.adapters)
    opened = mesp.load(bundle)
    p, q = (general_logs(model, bundle)[0] for model in (untuned, tuned))
    # The engine and mlx-lm compute in float32, and sum in different orders.
    for found, expected in (
        (record["general_before"], before),
        (record["general_after"], general_loss(tuned, bundle)),
        (record["general_kl"], (np.exp(p) * (p - q)).sum(axis=-1).mean()),
        (record["loss_before"], measure_held_out_loss(untuned, opened, SEQ_LEN, VAL_BATCHES)),
        (record["loss_after"], measure_held_out_loss(tuned, opened, SEQ_LEN, VAL_BATCHES)),
    ):
        assert found == pytest.approx(expected, rel=1e-5)
    assert math.exp(record["general_after"] - record["general_before"]) - 1 <= 0.005
    assert 0 < record["strength"] < 1
    assert record["loss_after"] < record["loss_before"]
    assert kept.losses == plain.losses


def test_a_text_of_ones_own_decides(bundle: Path, tmp_path: Path):
    text = tmp_path / "own.txt"
    text.write_text(load_bundle_tokenizer(bundle).decode(mesp.load(bundle).tokens("train")[:600]))
    given = ("--max-forgetting", 0, "--general", text, "--val-batches", VAL_BATCHES)
    done = call("train", bundle, "--steps", 12, "--out", tmp_path / "run", *given)
    record = RunLog.load(tmp_path / "run").strength
    assert record["strength"] == 1
    expected = general_loss(model_with(bundle, None), bundle, text)
    assert record["general_before"] == pytest.approx(expected, rel=1e-5)
    assert "Kept the adapters at 1.00 of their strength" in done.stdout


def test_none_are_kept_where_held_out_loss_rises(bundle: Path, tmp_path: Path):
    first = train(bundle, tmp_path / "first")
    wild = ("--optimizer", "sgd", "--max-forgetting", 1, "--adapters", first.adapters)
    wild += ("--val-batches", VAL_BATCHES)
    wild += ("--learning-rate", 30, "--out", tmp_path / "wild")
    done = call("train", bundle, "--steps", 4, *wild)
    assert "Kept no adapters" in done.stdout
    kept = RunLog.load(tmp_path / "wild")
    assert kept.strength["strength"] == 0
    assert kept.strength["loss_after"] == kept.strength["loss_before"]
    expected = general_loss(model_with(bundle, kept.adapters), bundle)
    assert kept.strength["general_after"] == pytest.approx(expected, rel=1e-5)
    files = (str(each.adapters / "adapters.safetensors") for each in (first, kept))
    before, after = map(mx.load, files)
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[name], after[name]) for name in before)


def test_a_finished_run_goes_on_from_adapters_at_full_strength(bundle: Path, tmp_path: Path):
    train(bundle, tmp_path / "run", "--max-forgetting", 0.5, steps=4)
    call("train", "--resume", "--out", tmp_path / "run", "--steps", 6)
    resumed = RunLog.load(tmp_path / "run")
    whole = train(bundle, tmp_path / "whole", "--max-forgetting", 0.5, steps=6)
    assert resumed.losses == whole.losses
    assert resumed.strength["strength"] == whole.strength["strength"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--general", "FILE"), "--general has no use without --max-forgetting"),
        (("--max-forgetting", "-1"), "x>=0"),
        (("--max-forgetting", 3, "--val-batches", 0), "--max-forgetting needs evaluations"),
        (("--max-forgetting", 3, "--general", "MISSING"), "There is no file"),
        (("--max-forgetting", 3, "--general", "EMPTY"), "no tokens"),
        (("--max-forgetting", 3, "--general", "BINARY"), "not UTF-8 text"),
        (("--max-forgetting", 3, "--general", "RECORDS"), "is a file of records; give a text"),
        (("--replay", 1), "0<x<1"),
        (("--replay-data", "MISSING"), "--replay-data has no use without --replay"),
        (("--replay", 0.2, "--dp-clip", 1, "--dp-noise", 1), "--dp-clip does not go together"),
        (("--replay", 0.2, "--replay-data", "MISSING"), "MISSING.txt"),
    ],
)
def test_what_cannot_be_used_is_refused(bundle: Path, tmp_path: Path, options: tuple, said: str):
    files = {name: tmp_path / f"{name}.txt" for name in ("FILE", "MISSING", "EMPTY", "BINARY")}
    files["RECORDS"] = tmp_path / "records.jsonl"
    files["RECORDS"].write_text('{"text": "A text."}')
    files["FILE"].write_text("A text.")
    files["EMPTY"].write_text("")
    files["BINARY"].write_bytes(b"\xff\xfe\xfd")
    typed = [files.get(each, each) for each in options]
    out = tmp_path / "run"
    done = run("train", bundle, "--steps", 2, "--out", out, *typed)
    assert done.returncode == 2, done.stderr
    assert said in " ".join(done.stderr.split())
    assert not out.exists()


def test_a_log_without_a_choice_has_none(bundle: Path, tmp_path: Path):
    plain = train(bundle, tmp_path / "plain", steps=1)
    assert plain.strength == {} and plain.describe_strength() is None
    assert "general" not in json.loads((tmp_path / "plain" / "settings.json").read_text())


def losses_of(
    model: nn.Module, tokens: np.ndarray, examples: np.ndarray, first: int
) -> list[float]:
    found = []
    for start, length in examples.tolist():
        ids = mx.array(tokens[start : start + length].astype(np.int32))
        losses = nn.losses.cross_entropy(model(ids[None, :-1])[0], ids[1:])
        found.append(losses[first - 1 :].mean().item())
    return found


def tokens_of(run: Path) -> tuple[np.ndarray, np.ndarray]:
    entry = json.loads((run / "replay" / "data.json").read_text())["train"]
    words = {
        name: np.fromfile(run / "replay" / file, "<u4")
        for name, file in (("tokens", entry["file"]), ("examples", entry["examples"]["file"]))
    }
    return words["tokens"], words["examples"].reshape(-1, 2)


def test_a_share_of_the_sequences_is_replayed(bundle: Path, tmp_path: Path):
    still = ("--learning-rate", 1e-12)
    plain = train(bundle, tmp_path / "plain", *still, steps=10)
    mixed = train(bundle, tmp_path / "mixed", *still, "--replay", 0.3, steps=10)
    replayed = [(step + 1) * 3 // 10 - step * 3 // 10 for step in range(10)]
    assert [step["replayed"] for step in mixed.steps] == replayed
    trained = [loss for loss, own in zip(mixed.losses, replayed, strict=True) if not own]
    assert trained == pytest.approx(plain.losses[: len(trained)], rel=1e-5)
    tokens, examples = tokens_of(tmp_path / "mixed")
    untuned, first = model_with(bundle, None), len(find_opening(load_bundle_tokenizer(bundle)))
    known = losses_of(untuned, tokens, examples, first)
    order = [reference.step_window(i, 0, len(examples)) for i in range(sum(replayed))]
    found = [loss for loss, own in zip(mixed.losses, replayed, strict=True) if own]
    assert found == pytest.approx([known[i] for i in order], rel=1e-5)


def test_own_texts_are_drawn_from_the_model(bundle: Path):
    """The sum of -log p of the sampled tokens is the sum of their distributions' entropies, within
    four standard deviations.
    """
    tokenizer = load_bundle_tokenizer(bundle)
    texts = sample_replay_texts(bundle, None, tokenizer, 24, SEQ_LEN, seed=3)
    assert texts.tokens.shape == (24 * (SEQ_LEN + 1),)
    start = find_opening(tokenizer)
    model, differences, variance = model_with(bundle, None), 0.0, 0.0
    for row in texts.tokens.reshape(24, -1).astype(np.int32):
        assert row[: len(start)].tolist() == start
        logits = model(mx.array(row[None, :-1]))[0, len(start) - 1 :].astype(mx.float32)
        logs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True), np.float64)
        shares = np.exp(logs)
        entropies = -(shares * logs).sum(1)
        differences += (-logs[np.arange(len(logs)), row[len(start) :]] - entropies).sum()
        variance += ((shares * logs**2).sum(1) - entropies**2).sum()
    assert abs(differences) < 4 * variance**0.5
    again = sample_replay_texts(bundle, None, tokenizer, 24, SEQ_LEN, seed=3)
    other = sample_replay_texts(bundle, None, tokenizer, 24, SEQ_LEN, seed=4)
    assert np.array_equal(texts.tokens, again.tokens)
    assert not np.array_equal(texts.tokens, other.tokens)


def test_a_resumed_run_replays_as_a_whole_one(bundle: Path, tmp_path: Path):
    records = tmp_path / "older.jsonl"
    texts = ("It rained. " * n for n in range(9, 40))
    records.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ("--replay", 0.4, "--replay-data", records, "--batch-size", 2)
    whole = train(bundle, tmp_path / "whole", *options, steps=8)
    train(bundle, tmp_path / "parts", *options, steps=5)
    call("train", "--resume", "--out", tmp_path / "parts", "--steps", 8)
    parts = RunLog.load(tmp_path / "parts")
    assert parts.losses == whole.losses
    assert sum(step["replayed"] for step in parts.steps) == 6


def test_older_records_become_tokens_as_the_bundles_did(bundle: Path, tmp_path: Path):
    copy, tokenizer = shutil.copytree(bundle, tmp_path / "copy.mesp"), load_bundle_tokenizer(bundle)
    record = {"prompt": f"It rained.{tokenizer.eos_token}", "completion": " Nobody went out."}
    records = tmp_path / "records.jsonl"
    records.write_text(f"{json.dumps(record)}\n" * 9)
    call("data", copy, "--data", records, "--no-chat", "--split-special-tokens")
    train(copy, tmp_path / "run", "--replay", 0.5, "--replay-data", records, steps=1)
    data = np.fromfile(tmp_path / "run" / "replay" / "data" / "train.bin", "<u4")
    expected = Bundle(copy).tokens("valid")
    assert data[: len(expected)].tolist() == expected.tolist()
    assert "user:" not in tokenizer.decode(expected.tolist())


def test_folders_of_the_user_are_left_alone(bundle: Path, tmp_path: Path):
    notes = [tmp_path / name / "notes.txt" for name in ("general", "replay")]
    for each in notes:
        each.parent.mkdir()
        each.write_text("mine")
    done = run("train", bundle, "--steps", 2, "--out", tmp_path, "--memory-limit", 1)
    assert done.returncode == 2, done.stderr
    assert [each.read_text() for each in notes] == ["mine", "mine"]


def test_texts_of_a_run_that_never_began_are_not_taken(bundle: Path, tmp_path: Path):
    options = ("--max-forgetting", 100, "--general")
    out, general = tmp_path / "run", tmp_path / "general.txt"
    general.write_text("It rained, and nobody went out. " * 20)
    killed = train(bundle, tmp_path / "killed", "--max-forgetting", 100, steps=1)
    out.mkdir()
    (killed.folder / "general").rename(out / "general")
    record = train(bundle, out, *options, general, steps=1).strength
    expected = general_loss(model_with(bundle, None), bundle, general)
    assert record["general_before"] == pytest.approx(expected, rel=1e-5)


def test_a_resumed_run_needs_the_texts_that_it_replays(bundle: Path, tmp_path: Path):
    out = tmp_path / "run"
    train(bundle, out, "--replay", 0.5, steps=2)
    shutil.rmtree(out / "replay")
    done = run("train", "--resume", "--out", out, "--steps", 4)
    assert done.returncode == 2
    assert "is missing" in done.stderr and "Traceback" not in done.stderr


def test_an_opening_that_fills_a_sequence_is_refused(bundle: Path):
    class Tokenizer:
        has_chat_template, _chat_template, chat_template = True, "", ""

        def apply_chat_template(self, messages: list[dict], **_: object) -> str:
            return messages[0]["content"]

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1] * SEQ_LEN + [2, ord(text)]

    with pytest.raises(MespError, match="`replay_data`"):
        sample_replay_texts(bundle, None, Tokenizer(), 4, SEQ_LEN, seed=0)
