"""The server's rounds, in a folder each: adapters, the log of their evaluation, what was reported.

A round is there when its folder has its name, by one rename; a server that was killed goes on from
the last.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mesp.bundle.manifest import read_manifest
from mesp.errors import MespError, plain_os_errors
from mesp.federate.exchange import Arrays, read_arrays, travelling, write_arrays
from mesp.federate.local_training import run_engine, scale
from mesp.files import create, read_object, remove_link, sync
from mesp.models.architecture import Architecture

RECORD_NAME, STATE_NAME = "round.json", "strategy.npz"


@dataclass(frozen=True)
class Rounds:
    """Rounds in `folder`, of adapters that `training`, settings of mesp-engine's, is about.

    `evaluation` are the settings of a run that only evaluates: bundle, data and how much of it.
    """

    folder: Path
    training: dict[str, Any]
    evaluation: dict[str, Any]

    def path(self, number: int) -> Path:
        """The folder of a round; 0 is where the first begins."""
        return self.folder / f"{number:03d}"

    @property
    def last(self) -> int | None:
        """The number of the last round that is there; None before there is one."""
        found = (each.name for each in self.folder.glob("[0-9]*"))
        return max((int(name) for name in found if name.isdigit()), default=None)

    def records(self) -> list[dict[str, Any]]:
        """What was reported of the rounds that are there, from 0."""
        return [self.record(number) for number in range((self.last or 0) + 1)]

    def record(self, number: int) -> dict[str, Any]:
        """What was reported of a round. Raises MespError."""
        path = self.path(number) / RECORD_NAME
        try:
            return read_object(path)
        except (OSError, ValueError) as error:
            raise MespError(f"{path} is missing or damaged; begin again elsewhere.") from error

    def arrays(self, number: int) -> Arrays:
        """The matrices of a round that travel."""
        arrays = read_arrays(self.path(number) / "adapters")
        return travelling(arrays, self.training["freeze_a"])

    def save(
        self, number: int, arrays: Arrays | None, report: dict[str, Any], state: bytes | None = None
    ) -> dict[str, Any]:
        """Evaluates the matrices that were averaged and keeps them; returns the round's record.

        Without `arrays` they are the initial ones. `state` is what the strategy goes on from. The
        adapters are written by an engine's run of no steps, for mlx-lm and PEFT as any run's.
        """
        partial = self.folder / "partial"
        remove_link(partial)
        shutil.rmtree(partial, ignore_errors=True)
        start = partial / "start"
        settings = self.training | self.evaluation | {"steps": 0, "warmup": 0}
        # Clients keep theirs in bfloat16, perhaps; a mean of them is none.
        settings |= {"lora_dtype": "float32", "output": str(partial / "run")}
        if arrays is not None:
            manifest = read_manifest(Path(settings["bundle"]))
            arch = Architecture.from_manifest(manifest["architecture"])
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
            # After a loss of power a round is there whole or not at all.
            for written in (*(partial / "run").rglob("*"), partial / "run"):
                sync(written)
            os.replace(partial / "run", self.path(number))
            sync(self.folder)
            shutil.rmtree(partial)
        return record
