from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from mesp.bundle.data_files import write_data, write_index
from mesp.bundle.manifest import Manifest, read_manifest
from mesp.commands.command import Command
from mesp.commands.config import config_option
from mesp.commands.data_options import data_options, data_options_of, given_data_options
from mesp.commands.fine_tune_type import no_dora_options
from mesp.data.load import DataOptions, tokenize
from mesp.data.tokenizer import load_tokenizer
from mesp.engine.train import SETTINGS_NAME, check_length, default_folder, read_recorded_settings
from mesp.errors import Ended, MespError, plain_os_errors
from mesp.federate.federation import TRAINING, Federation, FederationSettings, write_app
from mesp.federate.partition import Partition, read_topics, share_out
from mesp.federate.rounds_progress import RoundsProgress, summary
from mesp.folders import refuse_linked_folders
from mesp.settings.command_options import add_options, find_given, paper_option, require_values
from mesp.settings.declaration import list_settings, refuse_changes
from mesp.settings.rules import check_use
from mesp.settings.train_settings import TrainSettings

TRAINED = {
    name: declared
    for name, declared in list_settings(TrainSettings).items()
    if declared.federated or name == "val_batches"
}


@click.command(cls=Command)
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@config_option
@add_options(FederationSettings)
@click.option(
    "--out", "output", type=click.Path(path_type=Path),
    show_default="runs/BUNDLE-federated-TIME", help="Folder of all rounds.",
)  # fmt: skip
@data_options
@click.option("--resume", is_flag=True, help="Resume in --out after its last round.")
@click.option(
    "--app", is_flag=True, help="Simulate nobody: write the Flower app for real machines."
)
@add_options(TrainSettings, TRAINING, TRAINED)
@paper_option
@no_dora_options
@click.pass_context
def main(
    context: click.Context, /, bundle: Path | None, output: Path | None, resume: bool, app: bool,
    paper: bool, **_: Any,
) -> None:  # fmt: skip
    """Fine-tune BUNDLE, a folder that mesp-export wrote, with the data of many people.

    In each round every client trains the adapters on its share, and the next begins with what a
    strategy makes of theirs. Ctrl-C ends it; --resume continues after the last whole round.
    """
    if importlib.util.find_spec("flwr") is None:
        raise MespError("mesp federate needs Flower: `pip install 'mesp[federate]'`.")
    federation = prepare_federation(context, simulated=not app)
    if app:
        click.echo(write_app(federation))
        return

    from mesp.federate.simulation import simulate

    try:
        with RoundsProgress(federation.options["rounds"]) as report:
            simulate(federation, report.show)
    except KeyboardInterrupt as interrupt:
        click.echo(
            f"Stopped; to resume: mesp federate --resume --out {federation.folder}", err=True
        )
        # An ordinary exit would wait forever for Flower's server thread.
        os._exit(128 + (interrupt.number if isinstance(interrupt, Ended) else signal.SIGINT))
    click.echo(summary(federation))


def prepare_federation(context: click.Context, simulated: bool = True) -> Federation:
    """Writes the federation's settings."""
    bundle, output, resume = (context.params[name] for name in ("bundle", "output", "resume"))
    own, training = find_given(context, FederationSettings), find_given(context, TrainSettings)
    if resume:
        if changed := given_data_options(context):
            raise MespError(f"A resumed federation keeps its data: leave out {changed[0]}.")
        bundle, settings, trained = read_resumed(output, bundle, own, training)
    else:
        require_values(context, "bundle", "data", "clients", "rounds")
        settings = FederationSettings(**own)
        trained = TrainSettings.of({**TRAINING, **training})
    bundle = bundle.resolve()
    manifest = read_manifest(bundle)
    trained = trained.complete(manifest, context.params["paper"])
    check_use(trained, manifest)
    check_length(bundle, manifest, trained)
    settings.check()
    entries = trained.to_json()
    options = {
        "bundle": str(bundle),
        **settings.to_json(),
        **{each.key: entries[each.key] for each in TRAINED.values()},
        "resume": resume,
    }
    Partition.parse(settings.split)
    if importlib.util.find_spec("flwr") is not None:
        from mesp.federate.strategies import make_strategy

        make_strategy(options)
    if output is None:
        output = default_folder(manifest, "federated")
    if (output / SETTINGS_NAME).exists() and not resume:
        raise MespError(
            f"{output} already holds a federation: name another folder with --out, or "
            "resume it with --resume."
        )
    federation = Federation(output.resolve(), options)
    refuse_linked_folders(federation.folder)
    if not resume:
        with Console(stderr=True).status("Tokenizing"):
            write_tokens(federation, manifest, data_options_of(context.params), simulated)
    federation.write()
    return federation


def read_resumed(
    output: Path | None, bundle: Path | None, own: Mapping[str, Any], training: Mapping[str, Any]
) -> tuple[Path, FederationSettings, TrainSettings]:
    """Returns the bundle, the federation's settings and the training settings of the federation in
    `output`.

    Raises MespError if `output` has no federation's settings, or if a given option would change the
    results.
    """
    if output is None:
        raise MespError("Name the run to resume: --resume --out FOLDER.")
    kinds = (FederationSettings, TrainSettings)
    path, settings, trained = read_recorded_settings(output, SETTINGS_NAME, *kinds)
    if bundle is not None and bundle.resolve() != path:
        raise MespError(
            f"A resumed run keeps its settings: BUNDLE is {path} and cannot become {bundle}."
        )
    refuse_changes(settings, own, list_settings(FederationSettings))
    # In a federation, the number of steps may not change: each round has this number of steps.
    fixed = {name: replace(each, may_change=False) for name, each in TRAINED.items()}
    refuse_changes(trained, training, fixed)
    return path, replace(settings, **own), trained


def write_tokens(
    federation: Federation, manifest: Manifest, data_options: DataOptions, simulated: bool
) -> None:
    options, bundle = federation.options, Path(federation.options["bundle"])
    topics, held_out = read_topics(options["data"], data_options.selection, data_options.hold_out)
    records = {"valid": held_out}
    if simulated:
        split = Partition.parse(options["split"])
        shares = share_out(options["data"], topics, options["clients"], split, options["seed"])
        records |= {federation.client(number).name: each for number, each in enumerate(shares)}
    tokens = tokenize(
        options["data"],
        records,
        load_tokenizer(bundle),
        max(manifest.seq_lens),
        manifest.architecture.vocab_size,
        data_options.encoded_as(manifest.encoding),
    )
    with plain_os_errors(f"Cannot write the data to {federation.folder}"):
        if simulated:
            for client in map(federation.client, range(options["clients"])):
                assert client.data is not None
                client.data.mkdir(parents=True, exist_ok=True)
                data = write_data(client.data, "data", {"train": tokens[client.name]})
                write_index(client.data, data)
        federation.held_out.mkdir(parents=True, exist_ok=True)
        data = write_data(federation.held_out, "data", {"valid": tokens["valid"]})
        # The engine needs a train split, even if it takes no step.
        write_index(federation.held_out, {"train": data["valid"], **data})
