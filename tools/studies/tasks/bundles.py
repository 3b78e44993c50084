from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from mesp import reference
from mesp.bundle.reader import Bundle
from mesp.errors import MespError
from studies.tasks import house_requests

RANK, ALPHA = 16, 32
SCALE = ALPHA / RANK


@dataclass(frozen=True)
class Task:
    """A task. Each of `steps` steps trains on `batch_size` sequences of `seq_len` tokens.

    `rate` is AdamW's learning rate. `held_out` sequences are scored. `answers` says how an answer
    is compared: "letter" compares the whole text, and "number" the final number. With None, answers
    are not compared.
    """

    name: str
    seq_len: int
    batch_size: int
    steps: int
    held_out: int
    answers: Literal["letter", "number"] | None = "letter"
    rate: float = 2e-3


EXTRACTION = Task("extraction", 96, 4, 120, 200)
CLASSIFICATION = Task("classification", 64, 4, 60, 200)
TEXT = Task("text", 128, 2, 60, 60, answers=None)
TASKS = (EXTRACTION, CLASSIFICATION, TEXT)
# For models of a billion parameters and more.
GSM8K = Task("gsm8k", 384, 8, 500, 200, answers="number", rate=2e-4)
GSM8K_DATA = "openai/gsm8k"


def export(
    task: Task,
    model: str,
    folder: Path,
    gsm8k: str = GSM8K_DATA,
    more_lengths: Iterable[int] = (),
) -> Path:
    """Exports a model with a task's data, and returns the bundle's path.

    The bundle has the task's sequence length and `more_lengths`. `gsm8k` is the data source for the
    task GSM8K.
    """
    bundle = folder / f"{task.name}.mesp"
    if task.name == GSM8K.name:
        columns = ("--columns", "prompt=question,completion=answer")
        splits = ("--splits", f"train=train,valid=test[:{task.held_out}]")
        data = (gsm8k, "--subset", "main", *splits, *columns)
    else:
        data = ("python-docs" if task.name == TEXT.name else write_data(task, folder / task.name),)
    command(
        "mesp.commands.export",
        *("--model", model, "--out", bundle, "--overwrite"),
        *("--seq-len", ",".join(map(str, (task.seq_len, *more_lengths))), "--rank", RANK),
        *("--data", *data),
    )
    return bundle


def write_data(task: Task, folder: Path) -> Path:
    """Writes requests with their answers as JSONL, and returns the folder.

    An answer is the whole command as JSON or, for classification, only its action.
    """
    splits = {
        "train": house_requests.cases(task.steps * task.batch_size, seed=0, held_out=False),
        "valid": house_requests.cases(task.held_out, seed=1, held_out=True),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for split, cases in splits.items():
        if task.name == CLASSIFICATION.name:
            cases = [case._replace(completion=json.loads(case.completion)["do"]) for case in cases]
        lines = "".join(json.dumps(case._asdict()) + "\n" for case in cases)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return folder


def command(module: str, *arguments: object) -> None:
    line = [sys.executable, "-c", f"from {module} import main; main()", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        said = done.stderr.strip().removeprefix("Error: ")
        raise MespError(said or f"{module} failed.")


def batches(bundle: Bundle, task: Task, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the batches that the engine trains on, in the engine's order.

    A batch has the token ids, int32 [batch_size, seq_len + 1], padded with 0, and whether each
    target is in the loss, bool [batch_size, seq_len].
    """
    tokens, examples, mask = bundle.tokens("train"), bundle.examples("train"), bundle.mask("train")
    if examples is None:
        windows = (len(tokens) - 1) // task.seq_len
        examples = np.array([(i * task.seq_len, task.seq_len + 1) for i in range(windows)])
    begin = bundle.begin("train") if bundle.examples("train") is None else None
    counts = np.ones(len(tokens), np.uint8) if mask is None else mask
    found = []
    for step in range(task.steps):
        ids = np.zeros((task.batch_size, task.seq_len + 1), np.int32)
        counted = np.zeros((task.batch_size, task.seq_len), bool)
        for row in range(task.batch_size):
            sequence = reference.step_window(step * task.batch_size + row, seed, len(examples))
            start, length = examples[sequence].tolist()
            ids[row, :length] = tokens[start : start + length]
            if begin is not None:
                ids[row, 0] = begin
            counted[row, : length - 1] = counts[start + 1 : start + length]
        found.append((ids, counted))
    return found
