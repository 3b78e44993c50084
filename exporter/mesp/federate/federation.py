from __future__ import annotations

import json
import os
import shutil
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

from mesp.bundle.manifest import read_manifest
from mesp.engine.train import SETTINGS_NAME
from mesp.errors import MespError, plain_os_errors
from mesp.federate.exchange import EXCHANGES, Arrays, read_arrays, select_exchanged, write_arrays
from mesp.federate.local_training import SETTINGS, Client, run_engine, scale
from mesp.files import create, read_object, read_settings, remove_link, sync, write_whole
from mesp.settings.declaration import Setting, Settings, setting

RECORD_NAME, STATE_NAME = "round.json", "strategy.npz"
STRATEGIES = {
    "fedavg": "FedAvg",
    "fedadam": "FedAdam",
    "fedprox": "FedProx",
    "fedmedian": "FedMedian",
    "trimmed": "FedTrimmedAvg",
    "krum": "Krum",
    "multikrum": "MultiKrum",
}


@dataclass(frozen=True, kw_only=True)
class FederationSettings(Settings):
    data: str = setting(
        str, MISSING, "Data to share out: a folder with a file a topic, or any data of mesp data.",
        metavar="FILE|DIR|NAME",
    )  # fmt: skip
    clients: int = setting(int, MISSING, "People who take part.", least=1)
    rounds: int = setting(int, MISSING, "Rounds in all.", least=1, may_change=True)
    split: str = setting(
        str, "iid",
        "The clients' shares of the data: any records, whole files, or of each file a share that "
        "varies the more the smaller ALPHA is.",
        metavar="iid|by-file|dirichlet:ALPHA",
    )  # fmt: skip
    exchange: str = setting(str, "bfloat16", "Type of the exchanged adapters.", choices=EXCHANGES)
    strategy: str = setting(
        str, "fedavg", "Flower's strategy for combining the clients' adapters.",
        choices=tuple(STRATEGIES),
    )  # fmt: skip
    strategy_options: dict[str, float] = field(
        default_factory=dict,
        metadata={
            "setting": Setting(
                dict, "Options of Flower's strategy, as in eta=0.01 of fedadam.",
                metavar="NAME=NUMBER,...",
            )
        },
    )  # fmt: skip
    clip: float | None = setting(
        float, None, "Scale what a client adds down to this norm.", above=0
    )  # fmt: skip
    noise: float | None = setting(
        float, None,
        "Differential privacy: noise on the mean, as a multiple of --clip / clients.", least=0,
    )  # fmt: skip
    delta: float = setting(
        float, 1e-5, "δ at which ε is reported with --noise; well below 1 / clients.", above=0,
        below=1,
    )  # fmt: skip
    min_clients: int = setting(int, 1, "End where fewer have answered in a round.", least=1)
    timeout: float = setting(
        float, 3600.0, "Seconds that a client has for a round.", above=0, most=1e6,
        may_change=True,
    )  # fmt: skip

    def check(self) -> None:
        if self.noise is not None and self.clip is None:
            raise MespError("--noise needs --clip, the norm that it is a multiple of.")
        if self.noise is not None and 0 < self.noise < 1e-3:
            raise MespError("--noise is 0 or at least 0.001: less hides nobody.")
        if self.noise is not None and self.strategy != "fedavg":
            raise MespError("--noise hides a client in a mean: leave out --strategy.")
        if self.min_clients > self.clients:
            raise MespError(
                f"--min-clients {self.min_clients} is more than --clients {self.clients}."
            )


TRAINING = {"steps": 10, "freeze_a": True}


@dataclass(frozen=True)
class Rounds:
    """`training` are the clients' settings for mesp-engine."""

    folder: Path
    training: dict[str, Any]
    evaluation: dict[str, Any]

    def path(self, number: int) -> Path:
        """Round 0 has the initial adapters."""
        return self.folder / f"{number:03d}"

    @property
    def last(self) -> int | None:
        found = (each.name for each in self.folder.glob("[0-9]*"))
        return max((int(name) for name in found if name.isdigit()), default=None)

    def records(self) -> list[dict[str, Any]]:
        return [self.record(number) for number in range((self.last or 0) + 1)]

    def record(self, number: int) -> dict[str, Any]:
        path = self.path(number) / RECORD_NAME
        try:
            return read_object(path)
        except (OSError, ValueError) as error:
            raise MespError(f"{path} is missing or damaged; begin again elsewhere.") from error

    def arrays(self, number: int) -> Arrays:
        arrays = read_arrays(self.path(number) / "adapters")
        return select_exchanged(arrays, self.training["freeze_a"])

    def save(
        self, number: int, arrays: Arrays | None, report: dict[str, Any], state: bytes | None = None
    ) -> dict[str, Any]:
        """Evaluates and saves the averaged matrices, and returns the round's record.

        Without `arrays`, saves the initial matrices.
        """
        partial = self.folder / "partial"
        remove_link(partial)
        shutil.rmtree(partial, ignore_errors=True)
        start = partial / "start"
        settings = self.training | self.evaluation | {"steps": 0, "warmup": 0}
        # Clients may train in bfloat16, but the mean stays float32.
        settings |= {"lora_dtype": "float32", "output": str(partial / "run")}
        if arrays is not None:
            arch = read_manifest(Path(settings["bundle"])).architecture
            write_arrays(start, arrays, self.training["rank"], scale(self.training), arch)
            settings["adapters"] = str(start)
        run = run_engine(settings)
        record = {"round": number, "held_out_loss": run.held_out[0], **report}
        with plain_os_errors(f"Cannot write round {number} to {self.folder}"):
            (partial / "run" / "state.safetensors").unlink()
            if state is not None:
                with create(partial / "run" / STATE_NAME) as file:
                    file.write(state)
            with create(partial / "run" / RECORD_NAME) as file:
                file.write((json.dumps(record, indent=2) + "\n").encode())
            # Syncs the files first, so that a power loss leaves the round whole or absent.
            for written in (*(partial / "run").rglob("*"), partial / "run"):
                sync(written)
            os.replace(partial / "run", self.path(number))
            sync(self.folder)
            shutil.rmtree(partial)
        return record


@dataclass(frozen=True)
class Federation:
    folder: Path
    options: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> Federation:
        """Raises MespError if the settings in `folder` are missing or damaged."""
        path = folder / SETTINGS_NAME
        try:
            options = read_settings(path)
        except (OSError, ValueError) as error:
            raise MespError(
                f"{path} is missing or damaged; write it with mesp federate."
            ) from error
        return cls(folder, options)

    @property
    def training(self) -> dict[str, Any]:
        return {n: self.options[n] for n in SETTINGS if self.options.get(n) is not None}

    @property
    def rounds(self) -> Rounds:
        evaluation = {
            "bundle": self.options["bundle"],
            "data": str(self.held_out),
            "val_batches": self.options["val_batches"],
        }
        return Rounds(self.folder / "rounds", self.training, evaluation)

    @property
    def held_out(self) -> Path:
        return self.folder / "held-out"

    def client(self, number: int) -> Client:
        name = f"client {number:0{len(str(self.options['clients'] - 1))}}"
        return Client(name, Path(self.options["bundle"]), self.folder / "clients" / name[7:])

    @property
    def config(self) -> dict[str, Any]:
        return {
            "model": str(read_manifest(Path(self.options["bundle"])).model),
            "exchange": self.options["exchange"],
            "timeout": self.options["timeout"],
            **self.training,
        }

    def write(self) -> None:
        path = self.folder / SETTINGS_NAME
        settings = {**self.options, "resume": False}
        with plain_os_errors(f"Cannot write {path}"):
            write_whole(path, (json.dumps(settings, indent=2) + "\n").encode())


# The app has no code of its own. It names this package's ServerApp and ClientApp.
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "mesp-federate"
version = "0.1.0"
description = "Federated fine-tuning with MeSP"
license = "MIT"
dependencies = ["mesp[federate]"]

[tool.flwr.app]
publisher = "mesp"

[tool.flwr.app.components]
serverapp = "mesp.federate.server_app:app"
clientapp = "mesp.federate.client_app:app"

[tool.flwr.app.config]
output = {output}
"""


def write_app(federation: Federation) -> str:
    folder = federation.folder / "app"
    with plain_os_errors(f"Cannot write {folder}"):
        folder.mkdir(exist_ok=True)
        text = PROJECT.format(output=json.dumps(str(federation.folder), ensure_ascii=False))
        write_whole(folder / "pyproject.toml", text.encode())
    return f"Start it where the SuperLink runs: flwr run {folder} --stream"
