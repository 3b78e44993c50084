from __future__ import annotations

import glob
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from mesp.data.fields import Selection
from mesp.data.source_files import SPLIT_OF, FileName, Row, read_cell, read_file
from mesp.errors import MespError
from mesp.files import read_object, root_of
from mesp.hub_download import download

SAVED = ("state.json", "dataset_dict.json")
# The keys of a dataset's configuration that do not say how its files are read.
OF_FILES = ("name", "version", "data_dir", "data_files", "description")


def is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in SAVED)


def read_dataset(
    data: str, selection: Selection, names: Sequence[str] = ()
) -> dict[str, list[Row]]:
    """Returns the records of a dataset by MeSP's names of splits.

    `data` is a file, a folder or a name on the Hugging Face Hub. Without `selection.splits`, splits
    with known names are read.

    Raises MespError if the library is missing, too old or fails, if one of the files `names` is in
    no split, or if the subset, a split or a file cannot be used.
    """
    try:
        import datasets
    except ImportError as error:
        raise MespError(
            f"{data} is read with the datasets library, which is not there: pip install datasets, "
            "or write the records to a folder with train.jsonl."
        ) from error
    refuse_scripts(datasets)
    datasets.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        found = _find_files(datasets, data, selection.subset, names)
        taken = _find_splits(data, selection.splits, list(found))
        needed = {name for expression in taken.values() for name in _names_in(expression)}
        rows = {name: list(found[name]) for name in needed}
        sizes = {name: len(each) for name, each in rows.items()}
        return {
            ours: [
                row
                for part in datasets.ReadInstruction.from_spec(expression).to_absolute(sizes)
                for row in rows[part.splitname][part.from_ : part.to]
            ]
            for ours, expression in taken.items()
        }
    except MespError:
        raise
    except Exception as error:  # the library raises various errors
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise MespError(
            f"The datasets library cannot read {data}: {reason}; check its name and the network, "
            "or give a folder with train.jsonl."
        ) from error


def refuse_scripts(datasets: ModuleType) -> None:
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise MespError(
            f"The datasets library is {datasets.__version__}, which runs scripts that come with a "
            "dataset: pip install 'datasets>=4'."
        )


def _find_files(
    datasets: ModuleType, data: str, subset: str | None, names: Sequence[str]
) -> dict[str, Iterator[Row]]:
    path = Path(data)
    is_file = path.exists() and not path.is_dir()
    if subset is not None and (is_file or is_saved(path)):
        raise MespError(f"{data} has no subsets; leave out --subset.")
    if is_file:
        return {"train": read_file(path)}
    if is_saved(path):
        return _saved(datasets, data)
    subset = _find_subset(data, subset, datasets.get_dataset_config_names(data))
    builder = datasets.load_dataset_builder(data, subset)
    files = {
        str(split): [_within(data, builder, str(file)) for file in each]
        for split, each in (builder.config.data_files or {}).items()
    }
    used = dict(itertools.chain.from_iterable(files.values()))
    _refuse_ways_of_reading(data, builder.config, used)
    for name in names:
        if name not in used:
            raise MespError(
                f"{data} has {name}, which is in none of the splits {', '.join(files)}; name "
                "the splits to read with --splits."
            )
    return {split: _read(data, each) for split, each in files.items()}


def _saved(datasets: ModuleType, data: str) -> dict[str, Iterator[Row]]:
    """Raises MespError if it names a file outside of it."""
    folder = Path(data)
    for state in (*folder.glob("state.json"), *folder.glob("*/state.json")):
        for file in read_object(state)["_data_files"]:
            if not (state.parent / file["filename"]).resolve().is_relative_to(root_of(folder)):
                raise MespError(
                    f"{data} names a file outside of it, {file['filename']:.200}; do not use it."
                )
    saved = datasets.load_from_disk(data)
    parts = saved if isinstance(saved, dict) else {"train": saved}
    for part in parts.values():
        part.data.validate(full=True)
    return {name: _rows(f"{name} of {data}", part) for name, part in parts.items()}


def _rows(name: str, records: Iterable[dict[str, Any]]) -> Iterator[Row]:
    for number, record in enumerate(records, 1):
        where = f"Record {number} of {name}"
        yield where, {key: read_cell(where, value) for key, value in record.items()}


def _read(data: str, files: Sequence[tuple[str, str | None]]) -> Iterator[Row]:
    for name, revision in files:
        names = [glob.escape(name)]
        folder = Path(data) if revision is None else download("dataset", data, names, revision)
        yield from read_file(folder / name, f"{data}/{name}", root_of(folder))


def _within(data: str, builder: Any, file: str) -> tuple[str, str | None]:
    """Returns a file's name within its dataset and, on the Hub, the revision.

    A dataset's README.md may name any file of this machine.
    """
    folder = Path(data)
    if folder.is_dir():
        if "://" not in file and Path(file).resolve().is_relative_to(root_of(folder)):
            return os.path.relpath(file, folder.resolve()), None
    else:
        at = file.removeprefix(f"hf://datasets/{builder.repo_id}@")
        revision, _, name = at.partition("/")
        if at != file and ".." not in name.split("/"):
            return name, revision
    raise MespError(f"{data} names a file outside of it, {file:.200}; do not use it.")


def _refuse_ways_of_reading(data: str, config: Any, names: Iterable[str]) -> None:
    """Raises MespError if a dataset's README.md sets options for reading its files.

    MeSP's readers ignore such options.
    """
    usual = type(config)()
    ways = [
        each.name
        for each in fields(config)
        if each.name not in OF_FILES and getattr(config, each.name) != getattr(usual, each.name)
    ]
    are_tsv = all(FileName.of(name).kind == ".tsv" for name in names)
    if ways and not (ways == ["sep"] and config.sep == "\t" and are_tsv):
        raise MespError(
            f"{data} says in its README.md how its files are read, by {ways[0]}, which is not "
            "supported; write its records to a folder with train.jsonl."
        )


def _find_subset(data: str, subset: str | None, there: list[str]) -> str:
    if subset is None and (len(there) == 1 or "default" in there):
        return "default" if "default" in there else there[0]
    if subset not in there:
        found = "has no subset " + subset if subset else "has several subsets"
        raise MespError(f"{data} {found}; take one with --subset: {', '.join(there)}.")
    return subset


def _find_splits(data: str, splits: Mapping[str, str], there: list[str]) -> Mapping[str, str]:
    for name in itertools.chain.from_iterable(map(_names_in, splits.values())):
        if name not in there:
            raise MespError(f"{data} has no split {name}; it has {', '.join(there)}.")
    found: dict[str | None, str] = {**splits}
    for name in there if not splits else ():
        ours = SPLIT_OF.get(name.lower())
        if ours and ours in found:
            raise MespError(
                f"{data} has both {found[ours]} and {name}; say with --splits {ours}=NAME which is "
                "read."
            )
        found[ours] = name
    if None in found or "train" not in found:
        raise MespError(
            f"{data} has the splits {', '.join(there)}; say with --splits train=NAME which are "
            "read."
        )
    return {ours: name for ours, name in found.items() if ours}


def _names_in(expression: str) -> list[str]:
    return [re.split(r"[\[(]", part)[0].strip() for part in expression.split("+")]
