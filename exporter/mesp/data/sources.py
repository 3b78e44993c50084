from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from mesp.data.fields import Fields, Selection
from mesp.data.hub_datasets import is_saved, read_dataset
from mesp.data.python_docs import python_docs, python_docs_pairs
from mesp.data.records import AnyRecord, Text, read_record
from mesp.data.source_files import KINDS, SHARD, SPLITS, FileName, Row, read_file
from mesp.errors import MespError
from mesp.files import read_bytes, root_of
from mesp.hub_download import download, list_files, refuse_path

SOURCES = (
    "a file of records (.jsonl, .json, .csv, .tsv, .parquet) or of text (.txt, .md), a folder or a "
    "dataset on the Hugging Face Hub with such files called train, valid and test, python-docs or "
    "python-docs-pairs"
)
BUILT_IN = {"python-docs": python_docs, "python-docs-pairs": python_docs_pairs}
MOST_FILES = 10_000
HIDDEN = (".", "__")
NO_DATA = re.compile(
    r"(readme|licen[cs]e|notice|copying|citation|changelog)([-_]\w+)*(\.(md|txt|rst|cff|bib))?"
    r"|dataset_infos?\.json|thumbs\.db|desktop\.ini|.*\.(py|png|jpe?g|gif|svg|webp)"
)


def read_data(data: str, selection: Selection) -> dict[str, list[AnyRecord]]:
    path = Path(data)
    name, is_there, is_folder = FileName.of(path.name), path.exists(), path.is_dir()
    is_of_dataset = selection.is_of_dataset or is_saved(path)
    has_no_parts = name.is_text and not is_folder if is_there else data in BUILT_IN
    if is_of_dataset and has_no_parts:
        raise MespError(f"{data} has no subsets and splits; leave out --subset and --splits.")
    if has_no_parts and not is_there:
        if selection.columns:
            raise MespError(f"{data} has no columns; leave out --columns.")
        return BUILT_IN[data]()
    if not is_there:
        refuse_path(data)
        if name.is_read or not re.fullmatch(r"[\w.-]+/[\w.-]+", data):
            raise MespError(f"There is no data {data}; name {SOURCES}.")
    if is_of_dataset:
        return _of_dataset(data, selection)
    if is_there and not is_folder:
        return {"train": records_of(data, read_file(path), selection, path.parent)}
    names = data_files(path) if is_folder else filter(may_be_data, list_files(data, "dataset"))
    return _read_tree(data, path if is_folder else None, [*names], selection)


def records_of(
    name: str, rows: Iterable[Row], selection: Selection, folder: Path | None = None
) -> list[AnyRecord]:
    """Returns the records in the rows of `name`. Blank text files are left out. Paths of images
    are relative to `folder`.

    Raises MespError if no record is left, if a record is invalid or lacks a column, or if
    `selection` names columns for a text.
    """
    records: list[AnyRecord] = []
    for where, content in rows:
        if not isinstance(content, str):
            records.append(read_record(Fields(where, content, selection, folder)))
        elif selection.columns:
            raise MespError(f"{where} has no columns; leave out --columns.")
        elif content.strip():
            records.append(Text(content, is_file=True, where=where))
    if not records:
        raise MespError(f"{name} has no text in it.")
    return records


def may_be_data(name: str) -> bool:
    parts = PurePosixPath(name).parts
    is_hidden = any(part.startswith(HIDDEN) for part in parts)
    return not (is_hidden or NO_DATA.fullmatch(parts[-1].lower()))


def data_files(folder: Path) -> list[str]:
    """Returns the names of the files in a folder, at any depth, that may be data.

    Raises MespError if there are too many files, or if a folder cannot be listed.
    """

    def stop(error: OSError) -> None:
        raise MespError(f"{error.filename} cannot be read: {error.strerror}.") from error

    names = []
    for place, folders, files in os.walk(folder, onerror=stop):
        inner = Path(place)
        links = [name for name in folders if (inner / name).is_symlink()]
        folders[:] = [name for name in folders if not name.startswith(HIDDEN)]
        names += [(inner / name).relative_to(folder).as_posix() for name in files + links]
        if len(names) > MOST_FILES:
            raise MespError(f"{folder} has over {MOST_FILES:,} files; name a folder of data alone.")
    return sorted(filter(may_be_data, names))


def _read_tree(
    data: str, folder: Path | None, names: list[str], selection: Selection
) -> dict[str, list[AnyRecord]]:
    both = (_splits_in(home, names) for home in ("", "data"))
    splits = next((each for each in both if each["train"]), {})
    others = [name for name in names if all(name not in each for each in splits.values())]
    if others or not splits:
        there = folder or download("dataset", data, ["README.md"])
        if _has_configs(there):
            return _of_dataset(data, selection)
        if not splits and (
            folder is None or any(FileName.of(name).kind == ".parquet" for name in names)
        ):
            return _of_dataset(data, selection, names)
    if not splits:
        raise MespError(
            f"{data} has no train.jsonl, train.txt or other file of the split train; add one."
        )
    if others:
        raise of_no_split(data, others[0])
    files = {split: _whole(data, each) for split, each in splits.items() if each}
    there = folder or download("dataset", data, [name for each in files.values() for name in each])
    root = root_of(there)
    return {
        split: records_of(
            f"{data}/{each[0]}",
            (row for name in each for row in read_file(there / name, f"{data}/{name}", root)),
            selection,
            (there / each[0]).parent,
        )
        for split, each in files.items()
    }


def of_no_split(data: str, name: str) -> MespError:
    if not FileName.of(PurePosixPath(name).name).is_read:
        return MespError(f"{data} has {name}, a kind of file that is not read; {KINDS}.")
    return MespError(
        f"{data} has {name}, which is in no split: name it train, valid or test, put it elsewhere, "
        "or choose the splits with --splits."
    )


def _splits_in(home: str, names: list[str]) -> dict[str, list[str]]:
    split_of = {name: FileName.of(PurePosixPath(name).name).split for name in names}
    here = [name for name in names if name.rpartition("/")[0] == home]
    return {split: [name for name in here if split_of[name] == split] for split in SPLITS}


def _whole(data: str, names: list[str]) -> list[str]:
    """Raises MespError if there are other files, or if a shard is missing."""
    shards = [SHARD.fullmatch(FileName.of(name).stem) for name in names]
    first, numbers = shards[0], set[int]()
    for name, shard in zip(names, shards, strict=True):
        fits = shard and first and shard.group("stem", "count") == first.group("stem", "count")
        if name != names[0] and (not fits or int(shard["number"]) in numbers):
            raise MespError(f"{data} has both {names[0]} and {name}; keep one.")
        if shard:
            numbers.add(int(shard["number"]))
    count = int(first["count"]) if first else 0
    if missing := {*range(count)} - numbers:
        raise MespError(
            f"{data} has {names[0]} without part {min(missing):05d} of {count:05d}; add it."
        )
    return names


def _of_dataset(
    data: str, selection: Selection, names: Sequence[str] = ()
) -> dict[str, list[AnyRecord]]:
    return {
        split: records_of(f"The {split} data of {data}", rows, selection)
        for split, rows in read_dataset(data, selection, names).items()
    }


def _has_configs(folder: Path) -> bool:
    readme = folder / "README.md"
    if not readme.is_file():
        return False
    try:
        text = read_bytes(readme).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        raise MespError(f"{readme} cannot be read; mend it, or remove it.") from error
    head = re.match(r"\s*---\r?\n(.*?)\n---", text, re.DOTALL)
    return bool(head and re.search(r"^configs:", head[1], re.MULTILINE))
