"""Measures how well a model learns the 77 intents of Banking77 from ten sentences of each.

    python tools/studies/intents.py --peft PYTHON                PYTHON has PEFT and PyTorch
    python tools/studies/intents.py --data DIR --solutions DIR   the data sets' files in folders

The prompt is the sentence alone, the completion the intent's name. An answer is right if it is that
name to the letter. The test has ten other sentences of each intent; nothing was chosen on it. PEFT
has the same weights, dequantized, and the engine's initial adapters, order and learning rate. Its
AdamW is PyTorch's. PyTorch corrects AdamW's bias; *no correction* is the engine's update. Solutions
are GSM8K's, and no run reads them. An interval holds 95% of the draws of a bootstrap over the
sentences.
"""

import math
import random
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import click
import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))
import mesp
from demo import write_data
from demo_real import find_model
from mesp.bundle.reader import Bundle
from mesp.commands.command import Command
from mesp.data.hub_datasets import read_dataset
from mesp.data.load import DataOptions
from mesp.data.prompts import encode_prompt
from mesp.data.sources import Selection
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.errors import MespError
from mesp.evaluation.metrics import Metric, compare
from mesp.runs.log import RunLog
from studies.forgetting import learn, perplexities
from studies.in_peft.learn import learn_with_peft

OUT = Path("build/intents")
TEST = OUT / "test.jsonl"
SEQ_LENS = (40, 48, 64, 128)
EACH = 10  # sentences of an intent
BATCH_SIZE = 8
MAX_TOKENS = 16
SOLUTIONS = 100
NAMES = ("category", "label_text")  # of the column with the intent
PEFT: dict[str, dict[str, Any]] = {"PEFT": {}, "PEFT, no correction": {"bias_correction": False}}


class Result(NamedTuple):
    right: list[bool]
    nats: float  # per token of the solutions
    run: RunLog


def read(data: str, split: str, subset: str | None = None) -> list[dict[str, Any]]:
    selection = Selection(None if Path(data).exists() else subset, {"train": split})
    return [row for _, row in read_dataset(data, selection)["train"] if isinstance(row, dict)]


def draw(data: str, split: str, seed: int) -> list[dict[str, str]]:
    texts: dict[str, list[str]] = defaultdict(list)
    for row in read(data, split):
        name = next((row[column] for column in NAMES if column in row), None)
        if name is None or "text" not in row:
            raise MespError(f"{data} lacks the column text, or {' or '.join(NAMES)}.")
        texts[name.replace("_", " ")].append(row["text"].strip())
    generator, found = random.Random(seed), []
    for name in sorted(texts):
        drawn = generator.sample(texts[name], EACH)
        found += [{"prompt": text, "completion": name} for text in drawn]
    return generator.sample(found, len(found))


def measure(bundle: Bundle, solved: list[dict[str, Any]], run: RunLog, *adapters: Path) -> Result:
    found = mesp.evaluate(bundle, TEST, adapters=adapters, base=not adapters, max_tokens=MAX_TOKENS)
    tokenizer = load_bundle_tokenizer(bundle.path)
    answers = [
        (encode_prompt(tokenizer, each["question"], True), tokenizer.encode(each["answer"]))
        for each in solved
    ]
    perplexity = perplexities(bundle, {}, answers, *adapters or (None,))["answers"]
    right = [each["exact_match"] for each in found.samples[0]]
    return Result(right, math.log(perplexity), run)


@click.command(cls=Command)
@click.option("--model", help="As mesp-export takes it.  [default: as make demo-real]")
@click.option("--data", default="mteb/banking77", show_default=True, help="A folder or a Hub name.")
@click.option("--solutions", default="openai/gsm8k", show_default=True, help="Likewise.")
@click.option("--peft", type=click.Path(path_type=Path), help="A Python with PEFT and PyTorch.")
@click.option("--steps", default=100, show_default=True)
@click.option("--seeds", default=1, show_default=True)
def main(
    model: str | None, data: str, solutions: str, peft: Path | None, steps: int, seeds: int
) -> None:
    """Measure how well a model learns 77 intents, and what it keeps."""
    source, solved = model or find_model(), read(solutions, "test", "main")[:SOLUTIONS]
    write_data(OUT, test=draw(data, "test", 0))
    found: dict[str, list[Result]] = defaultdict(list)
    for seed in range(seeds):
        write_data(OUT / str(seed), train=draw(data, "train", seed))
        bundle = mesp.export(
            source, OUT / f"{seed}.mesp", data=str(OUT / str(seed)), seq_len=SEQ_LENS,
            overwrite=True, data_options=DataOptions(hold_out=0),
        )  # fmt: skip
        if not seed:
            found["none"].append(measure(bundle, solved, RunLog()))
        options = {"steps": steps, "batch_size": BATCH_SIZE, "seed": seed, "val_batches": 0}
        run = learn(bundle, OUT / f"{seed}-mesp", **options)
        found["MeSP"].append(measure(bundle, solved, run, run.adapters))
        for number, (name, more) in enumerate(PEFT.items()):
            if peft:
                out = OUT / f"{seed}-peft-{number}"
                other = learn_with_peft(peft, bundle, run, out, **more)
                found[name].append(measure(bundle, solved, other, out / "adapters"))
        Console(width=200, highlight=False).print(make_table(found))


def make_table(found: dict[str, list[Result]]) -> Table:
    table = Table("trainer", "right", "- MeSP", "nats a token of solutions", "s", "peak MB")
    right = {
        name: Metric.of(name, np.mean([one.right for one in each], 0).tolist())
        for name, each in found.items()
    }
    for name, each in found.items():
        share, apart = compare([right["MeSP"], right[name]])[1]
        shown = [
            "{:{form}} ({:{form}} … {:{form}})".format(*vars(estimate).values(), form=form)
            for estimate, form in ((share, ".1%"), (apart, "+.1%"))
        ]
        seconds = mean(sum(step["seconds"] for step in one.run.steps) for one in each)
        peak = max(one.run.peak_bytes or 0 for one in each) / 1e6
        lost = mean(one.nats for one in each)
        table.add_row(name, *shown, f"{lost:.3f}", f"{seconds:.0f}", f"{peak:.1f}")
    return table


if __name__ == "__main__":
    main()
