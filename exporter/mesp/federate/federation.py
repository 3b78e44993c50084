"""What a federation is: the options of mesp-federate, as its settings.json has them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesp.bundle.manifest import read_manifest
from mesp.errors import MespError
from mesp.federate.local_training import SETTINGS, Client, model_name
from mesp.federate.rounds import Rounds
from mesp.files import read_object

SETTINGS_NAME = "settings.json"


@dataclass(frozen=True)
class Federation:
    """A federation in the folder `output`, with the options of mesp-federate by name."""

    output: Path
    options: dict[str, Any]

    @classmethod
    def read(cls, output: Path) -> Federation:
        """The one whose settings are in `output`. Raises MespError where there are none."""
        path = output / SETTINGS_NAME
        try:
            options = read_object(path)
        except (OSError, ValueError) as error:
            raise MespError(
                f"{path} is missing or damaged; write it with mesp-federate."
            ) from error
        return cls(output, options)

    @property
    def training(self) -> dict[str, Any]:
        """mesp-engine's settings of a client's run, those that are set."""
        return {n: self.options[n] for n in SETTINGS if self.options.get(n) is not None}

    @property
    def rounds(self) -> Rounds:
        evaluation = {
            "bundle": self.options["bundle"],
            "data": str(self.held_out),
            "val_batches": self.options["val_batches"],
        }
        return Rounds(self.output / "rounds", self.training, evaluation)

    @property
    def held_out(self) -> Path:
        """The folder of tokens that the server evaluates on."""
        return self.output / "held-out"

    def client(self, number: int) -> Client:
        """A simulated client, from 0, with the folder of its tokens."""
        name = f"client {number:0{len(str(self.options['clients'] - 1))}}"
        return Client(name, Path(self.options["bundle"]), self.output / "clients" / name[7:])

    @property
    def config(self) -> dict[str, Any]:
        """What a client is told in each round, beside its number: docs/federation.md lists it."""
        return {
            "model": model_name(read_manifest(Path(self.options["bundle"]))),
            "exchange": self.options["exchange"],
            "timeout": self.options["timeout"],
            **self.training,
        }
