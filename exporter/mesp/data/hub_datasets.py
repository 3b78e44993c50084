"""Data that the `datasets` library reads: parquet, and datasets with configurations and splits."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mesp.errors import MespError
from mesp.files import root_of

# The names of each split in datasets, where none is given.
NAMES = {
    "train": ("train",),
    "valid": ("validation", "valid", "val", "dev"),
    "test": ("test",),
}
FORMATS = {".parquet": "parquet", ".jsonl": "json"}


def read_rows(
    data: str, subset: str | None, splits: dict[str, str]
) -> dict[str, list[dict[str, Any]]]:
    """The rows of a dataset by MeSP's names of splits, each a record by its columns.

    `data` is a file of one of `FORMATS`, a folder or a name on the Hugging Face Hub, `subset` its
    configuration. `splits` says what is taken as each split, as `datasets` spells it: a name, or
    part of one, as in ``train[:1000]``; where it is empty, what is called so. Values that are null
    are left out. Raises MespError where the library is not there, or says no.
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
    path, options = data, {}
    if Path(data).is_file():
        if subset is not None:
            raise MespError(f"{data} is a file, which has no subsets; leave out --subset.")
        path, options = FORMATS[Path(data).suffix], {"data_files": data}
    try:
        if not options:
            subset = _find_subset(data, subset, datasets.get_dataset_config_names(path))
        builder = datasets.load_dataset_builder(path, subset, **options)
        if not options:
            _refuse_other_files(data, builder)
        there = datasets.get_dataset_split_names(path, subset, **options)
        splits = _find_splits(data, splits, there)
        rows = {
            ours: datasets.load_dataset(path, subset, split=theirs, **options).to_list()
            for ours, theirs in splits.items()
        }
    except MespError:
        raise
    except Exception as error:  # what a broken connection or file raises differs
        reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise MespError(
            f"The datasets library cannot read {data}: {reason}; check its name and the network, "
            "or give a folder with train.jsonl."
        ) from error
    return {split: [_without_null(row) for row in each] for split, each in rows.items()}


def refuse_scripts(datasets: ModuleType) -> None:
    """Raises MespError where the library is one that runs the Python scripts of a dataset: it did
    so before version 4."""
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise MespError(
            f"The datasets library is {datasets.__version__}, which runs scripts that come with a "
            "dataset: pip install 'datasets>=4'."
        )


def _refuse_other_files(data: str, builder: Any) -> None:
    """Raises MespError where the README.md of a dataset takes data from elsewhere: a file of this
    machine would be trained on as if it were the dataset's."""
    if Path(data).is_dir():
        root = root_of(Path(data))

        def belongs(file: str) -> bool:
            return "://" not in file and Path(file).resolve().is_relative_to(root)

    else:

        def belongs(file: str) -> bool:
            path = file.removeprefix(f"hf://datasets/{builder.repo_id}@")
            return path != file and ".." not in path.split("/")

    for files in (builder.config.data_files or {}).values():
        for file in map(str, files):
            if not belongs(file):
                raise MespError(f"{data} names a file outside of it, {file:.200}; do not use it.")


def _find_subset(data: str, subset: str | None, there: list[str]) -> str:
    """The configuration to read; MespError where it has to be named, or is not there."""
    if subset is None and (len(there) == 1 or "default" in there):
        return "default" if "default" in there else there[0]
    if subset not in there:
        found = "has no subset " + subset if subset else "has several subsets"
        raise MespError(f"{data} {found}; take one with --subset: {', '.join(there)}.")
    return subset


def _find_splits(data: str, splits: dict[str, str], there: list[str]) -> dict[str, str]:
    """The source of each split; MespError where one is not there, or none is to train on."""
    for expression in splits.values():
        if re.split(r"[\[+]", expression)[0] not in there:
            raise MespError(f"{data} has no split {expression}; it has {', '.join(there)}.")
    found = splits or {
        ours: name for ours, names in NAMES.items() for name in reversed(names) if name in there
    }
    if "train" not in found:
        raise MespError(
            f"{data} has the splits {', '.join(there)}; say which to train on with --splits "
            "train=NAME."
        )
    return found


def _without_null(value: Any) -> Any:
    """Of a record, what it has: its columns hold what any record has, and null elsewhere."""
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list) else value
