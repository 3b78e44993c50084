import json
import math
from pathlib import Path

import pytest

import mesp
from helpers.commands import run
from mesp import DataOptions
from mesp.bundle.reader import Bundle

CHATS = [{"prompt": f"What is {n} + {n}?", "completion": f"It is {2 * n}."} for n in range(23)]
PAIRS = [{"prompt": f"Is {n} even?", "chosen": "Count.", "rejected": "No."} for n in range(11)]
TEXT = "Our fathers brought forth a nation, conceived in liberty. " * 40


def export(folder: Path, source: list[dict] | str, pack: bool = False) -> Bundle:
    if isinstance(source, str):
        data, text = folder / "data.txt", source
    else:
        data, text = folder / "data.jsonl", "".join(json.dumps(each) + "\n" for each in source)
    data.write_text(text)
    options = None if isinstance(source, str) else DataOptions(pack=pack)
    return mesp.export(
        "demo", folder / "demo.mesp", data=str(data), data_options=options, seq_len=64, rank=4
    )


def targets(bundle: Bundle) -> int:
    """The targets of one pass: of examples those that the mask counts."""
    mask = bundle.mask("train")
    assert mask is not None
    return int(mask.sum())


@pytest.mark.parametrize("pack", [True, False])
def test_an_epoch_trains_each_target_once(tmp_path: Path, pack: bool):
    bundle = export(tmp_path, CHATS, pack)
    trained = mesp.train(bundle, out=tmp_path / "run", epochs=2, val_batches=0, save_every=0)
    assert sum(step["tokens"] for step in trained.steps) == 2 * targets(bundle)


@pytest.mark.parametrize("epochs", [0.3, 1, 2.5])
@pytest.mark.parametrize(
    ("records", "options", "size"),
    [
        (CHATS, [], 1),
        (CHATS, ["--batch-size", 3, "--grad-accumulation-steps", 2], 6),
        (CHATS, ["--dp-clip", 1, "--dp-noise", 1, "--batch-size", 4], 4),
        (CHATS, ["--replay", 0.25, "--batch-size", 2], 1.5),
        (PAIRS, ["--objective", "dpo", "--batch-size", 2], 2),
        (TEXT, ["--batch-size", 2], 2),
    ],
)
def test_epochs_become_steps(
    tmp_path: Path, records: list[dict] | str, options: list, size: float, epochs: float
):
    bundle = export(tmp_path, records)
    entry = bundle.manifest.data["train"]
    examples = bundle.examples("train")
    count = entry.tokens // 64 if examples is None else len(examples)
    count //= 2 if records is PAIRS else 1
    steps = max(1, math.ceil(epochs * count / size))
    done = run("train", bundle.path, "--epochs", epochs, "--dry-run", *options)
    said = f"{epochs:g} epoch{'s' * (epochs != 1)} take {steps} steps."
    assert done.returncode == 0, done.stderr
    assert said in done.stdout.splitlines()


def test_a_resumed_run_has_all_its_epochs(tmp_path: Path):
    bundle = export(tmp_path, CHATS)
    quick = {"batch_size": 4, "val_batches": 0, "save_every": 0}
    whole = mesp.train(bundle, out=tmp_path / "whole", epochs=2, **quick)
    first = mesp.train(bundle, out=tmp_path / "run", epochs=1, **quick)
    resumed = mesp.train(out=tmp_path / "run", resume=True, epochs=2)
    assert resumed.losses[: len(first.losses)] == first.losses
    assert resumed.losses == whole.losses


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--epochs", 1, "--steps", 3], "--epochs takes the place of --steps"),
        (["--epochs", 0], "--epochs has 0; give a number above 0."),
        (["--epochs", "nan"], "--epochs has nan; give a number above 0."),
        (["--epochs", 1e9], "steps of a run; lower them."),
        (["--epochs", 1, "--warmup", 100], "--warmup 100 does not end within --steps"),
        ([], "Missing option '--steps'"),
    ],
)
def test_other_lengths_are_refused(tmp_path: Path, options: list, said: str):
    bundle = export(tmp_path, CHATS)
    done = run("train", bundle.path, "--out", tmp_path / "run", *options)
    assert done.returncode == 2 and said in done.stderr
    assert not (tmp_path / "run").exists()
