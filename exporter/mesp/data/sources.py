"""Where data comes from: files, folders, datasets on the Hugging Face Hub, or a built-in text."""

from __future__ import annotations

import re
from pathlib import Path

from mesp.data.python_docs import python_docs
from mesp.data.records import Document, read_record
from mesp.errors import MespError
from mesp.hub_download import download

SPLITS = ("train", "valid", "test")
SOURCES = (
    "a folder or a dataset on the Hugging Face Hub with train, valid and test as .jsonl (a folder "
    "also as .txt), a JSONL file, a text file, or python-docs"
)
BUILT_IN = {"python-docs": python_docs}


def read_documents(data: str) -> dict[str, list[Document]]:
    """The documents of `data`, one of `SOURCES`, by split. Raises MespError where it is none."""
    path = Path(data)
    if path.is_dir():
        return _read_folder(path)
    if path.exists():
        return {"train": _read_file(path)}
    if data in BUILT_IN:
        return BUILT_IN[data]()
    if re.fullmatch(r"[\w.-]+/[\w.-]+", data) and path.suffix not in (".txt", ".jsonl"):
        return _read_dataset(data)
    raise MespError(f"There is no data {data}; name {SOURCES}.")


def _read_dataset(repo: str) -> dict[str, list[Document]]:
    folders = ("", "data/")
    patterns = [f"{folder}{split}.jsonl" for folder in folders for split in SPLITS]
    snapshot = download("dataset", repo, patterns)
    for folder in folders:
        if (snapshot / folder / "train.jsonl").is_file():
            return _read_folder(snapshot / folder)
    raise MespError(
        f"The dataset {repo} on the Hugging Face Hub has no train.jsonl; download it, and write "
        "its records to a folder with train.jsonl."
    )


def _read_folder(folder: Path) -> dict[str, list[Document]]:
    documents = {}
    for split in SPLITS:
        files = [f for f in (folder / f"{split}.jsonl", folder / f"{split}.txt") if f.exists()]
        if len(files) > 1:
            raise MespError(f"{folder} has both {files[0].name} and {files[1].name}; keep one.")
        if files:
            documents[split] = _read_file(files[0])
    if "train" not in documents:
        raise MespError(f"{folder} has neither train.txt nor train.jsonl; add one.")
    return documents


def _read_file(path: Path) -> list[Document]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MespError(f"{path} is not UTF-8 text; convert it first.") from error
    except OSError as error:
        raise MespError(f"{path} cannot be read: {error.strerror}.") from error
    if not text.strip():
        raise MespError(f"{path} has no text in it.")
    if path.suffix != ".jsonl":
        return [Document(str(path), text)]
    # Not str.splitlines, which also splits at characters that JSON allows in a string.
    lines = enumerate(text.split("\n"), 1)
    return [read_record(f"Line {number} of {path}", line) for number, line in lines if line.strip()]
