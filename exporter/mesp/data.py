"""Text to streams of token ids."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mesp.errors import MespError

SPLITS = ("train", "valid", "test")
HELD_OUT = 10  # where the data has no valid split of its own, one part in this many becomes it

Documents = dict[str, list[str]]  # by split


def load(data: str, tokenizer: Any, seq_len: int) -> dict[str, np.ndarray]:
    """Token streams, uint32 [N], of the splits train, valid and, where there is one, test.

    `data` is a text file, a JSONL file of {"text": …} records, a folder with train, valid and test
    as .txt or .jsonl, or the name of a built-in text; a file wins over a name. `tokenizer` is a
    transformers tokenizer; its end-of-text token ends each document. Without a valid split of
    its own the data's last tenth is held out. Raises MespError where the data cannot be read or a
    train or valid stream is shorter than one sequence of `seq_len` tokens and the token after.
    """
    streams = {split: _encode(texts, tokenizer) for split, texts in _read(data).items()}
    if "valid" not in streams:
        train = streams["train"]
        held_out = max(len(train) // HELD_OUT, seq_len + 1)
        if len(train) < held_out + seq_len + 1:
            raise MespError(
                f"{data} has {len(train):,} tokens, too few to train on and hold out one sequence "
                f"of {seq_len} each; give it more text or a smaller --seq-len."
            )
        streams["train"], streams["valid"] = train[:-held_out], train[-held_out:]
    for split in ("train", "valid"):
        if len(streams[split]) < seq_len + 1:
            raise MespError(
                f"The {split} data of {data} has {len(streams[split]):,} tokens, less than one "
                f"sequence of {seq_len} and the token after; give it more text or a smaller "
                "--seq-len."
            )
    return streams


def random_streams(vocab_size: int, seq_len: int, seed: int) -> dict[str, np.ndarray]:
    """Streams of random ids for 64 windows each, to time training without a text."""
    generator = np.random.default_rng(seed)
    tokens = 64 * seq_len + 1
    return {
        split: generator.integers(vocab_size, size=tokens, dtype=np.uint32)
        for split in ("train", "valid")
    }


def python_docs() -> Documents:
    """The prose of Python's language reference, which comes with Python (`help("topics")`).

    Code and grammar are left out, and lines are joined: a small model would learn little but their
    layout. Topics repeat each other's passages; each is kept once, so that none is on both sides.
    One section in ten is held out.
    """
    from pydoc_data.topics import topics

    sections, seen = [], set()
    for _, text in sorted(topics.items()):
        section: list[str] = []
        for block in re.split(r"\n{2,}", text.strip()):
            paragraph = " ".join(block.split())
            prose = not block.startswith("      ") and re.match(r"[A-Z].{40,}\.$", paragraph)
            if prose and paragraph not in seen:
                seen.add(paragraph)
                section.append(paragraph)
            if sum(map(len, section)) > 4000:
                sections.append(section)
                section = []
        sections.append(section)
    texts = ["\n\n".join(section) + "\n" for section in sections if section]
    return {
        "train": [text for i, text in enumerate(texts) if i % HELD_OUT != HELD_OUT // 2],
        "valid": texts[HELD_OUT // 2 :: HELD_OUT],
    }


BUILT_IN = {"python-docs": python_docs}


def _read(data: str) -> Documents:
    path = Path(data)
    if path.is_dir():
        return _read_folder(path)
    if path.exists():
        return {"train": _read_file(path)}
    if data in BUILT_IN:
        return BUILT_IN[data]()
    raise MespError(
        f"There is no data {data}; name a text file, a JSONL file, a folder with train.txt or "
        f"train.jsonl, or the built-in text {' or '.join(BUILT_IN)}."
    )


def _read_folder(folder: Path) -> Documents:
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


def _read_file(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MespError(f"{path} is not UTF-8 text; convert it first.") from error
    except OSError as error:
        raise MespError(f"{path} cannot be read: {error.strerror}.") from error
    documents = [text]
    if path.suffix == ".jsonl":
        # Not str.splitlines, which also splits at characters that JSON allows in a string.
        lines = enumerate(text.split("\n"), 1)
        documents = [_record(path, number, line) for number, line in lines if line.strip()]
    if not any(document.strip() for document in documents):
        raise MespError(f"{path} has no text in it.")
    return documents


def _record(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise MespError(f"Line {number} of {path} is not JSON.") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        found = f"has {', '.join(record)}" if isinstance(record, dict) else "is no object"
        raise MespError(
            f'Line {number} of {path} {found}; records must be {{"text": "…"}} with a string.'
        )
    return record["text"]


def _encode(documents: list[str], tokenizer: Any) -> np.ndarray:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    parts = [np.zeros(0, np.uint32)]
    for document in documents:
        for piece in _pieces(document):
            ids = tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]
            parts.append(np.array(ids, np.uint32))
        parts.append(np.array(end, np.uint32))
    return np.concatenate(parts)


def _pieces(text: str, size: int = 1 << 14) -> Iterator[str]:
    """Cuts a long text at starts of lines, as tokenizing it whole takes much memory.

    Byte-level BPE cuts there too; at most the white space before a cut is tokenized differently.
    """
    start = 0
    while start < len(text):
        cut = re.compile(r"\n(?= ?\S)").search(text, start + size)
        stop = cut.end() if cut else len(text)
        yield text[start:stop]
        start = stop
