from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.utils import dequantize_model, load_model

from mesp.adapters.held_out_loss import read_sequences
from mesp.adapters.load import apply_adapters, read_adapters, stack_adapters
from mesp.bundle.reader import Bundle
from mesp.data.python_docs import python_docs
from mesp.data.source_files import read_text
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.evaluation.metrics import bootstrap, interval
from studies.tasks.bundles import TEXT, Task
from studies.tasks.gsm8k_number import final_number

RESAMPLES = 10_000
TEXT_WINDOWS = 40  # windows of the text that measures forgetting
# keeps mlx-lm from running Python code that config.json names as model_file
DATA = {"model_file": None}


class Scores(NamedTuple):
    """Scores of the held-out sequences, as float64 arrays [n].

    `losses` has each sequence's summed loss in nats, `targets` its number of targets in the loss,
    and `exact` whether the model's greedy answer is right.
    """

    losses: np.ndarray
    targets: np.ndarray
    exact: np.ndarray

    @property
    def loss(self) -> float:
        return self.losses.sum() / self.targets.sum()


def model_with(bundle: Bundle, adapters: Path | None, base: Path | None = None) -> nn.Module:
    """Returns mlx-lm's model in float32 with the weights of the bundle, or of the Hugging Face
    model `base`, and with the adapters if there are any.
    """
    model = bundle.to_mlx_lm() if base is None else load_model(base, model_config=DATA)[0]
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    if adapters is not None:
        read = read_adapters(adapters, bundle.architecture)
        apply_adapters(model, stack_adapters([(read, 1.0)], model))
    return model


def score(model: nn.Module, bundle: Bundle, task: Task) -> Scores:
    tokenizer = load_bundle_tokenizer(bundle.path)
    rows = []
    for ids, counts in islice(read_sequences(bundle, "valid", task.seq_len), task.held_out):
        logits, targets = model(mx.array(ids[None, :-1]))[0], mx.array(ids[1:])
        losses = nn.losses.cross_entropy(logits, targets) * mx.array(counts)
        if task.answers == "number":
            start = int(counts.argmax()) + 1
            written = write(model, ids[:start], task.seq_len - start, tokenizer.eos_token_id)
            number = final_number(tokenizer.decode(ids[start:].tolist()))
            right = number is not None and final_number(tokenizer.decode(written)) == number
        # Greedy decoding would write the answer if each of its tokens is the likeliest one.
        else:
            missed = (mx.argmax(logits, axis=-1) != targets) * mx.array(counts)
            right = missed.sum().item() == 0
        rows.append((losses.sum().item(), counts.sum(), right))
    return Scores(*np.array(rows, np.float64).T)


def write(model: nn.Module, prompt: np.ndarray, most: int, end: int) -> list[int]:
    """Returns at most `most` greedily generated tokens, up to but not including the token `end`."""
    tokens = (token for token, _ in generate_step(mx.array(prompt), model, max_tokens=most))
    return [*takewhile(lambda token: token != end, tokens)]


def other_text(bundle: Bundle, task: Task, file: Path | None) -> np.ndarray | None:
    """Returns the token ids of a text outside of the task, int32 [n], to measure forgetting.

    The text is the end of `file` or, without a file, of the held-out part of Python's
    documentation.
    """
    if file is not None:
        text = read_text(file)
    elif task.name == TEXT.name:
        return None
    else:
        text = "\n".join(each.text for each in python_docs()["valid"])
    count = TEXT_WINDOWS * task.seq_len + 1
    characters = text[-10 * count :]  # A token has about 3 characters.
    return np.array(load_bundle_tokenizer(bundle.path).encode(characters)[-count:], np.int32)


def loss_of_text(model: nn.Module, ids: np.ndarray, seq_len: int) -> float:
    rows = (len(ids) - 1) // seq_len
    total = 0.0
    for start in range(0, rows * seq_len, seq_len):
        window = mx.array(ids[start : start + seq_len + 1])
        total += nn.losses.cross_entropy(model(window[None, :-1])[0], window[1:]).mean().item()
    return total / rows


class Difference(NamedTuple):
    mean: float
    low: float
    high: float

    def is_within(self, margin: float) -> bool:
        return -margin <= self.low and self.high <= margin


def paired(
    ours: Sequence[Scores], theirs: Sequence[Scores], *, what: str, seed: int = 0
) -> Difference:
    """Returns the difference, ours less theirs, of the loss per token or of the share of exact
    answers.

    Both scores of a pair have the same seed.
    """
    if what == "loss":
        above = sum(a.losses - b.losses for a, b in zip(ours, theirs, strict=True))
        below = sum(a.targets for a in ours)
    else:
        above = sum(a.exact - b.exact for a, b in zip(ours, theirs, strict=True))
        below = np.full(len(ours[0].exact), float(len(ours)))
    drawn = bootstrap(above, below, RESAMPLES, seed)
    return Difference(above.sum() / below.sum(), *interval(drawn))
