"""Compares a federation with training alone and with training on all data in one place.

    python tools/studies/federations.py --plot federation.png

Each of the demo's six clients has requests of one kind, and the held-out requests are of all kinds.
All runs start from the same matrices. The optimizer's state is reset in each round. The run on all
data takes as many steps as the six clients together. All adapters are evaluated in mlx-lm. Needs
Flower.
"""

from __future__ import annotations

import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import NamedTuple

sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in ("tools", "tests"))
from helpers import openblas  # noqa: F401, before MLX

# isort: split
import click
import mlx.core as mx

from demo import SEQ_LEN
from demo_federate import BATCH_SIZE, OUT, RATE, ROUNDS, STEPS, export, federated, write_data
from mesp.bundle.reader import Bundle
from mesp.commands.command import Command
from mesp.federate.federation import Federation, Rounds
from mesp.federate.local_training import Client, train
from mesp.formatting import decimal, megabytes
from studies.benchmarks.plot import check_plot, write
from studies.benchmarks.show import show
from studies.comparison.scores import model_with, score
from studies.comparison.trainers import multiply_dequantized
from studies.tasks.bundles import Task
from studies.tasks.house_requests import DO

HELD_OUT_CASES = 100
CLIP, NOISES = 2.0, (0.1, 1.0)
DELTA = 1e-5
# Federations, with their options for `mesp federate`.
FEDERATED = "federated"
FEDERATIONS = {
    FEDERATED: (),
    **{
        f"noise {noise:g}": ("--clip", CLIP, "--noise", noise, "--delta", DELTA) for noise in NOISES
    },
}


class Round(NamedTuple):
    """A round's held-out loss in nats per token, and its share of exact answers."""

    loss: float
    exact: float


@click.command(cls=Command)
@click.option("--rounds", type=click.IntRange(min=1), default=ROUNDS)
@click.option("--steps", type=click.IntRange(min=1), default=STEPS, help="Of a client in a round.")
@click.option("--split", default="by-file", help="As mesp federate's.")
@click.option("--seed", type=int, default=0, help="As mesp federate's.")
@click.option("--learning-rate", type=float, default=RATE, help="As mesp federate's.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw them: *.png, *.svg or *.pdf.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=OUT.with_name("federate-study"),
    help="A folder, replaced.",
)
def main(
    rounds: int,
    steps: int,
    split: str,
    seed: int,
    learning_rate: float,
    plot: Path | None,
    out: Path,
) -> None:
    """Train on the data of six people in these ways, and compare the results by round."""
    if plot:
        check_plot(plot)
    mx.set_default_device(mx.cpu)
    multiply_dequantized()
    shutil.rmtree(out, ignore_errors=True)
    bundle, data = out / "demo.mesp", out / "requests"
    write_data(data, HELD_OUT_CASES)
    export(bundle, "--data", in_one_place(data, out / "in-one-place"))
    options = ("--rounds", rounds, "--steps", steps, "--split", split, "--seed", seed)
    options += ("--learning-rate", learning_rate)
    federations = {
        name: federated(bundle, data, out / name, *options, *more)
        for name, more in FEDERATIONS.items()
    }
    first = federations[FEDERATED]
    people = [first.client(number) for number in range(len(DO))]
    everyone = Client("together", people[0].bundle)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        together = pool.submit(by_oneself, first, everyone, len(people))
        alone = [*pool.map(lambda person: by_oneself(first, person), people)]
    runs = {"alone": alone}
    runs |= {name: [each.rounds] for name, each in federations.items()}
    runs |= {"together": [together.result()]}

    task = Task("requests", SEQ_LEN, BATCH_SIZE, steps, HELD_OUT_CASES)
    opened = Bundle(bundle)
    found = {
        name: [measure_round(opened, task, each, number) for number in range(rounds + 1)]
        for name, each in runs.items()
    }
    if plot:
        draw(plot, found)
    for number, what in enumerate(("held-out loss", "answered to the letter")):
        click.echo(f"\n{what}, by round")
        show(
            [
                {"round": str(at)} | {name: shown(each[at])[number] for name, each in found.items()}
                for at in range(rounds + 1)
            ]
        )
    click.echo()
    show([cells(name, each) for name, each in federations.items()])


def in_one_place(data: Path, folder: Path) -> Path:
    """Writes the training data of all clients into one file, and returns the folder."""
    folder.mkdir()
    files = sorted(file for file in data.iterdir() if file.stem != "valid")
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    (folder / "train.jsonl").write_text(text, encoding="utf-8")
    shutil.copy(data / "valid.jsonl", folder)
    return folder


def by_oneself(federation: Federation, client: Client, people: int = 1) -> Rounds:
    """Trains one client alone with the same rounds as the federation.

    In each round, the client takes as many steps as `people` clients of the federation.
    """
    folder = federation.folder / "by-oneself" / client.name
    rounds = Rounds(folder, federation.training, federation.rounds.evaluation)
    rounds.save(0, None, {})
    arrays = rounds.arrays(0)
    config = federation.config | {"steps": people * federation.options["steps"]}
    for number in range(1, federation.options["rounds"] + 1):
        arrays = train(client, arrays, config | {"server-round": number}).arrays
        rounds.save(number, arrays, {})
    return rounds


def measure_round(bundle: Bundle, task: Task, runs: list[Rounds], number: int) -> Round:
    """Returns the mean held-out result of several runs after a round."""
    adapters = [run.path(number) / "adapters" for run in runs]
    scores = [score(model_with(bundle, each), bundle, task) for each in adapters]
    return Round(mean(each.loss for each in scores), mean(each.exact.mean() for each in scores))


def shown(round: Round) -> tuple[str, str]:
    return decimal(round.loss, 3), f"{round.exact:.0%}"


def cells(name: str, federation: Federation) -> dict[str, str]:
    """Returns a row of the table: the traffic of a client in a round, the mean drift of the
    clients, and ε.
    """
    records = federation.rounds.records()[1:]
    clients = sum(len(record["clients"]) for record in records)
    ways = (sum(r[f"bytes_{way}"] for r in records) / clients for way in ("down", "up"))
    return {
        "federation": name,
        "MB a client and round": " + ".join(map(megabytes, ways)),
        "drift": decimal(mean(record["drift"] for record in records)),
        f"ε at δ = {DELTA:g}": decimal(records[-1].get("epsilon"), 0),
    }


def draw(path: Path, found: dict[str, list[Round]]) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(9, 4), layout="constrained")
    loss, exact = figure.subplots(1, 2)
    for name, rounds in found.items():
        loss.plot([each.loss for each in rounds], "o-", label=name)
        exact.plot([100 * each.exact for each in rounds], "o-", label=name)
    loss.set(xlabel="round", ylabel="held-out loss (nats a token)", yscale="log")
    loss.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    loss.yaxis.set_major_formatter("{x:g}")
    loss.yaxis.set_minor_formatter("")
    exact.set(xlabel="round", ylabel="answered to the letter, %", ylim=(-4, 104))
    for axes in (loss, exact):
        axes.grid(alpha=0.3)
    exact.legend(fontsize="small")
    write(figure, path, dpi=100)


if __name__ == "__main__":
    sys.exit(main())
