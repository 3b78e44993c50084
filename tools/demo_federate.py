"""The program of `make demo-federate`: six clients teach one model to turn requests into JSON.

By default, each client has requests about one thing in a house, such as lights or doors. The
held-out requests are about all six things.
"""

import json
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import click

from demo import OUT as DEMO_OUT
from demo import RANK, SEQ_LEN, call, program, write_data
from mesp.commands.command import Command
from mesp.federate.federation import Federation
from mesp.formatting import decimal, megabytes
from studies.tasks.house_requests import DO, cases

ROUNDS, STEPS, BATCH_SIZE = 8, 10, 2
RATE = 2e-3
CASES, HELD_OUT_CASES = 1200, 50
OUT = DEMO_OUT.with_name("demo-federate")
# Ways of averaging adapters, with their options for `mesp federate`.
KINDS = {"B alone (FFA-LoRA)": (), "A and B apart": ("--no-freeze-a",)}


@click.command(cls=Command)
@click.option("--both", is_flag=True, help="Average A and B apart too, to compare.")
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS)
@click.option("--split", default="by-file", help="As mesp federate's.")
@click.option("--seed", type=int, default=0, help="As mesp federate's.")
@click.option("--learning-rate", type=float, default=RATE, help="As mesp federate's.")
@click.option("--out", type=click.Path(path_type=Path), default=OUT)
def main(both: bool, rounds: int, split: str, seed: int, learning_rate: float, out: Path) -> None:
    """Simulate six people and draw the loss of each round."""
    began = time.monotonic()
    bundle, data = out / "demo.mesp", out / "requests"
    requests = {what: [] for what in DO}
    for case in cases(CASES, seed=0, held_out=False):
        requests[json.loads(case.completion)["what"]].append(case)
    write_data(data, **requests, valid=cases(HELD_OUT_CASES, seed=1, held_out=True))
    call(
        *(program("mesp-export"), "--model", "demo", "--out", bundle, "--overwrite"),
        *("--seq-len", SEQ_LEN, "--rank", RANK),
    )
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    found = {}
    kinds = list(KINDS.items())[: None if both else 1]
    for number, (kind, options) in enumerate(kinds):
        output = out / "runs" / f"{stamp}-{number}"
        call(
            *(program("mesp"), "federate", bundle, "--data", data, "--clients", len(DO)),
            *("--batch-size", BATCH_SIZE, "--alpha", 2 * RANK, "--out", output),
            *("--rounds", rounds, "--split", split, "--seed", seed),
            *("--learning-rate", learning_rate, "--steps", STEPS),
            *("--val-batches", HELD_OUT_CASES, *options),
        )
        found[kind] = Federation.read(output).rounds.records()
    picture = out / "rounds.png"
    draw(picture, found)
    for kind, records in found.items():
        click.echo(f"{kind}: {described(records)}")
    click.echo(f"{time.monotonic() - began:.0f} s in all. The rounds, drawn: {picture}")


def described(records: list[dict[str, Any]]) -> str:
    clients = sum(len(record["clients"]) for record in records[1:])
    down, up = (sum(r[f"bytes_{way}"] for r in records[1:]) / clients for way in ("down", "up"))
    drift, error = (mean(r[name] for r in records[1:]) for name in ("drift", "averaging_error"))
    return (
        f"held-out loss {decimal(records[0]['held_out_loss'], 3)} before, "
        f"{decimal(records[-1]['held_out_loss'], 3)} after {len(records) - 1} rounds; "
        f"{megabytes(down)} MB down and {megabytes(up)} MB up a client and round; "
        f"drift {decimal(drift)}, error of the average {decimal(100 * error, 1)}%."
    )


def draw(path: Path, found: dict[str, list[dict[str, Any]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    loss, apart = figure.subplots(1, 2)
    for kind, records in found.items():
        numbers = [record["round"] for record in records]
        loss.plot(numbers, [record["held_out_loss"] for record in records], "o-", label=kind)
        line = apart.plot(numbers[1:], [r["drift"] for r in records[1:]], "o-", label=kind)
        errors = [record["averaging_error"] for record in records[1:]]
        apart.plot(numbers[1:], errors, "x--", color=line[0].get_color())
    loss.set(xlabel="round", ylabel="held-out loss (nats a token)")
    apart.set(xlabel="round", ylabel="drift; dashed: error of the average")
    loss.set_yscale("log")
    loss.yaxis.set_major_formatter("{x:g}")
    loss.yaxis.set_minor_formatter("{x:g}")
    apart.set_ylim(bottom=0)
    for axes in (loss, apart):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
