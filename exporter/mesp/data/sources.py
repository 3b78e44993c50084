"""Sources of data: files, folders, datasets on the Hugging Face Hub, or a built-in text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from mesp.data.hub_datasets import FORMATS, read_rows
from mesp.data.python_docs import python_docs, python_docs_pairs
from mesp.data.records import Document, read_line, read_record, read_utf8
from mesp.errors import MespError
from mesp.hub_download import download

SPLITS = ("train", "valid", "test")
SOURCES = (
    "a folder or a dataset on the Hugging Face Hub with train, valid and test as .jsonl (a folder "
    "also as .txt) or parquet, a JSONL, parquet or text file, python-docs or python-docs-pairs"
)
BUILT_IN = {"python-docs": python_docs, "python-docs-pairs": python_docs_pairs}


@dataclass(frozen=True)
class Selection:
    """The part of a dataset that is read: its configuration `subset`; what is taken as each of our
    `splits`, as the datasets library spells it; the column that stands for each key of a record."""

    subset: str | None = None
    splits: dict[str, str] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)


def read_documents(data: str, selection: Selection) -> dict[str, list[Document]]:
    """The documents of `data`, one of `SOURCES`, by split. Raises MespError if it is not valid."""
    path = Path(data)
    is_named = re.fullmatch(r"[\w.-]+/[\w.-]+", data) and path.suffix not in (".txt", ".jsonl")
    as_dataset = selection.subset is not None or bool(selection.splits)
    if path.is_dir():
        if as_dataset or (not _has_train(path) and any(path.rglob("*.parquet"))):
            return _read_dataset(data, selection)
        return _read_folder(path, selection)
    if path.exists():
        if path.suffix == ".parquet" or (as_dataset and path.suffix in FORMATS):
            return _read_dataset(data, selection)
        documents = {"train": _read_file(path, selection)}
    elif data in BUILT_IN:
        if selection.columns:
            raise MespError(f"{data} has no columns; leave out --columns.")
        documents = BUILT_IN[data]()
    elif is_named:
        folder = None if as_dataset else _download_jsonl(data)
        return _read_dataset(data, selection) if folder is None else _read_folder(folder, selection)
    else:
        raise MespError(f"There is no data {data}; name {SOURCES}.")
    if as_dataset:
        raise MespError(f"{data} has no subsets and splits; leave out --subset and --splits.")
    return documents


def _download_jsonl(repo: str) -> Path | None:
    """The folder with a dataset's train.jsonl and what is beside it; None where it has none."""
    folders = ("", "data/")
    patterns = [f"{folder}{split}.jsonl" for folder in folders for split in SPLITS]
    snapshot = download("dataset", repo, patterns)
    return next((snapshot / each for each in folders if _has_train(snapshot / each)), None)


def _read_dataset(data: str, selection: Selection) -> dict[str, list[Document]]:
    return {
        split: [
            read_record(f"Record {number} of {split} of {data}", row, selection.columns)
            for number, row in enumerate(rows, 1)
        ]
        for split, rows in read_rows(data, selection.subset, selection.splits).items()
    }


def _has_train(folder: Path) -> bool:
    return any((folder / f"train.{kind}").is_file() for kind in ("jsonl", "txt"))


def _read_folder(folder: Path, selection: Selection) -> dict[str, list[Document]]:
    documents = {}
    for split in SPLITS:
        files = [f for f in (folder / f"{split}.jsonl", folder / f"{split}.txt") if f.exists()]
        if len(files) > 1:
            raise MespError(f"{folder} has both {files[0].name} and {files[1].name}; keep one.")
        if files:
            documents[split] = _read_file(files[0], selection)
    if "train" not in documents:
        raise MespError(f"{folder} has neither train.txt nor train.jsonl; add one.")
    return documents


def _read_file(path: Path, selection: Selection) -> list[Document]:
    text = read_utf8(str(path), path.read_bytes)
    if not text.strip():
        raise MespError(f"{path} has no text in it.")
    if path.suffix != ".jsonl":
        if selection.columns:
            raise MespError(f"{path} has no columns; leave out --columns.")
        return [Document(str(path), text)]
    # Not str.splitlines, which also splits at characters that JSON allows in a string.
    return [
        read_line(f"Line {number} of {path}", line, selection.columns)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
