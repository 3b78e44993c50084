from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesp.bundle.manifest import read_manifest
from mesp.bundle.model_card import write_terms_of_run
from mesp.engine.process import failure, running
from mesp.errors import MespError, plain_os_errors
from mesp.federate.exchange import Arrays, read_arrays, write_arrays
from mesp.runs.log import LOG_NAME, RunLog
from mesp.settings.declaration import list_settings
from mesp.settings.train_settings import TrainSettings

# The settings of a client's run that a server may set.
SETTINGS = tuple(each.key for each in list_settings(TrainSettings).values() if each.federated)


@dataclass(frozen=True)
class Client:
    """`data` is a folder of tokens, or None for the bundle's own data."""

    name: str
    bundle: Path
    data: Path | None = None
    privacy: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """`targets` is the number of trained tokens in the loss."""

    arrays: Arrays
    targets: int
    loss: float
    footprint: int
    examples: int | None


def train(client: Client, received: Arrays, config: Mapping[str, Any]) -> Trained:
    """Trains from the `received` float32 matrices with the server's `config`.

    The optimizer and the learning rate's schedule start again in each round. The order of the data
    and the random numbers continue. Raises MespError if the run fails or takes more than
    ``timeout`` seconds, if all of its steps were skipped, or if the bundle's model is not the
    server's.
    """
    manifest = read_manifest(client.bundle)
    model, arch = str(manifest.model), manifest.architecture
    if config["model"] != model:
        raise MespError(
            f"{client.bundle} is a bundle of {model}, and the round is for {config['model']}."
        )
    settings = {name: config[name] for name in SETTINGS if name in config}
    settings |= client.privacy
    if config.get("proximal-mu"):  # sent by FedProx
        settings["proximal_mu"] = config["proximal-mu"]
    with tempfile.TemporaryDirectory(prefix="mesp-federate-") as folder:
        start, output = Path(folder, "start"), Path(folder, "run")
        write_arrays(start, received, settings["rank"], scale(settings), arch)
        settings |= {
            "bundle": str(client.bundle),
            "data": None if client.data is None else str(client.data),
            "adapters": str(start),
            "output": str(output),
            "first_step": (config["server-round"] - 1) * settings["steps"],
            "val_batches": 0,
            "save_every": 0,
        }
        run = run_engine(settings, config["timeout"])
        arrays = read_arrays(output / "adapters")
    if not run.losses:
        raise MespError("All of its steps were skipped: no loss was finite.")
    return Trained(
        arrays={name: arrays[name] for name in received},
        targets=sum(step["tokens"] for step in run.steps),
        loss=sum(run.losses) / len(run.losses),
        footprint=run.peak_bytes or 0,
        examples=run.plan.get("examples"),
    )


def run_engine(settings: dict[str, Any], timeout: float | None = None) -> RunLog:
    output = Path(settings["output"])
    path = output / "settings.json"
    with plain_os_errors(f"Cannot write to {output}"):
        output.mkdir(parents=True)
        path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    with running([], path, timeout=timeout) as engine:
        for _ in engine:
            pass
    run = RunLog.load(output) if (output / LOG_NAME).exists() else RunLog()
    if engine.process.returncode != 0 or run.end.get("reason") != "finished":
        raise failure(engine.process.returncode, engine.said)
    bundle = Path(settings["bundle"])
    with plain_os_errors(f"Cannot write to {output}"):
        write_terms_of_run(bundle, read_manifest(bundle), output)
    return run


def scale(settings: Mapping[str, Any]) -> float:
    rank = settings["rank"]
    return float(settings["alpha"] / (math.sqrt(rank) if settings["rslora"] else rank))
