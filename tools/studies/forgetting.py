"""Measures forgetting of other texts while a model learns a task, and the ways to limit it.

    python tools/studies/forgetting.py            two tasks, three seeds
    python tools/studies/forgetting.py --after    five tasks one after the other

Each task is trained with neither --max-forgetting nor --replay, with --max-forgetting alone, and
with both. A run with --replay has more steps, so that each run has equally many sequences of the
task. Gain is the decrease of the task's held-out loss, as a share of the decrease with neither
option. Forgetting is the rise of perplexity on other texts: Python's documentation, code of
Python's library, the untuned model's answers to questions, and the texts of --text.
"""

import argparse
import inspect
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parents[1]))
import mesp
from demo import write_data
from demo_real import find_model
from demo_rewards import cases as sentences
from mesp.adapters.weighted import weigh
from mesp.bundle.reader import Bundle
from mesp.commands.command import Command
from mesp.data.prompts import encode_prompt
from mesp.data.python_docs import python_docs
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.evaluation.evaluated_model import running_model
from mesp.runs.log import RunLog
from studies.tasks import house_requests, spoken_notes

LIMIT = 3.0  # percent
STEPS = 120
SHARE = 0.1  # the share of replayed sequences
SEQ_LENS = (64, 112, 128)
HELD_OUT = 24
TEXT_CHARACTERS = 6000
ANSWER_TOKENS = 80
OUT = Path("build/forgetting")
Answers = list[tuple[list[int], list[int]]]
OPTIONS: dict[str, Any] = {"schedule": "linear", "val_batches": HELD_OUT}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    f"--max-forgetting {LIMIT:g}": {"max_forgetting": LIMIT},
    f"--replay {SHARE:g} --max-forgetting {LIMIT:g}": {"replay": SHARE, "max_forgetting": LIMIT},
}

QUESTIONS = (
    "What is the capital of France?",
    "Explain photosynthesis to a child.",
    "Write a short poem about the sea.",
    "How do I boil an egg?",
    "Give me three tips for better sleep.",
    "What is the difference between a virus and a bacterium?",
    "Write an email to my boss and ask for a day off.",
    "Why is the sky blue?",
    "Summarize the story of Romeo and Juliet.",
    "List five countries in Africa.",
    "How does a bicycle stay upright?",
    "What can I cook with rice and tomatoes?",
    "Who wrote On the Origin of Species?",
    "Explain what a loan is.",
    "Suggest a name for a cat.",
    "How many days does a year have?",
)


@click.command(cls=Command)
@click.option("--model", help="As mesp-export takes it.  [default: as make demo-real]")
@click.option(
    "--task", "names", multiple=True, default=("notes", "extraction"), show_default=True,
    type=click.Choice(("notes", "extraction", "classification", "cities", "initials")),
    help="Repeatable.",
)  # fmt: skip
@click.option("--after", is_flag=True, help="All five tasks, each after the one before.")
@click.option(
    "--run", "labels", multiple=True, type=click.Choice(tuple(VARIANTS)), default=tuple(VARIANTS),
    help="Only these, and the first. Repeatable.",
)  # fmt: skip
@click.option("--steps", default=STEPS, show_default=True)
@click.option("--seeds", default=3, show_default=True)
@click.option(
    "--text", "files", multiple=True, type=click.Path(exists=True, path_type=Path),
    help="Another text to measure, UTF-8. Repeatable.",
)  # fmt: skip
def main(
    model: str | None, names: tuple[str, ...], after: bool, labels: tuple[str, ...], steps: int,
    seeds: int, files: tuple[Path, ...],
) -> None:  # fmt: skip
    """Measure what fine-tuning forgets, and what it costs to keep it."""
    names = tuple(TASKS) if after else names
    source = model or find_model()
    bundles = {name: export(source, name, steps) for name in names}
    texts = write_texts(files)
    answers = ask(bundles[names[0]])
    base = perplexities(bundles[names[0]], texts, answers, None)
    table = Table("task", "run", "held-out loss", "strength", "gain", *base, "peak MB", "s")
    console = Console(width=200, highlight=False)
    for seed in range(1 if after else seeds):
        adapters: dict[str, Path | None] = dict.fromkeys(VARIANTS)
        for name, bundle in bundles.items():
            gain = None
            for label, options in VARIANTS.items():
                if gain and label not in labels:
                    continue
                study = "after" if after else "alone"
                out = OUT / "runs" / "-".join((study, name, str(seed), *label.split()))
                start = adapters[label] if after else None
                count = round(steps / (1 - options.get("replay", 0)))
                settings = {**OPTIONS, **options, "steps": count, "warmup": count // 20}
                run = learn(bundle, out, seed=seed, adapters=start, **settings)
                adapters[label] = run.adapters
                before, trained = run.held_out
                kept = {"strength": 1.0, "loss_after": trained} | run.strength
                drop = before - kept["loss_after"]
                gain = gain or drop
                perplexity = perplexities(bundle, texts, answers, run.adapters)
                table.add_row(
                    f"{name}, seed {seed}", label, f"{before:.3f} → {kept['loss_after']:.4f}",
                    f"{kept['strength']:.2f}", f"{drop / gain:.1%}",
                    *(f"{value / base[text] - 1:+.1%}" for text, value in perplexity.items()),
                    f"{(run.peak_bytes or 0) / 1e6:.1f}", f"{seconds_of(run):.0f}",
                )  # fmt: skip
            console.print(table)


def export(model: str, name: str, steps: int) -> Bundle:
    data = OUT / name
    write_data(data, train=TASKS[name](steps, False), valid=TASKS[name](HELD_OUT, True))
    return mesp.export(
        model, OUT / f"{name}.mesp", data=str(data), seq_len=SEQ_LENS, overwrite=True
    )


def of_house(name: str, count: int, held_out: bool) -> list[dict]:
    found = house_requests.cases(count, seed=int(held_out), held_out=held_out)
    if name == "classification":
        found = [each._replace(completion=json.loads(each.completion)["do"]) for each in found]
    return [each._asdict() for each in found]


def of_initials(count: int, held_out: bool) -> list[dict]:
    prompts = [
        each.note for each in spoken_notes.cases(count, seed=int(held_out), held_out=held_out)
    ]
    return [
        {
            "prompt": f"Initials of each word: {' '.join(prompt.split()[:6])}",
            "completion": "".join(word[0] for word in prompt.split()[:6]),
        }
        for prompt in prompts
    ]


TASKS = {
    "notes": lambda count, held_out: [
        each._asdict() for each in spoken_notes.cases(count, seed=int(held_out), held_out=held_out)
    ],
    "extraction": lambda count, held_out: of_house("extraction", count, held_out),
    "classification": lambda count, held_out: of_house("classification", count, held_out),
    "cities": lambda count, held_out: sentences(held_out)[:count],
    "initials": of_initials,
}


def write_texts(files: tuple[Path, ...]) -> dict[str, Path]:
    texts = {
        "docs": "\n".join(each.text for each in python_docs()["valid"]),
        "code": inspect.getsource(argparse)[20_000:],
        **{file.stem: file.read_text("utf-8")[20_000:] for file in files},
    }
    OUT.mkdir(parents=True, exist_ok=True)
    written = {}
    for name, each in texts.items():
        written[name] = OUT / f"{name}.jsonl"
        line = json.dumps({"text": each[:TEXT_CHARACTERS]}) + "\n"
        written[name].write_text(line, encoding="utf-8")
    return written


def ask(bundle: Bundle) -> Answers:
    tokenizer = load_bundle_tokenizer(bundle.path)
    found = []
    for question in QUESTIONS:
        asked = encode_prompt(tokenizer, question, True, None)
        answer = mesp.generate(bundle, question, max_tokens=ANSWER_TOKENS)
        found.append((asked, tokenizer.encode(answer, add_special_tokens=False)))
    return found


def perplexities(
    bundle: Bundle, texts: dict[str, Path], answers: Answers, adapters: Path | None
) -> dict[str, float]:
    found = {}
    for name, file in texts.items():
        folders = () if adapters is None else (adapters,)
        rows = mesp.evaluate(bundle, file, adapters=folders, base=not folders, max_length=256).rows
        (found[name],) = [row.estimate.value for row in rows if row.metric == "perplexity"]
    with running_model(
        bundle.path, weigh(adapters), load_bundle_tokenizer(bundle.path), 1024
    ) as model:
        scores = [model.scores(asked, [answer])[0].log_likelihood for asked, answer in answers]
    tokens = sum(len(answer) for _, answer in answers)
    return {**found, "answers": math.exp(-sum(scores) / tokens)}


def learn(bundle: Bundle, out: Path, **settings: Any) -> RunLog:
    """Returns the run in the folder `out`, which is trained if it is not finished."""
    if not (out / "metrics.jsonl").exists() or RunLog.load(out).state() != "finished":
        shutil.rmtree(out, ignore_errors=True)
        mesp.train(bundle, out=out, **settings)
    return RunLog.load(out)


def seconds_of(run: RunLog) -> float:
    """Includes sampling texts, which settings.json precedes, and choosing the strength."""
    began, ended = (
        (run.adapters.parent / name).stat().st_mtime for name in ("settings.json", "metrics.jsonl")
    )
    return ended - began


if __name__ == "__main__":
    main()
