from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mesp.adapters.config import CONFIG
from mesp.errors import MespError
from mesp.settings.declaration import is_held

MOST_WEIGHT = 10.0

StrPath = str | os.PathLike[str]


class WeightedAdapters(NamedTuple):
    """A folder of adapters, and the factor of their change to the model. The factor 0 leaves the
    folder out.
    """

    folder: Path
    weight: float


def weigh(
    adapters: StrPath | Sequence[StrPath] | None, weights: Sequence[float] = ()
) -> tuple[WeightedAdapters, ...]:
    """Returns each folder with its weight, which is 1 if no weights are given.

    Raises MespError if weights are given and their number is not that of the folders, if a weight
    is not a number from 0 to `MOST_WEIGHT`, or if `check_folder` refuses a folder.
    """
    folders, given = list_folders(adapters), [float(weight) for weight in weights]
    if given and not folders:
        raise MespError("--weights needs --adapters.")
    if given and len(given) != len(folders):
        raise MespError(
            f"The number of --weights is {len(given)}, and that of --adapters {len(folders)}; "
            "give a weight for each folder."
        )
    for weight in given:
        if not 0 <= weight <= MOST_WEIGHT:
            raise MespError(f"--weights has {weight:g}; give numbers from 0 to {MOST_WEIGHT:g}.")
        if not is_held(weight):
            raise MespError(f"--weights has {weight:g}, which is 0 in float32; give 0.")
    for folder in folders:
        check_folder(folder)
    return tuple(map(WeightedAdapters, folders, given or [1.0] * len(folders)))


def check_folder(folder: Path) -> None:
    """Raises MespError if there is no such folder, or if the adapters are in its subfolder
    `adapters`."""
    if not folder.is_dir():
        raise MespError(f"There is no folder {folder}; name one with adapters.")
    if not (folder / CONFIG).exists() and (folder / "adapters" / CONFIG).exists():
        raise MespError(
            f"{folder} is a run's folder, with its adapters in another: name {folder / 'adapters'}."
        )


def list_folders(adapters: StrPath | Sequence[StrPath] | None) -> list[Path]:
    if adapters is None:
        return []
    given = [adapters] if isinstance(adapters, str | os.PathLike) else adapters
    return [Path(each) for each in given]


def describe(adapters: Sequence[WeightedAdapters]) -> str:
    return " + ".join(
        str(folder) if weight == 1 else f"{weight:g} * {folder}" for folder, weight in adapters
    )
