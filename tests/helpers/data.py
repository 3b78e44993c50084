from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mesp.data import load as mesp
from mesp.data.splits import Split


def user(content: Any, **others: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **others}


def assistant(content: Any, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **others}


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


def load(path: Path, tokenizer: Any, seq_len: int = 256, **options: Any) -> dict[str, Split]:
    size = len(tokenizer.get_vocab())
    return mesp.load(str(path), tokenizer, seq_len, size, mesp.DataOptions(**options))


def load_records(
    folder: Path, records: list[dict[str, Any]], tokenizer: Any, seq_len: int = 256, **options: Any
) -> dict[str, Split]:
    return load(write_records(folder / "data.jsonl", records), tokenizer, seq_len, **options)


def examples_of(split: Split) -> list[tuple[list[int], list[int]]]:
    """Returns the ids and the mask of each example."""
    mask = [1] * len(split.tokens) if split.mask is None else split.mask.tolist()
    ranges = [slice(start, start + length) for start, length in split.examples.tolist()]
    return [(split.tokens[each].tolist(), mask[each]) for each in ranges]
