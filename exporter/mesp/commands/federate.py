"""mesp-federate: many people train one bundle's adapters, and nobody's text leaves them.

Simulates them on this machine with Flower, or writes the app that Flower runs on real ones.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path

import click
from rich.console import Console

from mesp.bundle.manifest import read_manifest
from mesp.commands.shared_options import ListOptions
from mesp.commands.train_settings import complete, default_output, require, resumed
from mesp.commands.training_options import (
    FROM_ZERO,
    POSITIVE,
    Number,
    adapter_options,
    config_option,
    evaluation_option,
    freeze_a_option,
    memory_options,
    method_option,
    refused_options,
    update_options,
)
from mesp.data.load import DataOptions, tokenize
from mesp.data.store import write_data
from mesp.data.tokens import load_tokenizer
from mesp.errors import MespError, plain_os_errors
from mesp.federate.deployment import write_app
from mesp.federate.exchange import EXCHANGES
from mesp.federate.federation import SETTINGS_NAME, Federation
from mesp.federate.people import Split, read_topics, share_out
from mesp.federate.report import Report, summary
from mesp.federate.strategies import STRATEGIES
from mesp.files import create, write_whole

MAY_CHANGE = ("rounds", "timeout", "resume")


def parse_split(_: click.Context, __: click.Parameter, value: str) -> str:
    """The callback of --split, which stays the text that it is."""
    try:
        Split.parse(value)
    except ValueError as error:
        raise MespError(
            f"--split is iid, by-file or dirichlet:ALPHA with ALPHA above 0, and not {value}."
        ) from error
    return value


def parse_numbers(
    _: click.Context, __: click.Parameter, given: tuple[str, ...]
) -> dict[str, float]:
    """The callback of --strategy-options."""
    try:
        return {key: float(value) for key, value in (pair.split("=") for pair in given)}
    except ValueError as error:
        raise MespError(
            f"--strategy-options takes NAME=NUMBER, as in eta=0.01, and not {' '.join(given)}."
        ) from error


@click.command(
    cls=ListOptions,
    context_settings={"show_default": True, "help_option_names": ["-h", "--help"]},
    short_help="Fine-tune a bundle with the data of many.",
)
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@config_option
@click.option(
    "--data",
    metavar="FILE|DIR|NAME",
    help="What is shared out: a folder with a file a topic, or what mesp-data takes.  [required]",
)
@click.option("--clients", type=click.IntRange(min=1), help="People who take part.  [required]")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds in all.  [required]")
@click.option(
    "--steps", type=click.IntRange(min=1), default=10, help="Updates of a client in a round."
)
@click.option(
    "--split",
    default="iid",
    callback=parse_split,
    metavar="iid|by-file|dirichlet:ALPHA",
    help="Who gets what of the data: any of it, whole files, or of each file a share that differs "
    "the more the smaller ALPHA is.",
)
@click.option(
    "--exchange",
    type=click.Choice(EXCHANGES),
    default="bfloat16",
    help="What adapters travel in.",
)
@click.option(
    "--strategy",
    type=click.Choice(STRATEGIES),
    default="fedavg",
    help="Flower's, which makes one of the clients' adapters.",
)
@click.option(
    "--strategy-options",
    multiple=True,
    metavar="NAME=NUMBER ...",
    callback=parse_numbers,
    help="What Flower's strategy takes, as in eta=0.01 of fedadam.",
)
@click.option("--clip", type=POSITIVE, help="Scale what a client adds down to this norm.")
@click.option(
    "--noise",
    type=FROM_ZERO,
    help="Differential privacy: noise on the mean, as a multiple of --clip / clients.",
)
@click.option(
    "--delta",
    type=Number(min=0, min_open=True, max=1, max_open=True),
    default=1e-5,
    help="δ at which ε is reported with --noise; well below 1 / clients.",
)
@click.option(
    "--min-clients",
    type=click.IntRange(min=1),
    default=1,
    help="End where fewer have answered in a round.",
)
@click.option(
    "--timeout",
    type=Number(min=0, min_open=True, max=1e6),
    default=3600.0,
    help="Seconds that a client has for a round.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="Folder of all rounds.  [default: runs/BUNDLE-federated-TIME]",
)
@click.option("--resume", is_flag=True, help="Go on in --output after its last round.")
@click.option(
    "--app", is_flag=True, help="Simulate nobody: write the Flower app for real machines."
)
@method_option
@adapter_options
@freeze_a_option(default=True)
@update_options
@evaluation_option
@memory_options
@refused_options
@click.pass_context
def main(
    context: click.Context, output: Path | None, paper: bool, app: bool, **options: object
) -> None:
    """Fine-tune BUNDLE, a folder that mesp-export wrote, with the data of many.

    In each round every client trains the adapters on its share, and the next begins with what a
    strategy makes of theirs. Ctrl-C ends it; --resume goes on after the last whole round.
    """
    if importlib.util.find_spec("flwr") is None:
        raise MespError(
            "mesp-federate needs Flower: with Python 3.11 or newer, `pip install 'mesp[federate]'`."
        )
    federation = prepare(context, output, paper, options, simulated=not app)
    if app:
        click.echo(write_app(federation))
        return

    from mesp.federate.simulation import simulate

    try:
        with Report(federation.options["rounds"]) as report:
            simulate(federation, report.show)
    except KeyboardInterrupt:
        click.echo(
            f"Stopped; to go on: mesp-federate --resume --output {federation.output}", err=True
        )
        # Flower's server thread would wait for its clients first.
        os._exit(128 + signal.SIGINT)
    click.echo(summary(federation))


def prepare(
    context: click.Context, output: Path | None, paper: bool, options: dict, simulated: bool = True
) -> Federation:
    """A federation of the command's options, in a folder with its settings and tokens, of all
    clients where they are simulated; or the one that is there to go on with. Raises MespError."""
    if options["bundle"] is not None:
        options["bundle"] = str(options["bundle"].resolve())
    if options["resume"]:
        options = resumed(context, output, options, SETTINGS_NAME, MAY_CHANGE)
    require(context, options, "bundle", "data", "clients", "rounds")
    manifest = read_manifest(Path(options["bundle"]))
    complete(context, options, manifest, paper)
    check(options)
    if output is None:
        output = default_output(manifest, "federated")
    if (output / SETTINGS_NAME).exists() and not options["resume"]:
        raise MespError(
            f"{output} already holds a federation: name another folder with --output, or go on "
            "with it with --resume."
        )
    federation = Federation(output.resolve(), options)
    if not options["resume"]:
        with Console(stderr=True).status("Tokenizing"):
            write_tokens(federation, manifest, simulated)
    write_settings(federation)
    return federation


def check(options: dict) -> None:
    """Refuses, in a sentence, options of a federation that do not go together."""
    if options["noise"] is not None and options["clip"] is None:
        raise MespError("--noise needs --clip, the norm that it is a multiple of.")
    if options["noise"] is not None and 0 < options["noise"] < 1e-3:
        raise MespError("--noise is 0 or at least 0.001: less hides nobody.")
    if options["noise"] is not None and options["strategy"] != "fedavg":
        raise MespError("--noise hides a client in a mean: leave out --strategy.")
    if options["min_clients"] > options["clients"]:
        raise MespError(
            f"--min-clients {options['min_clients']} is more than --clients {options['clients']}."
        )
    if importlib.util.find_spec("flwr") is not None:
        from mesp.federate.strategies import make_strategy

        make_strategy(options)


def write_tokens(federation: Federation, manifest: dict, simulated: bool) -> None:
    """Writes the held-out tokens, and those of clients that are simulated. Raises MespError."""
    options, bundle = federation.options, Path(federation.options["bundle"])
    topics, held_out = read_topics(options["data"])
    documents = {"valid": held_out}
    if simulated:
        split = Split.parse(options["split"])
        shares = share_out(options["data"], topics, options["clients"], split, options["seed"])
        documents |= {federation.client(number).name: each for number, each in enumerate(shares)}
    tokens = tokenize(
        options["data"],
        documents,
        load_tokenizer(bundle),
        max(manifest["seq_lens"]),
        manifest["architecture"]["vocab_size"],
        DataOptions(),
    )
    with plain_os_errors(f"Cannot write the data to {federation.output}"):
        if simulated:
            for client in map(federation.client, range(options["clients"])):
                client.data.mkdir(parents=True, exist_ok=True)
                data = write_data(client.data, "data", {"train": tokens[client.name]})
                write_index(client.data, data)
        federation.held_out.mkdir(parents=True, exist_ok=True)
        data = write_data(federation.held_out, "data", {"valid": tokens["valid"]})
        # An engine's run has data to train on, even where it takes no step.
        write_index(federation.held_out, {"train": data["valid"], **data})


def write_index(folder: Path, data: dict) -> None:
    with create(folder / "data.json") as file:
        file.write(json.dumps(data).encode())


def write_settings(federation: Federation) -> None:
    path = federation.output / SETTINGS_NAME
    settings = {**federation.options, "resume": False}
    with plain_os_errors(f"Cannot write {path}"):
        write_whole(path, (json.dumps(settings, indent=2) + "\n").encode())
