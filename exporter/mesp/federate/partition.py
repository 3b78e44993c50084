"""Divides data among the clients of a simulation.

In a folder with a file for each topic, each training file is a topic. In other data, the train
split is the only topic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from mesp.data.records import AnyRecord, Text
from mesp.data.source_files import FileName, read_file
from mesp.data.sources import Selection, data_files, of_no_split, read_data, records_of
from mesp.data.splits import HELD_OUT, held_out_of
from mesp.errors import MespError
from mesp.files import root_of

PARAGRAPH = "\n\n"
Topics = tuple[dict[str, list[AnyRecord]], list[AnyRecord]]


@dataclass(frozen=True)
class Partition:
    kind: str
    alpha: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Partition:
        if text in ("iid", "by-file"):
            return cls(text)
        match = re.fullmatch(r"dirichlet:(\d+\.?\d*|\.\d+)", text)
        if match is None or not float(match[1]) > 0:
            raise MespError(
                f"--split is iid, by-file or dirichlet:ALPHA with ALPHA above 0, and not {text}."
            )
        return cls("dirichlet", float(match[1]))


def read_topics(
    data: str, selection: Selection | None = None, hold_out: float = HELD_OUT
) -> Topics:
    """Returns the units of each topic, and the held-out records. A unit is a record or, of a text
    file, a paragraph.

    `data` is a folder with one file for each topic, or any data that `mesp data` takes. Without a
    valid split, the fraction `hold_out` at the end of each topic is held out.
    """
    selection = selection or Selection()
    topics, valid = _read_files(data, selection) or _read_splits(data, selection)
    if valid:
        return topics, valid
    if not hold_out:
        raise MespError(
            "The rounds of a federation are measured by held-out data: leave out --hold-out 0, or "
            "add a valid.jsonl or valid.txt."
        )
    if not topics:
        raise MespError(f"{data} has no text; add a .jsonl or .txt file for a topic.")
    held_out: list[AnyRecord] = []
    for name, units in topics.items():
        count = held_out_of(len(units), hold_out)
        if count >= len(units):
            raise MespError(
                f"{name} of {data} has one record, too few to train on and hold out one; give it "
                "more, or add a valid.jsonl or valid.txt."
            )
        topics[name], last = units[:-count], units[-count:]
        held_out += _joined(last)
    return topics, held_out


def _read_splits(data: str, selection: Selection) -> Topics:
    records = read_data(data, selection)
    return {"train": list(_units(records["train"]))}, records.get("valid", [])


def _read_files(data: str, selection: Selection) -> Topics | None:
    folder = Path(data)
    if selection.is_of_dataset or not folder.is_dir():
        return None
    names = data_files(folder)
    splits = {name: FileName.of(name).split for name in names}
    if "train" in splits.values() or all("/" in name for name in names):
        return None
    valid = [name for name in names if splits[name] == "valid"]
    if len(valid) > 1:
        raise MespError(f"{data} has both {valid[0]} and {valid[1]}; keep one.")
    read = {}
    for name in names:
        if "/" in name or not FileName.of(name).is_read:
            raise of_no_split(data, name)
        if splits[name] != "test":
            path = folder / name
            rows = read_file(path, root=root_of(folder))
            read[name] = records_of(str(path), rows, selection)
    held_out = read.pop(valid[0]) if valid else []
    return {name: list(_units(records)) for name, records in read.items()}, held_out


def share_out(
    data: str, topics: dict[str, list[AnyRecord]], clients: int, split: Partition, seed: int
) -> list[list[AnyRecord]]:
    """Returns the records of each client. Raises MespError if a client would get none.

    - iid: each unit goes to a random client, nearly equally many to each client.
    - by-file: topic i goes to client i mod N, where N is the number of clients.
    - dirichlet: client i gets a share p[i] of each topic. For each topic, a new p ~
      Dirichlet(alpha, …, alpha) is drawn. With a smaller alpha, fewer clients have most of a topic
      (Hsu, Qi, Brown, arXiv:1909.06335).
    """
    if not topics:
        raise MespError(f"{data} has nothing to train on; add a .jsonl or .txt file for a topic.")
    random = np.random.default_rng(seed)
    shares: list[list[AnyRecord]] = [[] for _ in range(clients)]
    pools = [*topics.values()]
    if split.kind == "iid":
        pools = [[unit for units in pools for unit in units]]
    for number, units in enumerate(pools):
        parts: list[Any]
        if split.kind == "by-file":
            parts = [range(len(units)) if i == number % clients else () for i in range(clients)]
        else:
            order = random.permutation(len(units))
            equal = np.full(clients, 1 / clients)
            p = equal if split.kind == "iid" else random.dirichlet(clients * equal * split.alpha)
            cuts = np.rint(np.cumsum(p)[:-1] * len(units)).astype(int)
            parts = [np.sort(part) for part in np.split(order, cuts)]
        for share, part in zip(shares, parts, strict=True):
            share += _joined([units[index] for index in part])
    for number, share in enumerate(shares):
        if not share:
            raise MespError(
                f"Client {number} of {clients} would get nothing of {data}: take fewer --clients, "
                "more data, or another --split or --seed."
            )
    return shares


def _units(records: list[AnyRecord]) -> Iterator[AnyRecord]:
    for record in records:
        if isinstance(record, Text) and record.is_file:
            yield from (replace(record, text=part) for part in record.text.split(PARAGRAPH))
        else:
            yield record


def _joined(units: list[AnyRecord]) -> Iterator[AnyRecord]:
    for _, group in groupby(units, key=lambda unit: unit.where):
        records = list(group)
        texts = [each for each in records if isinstance(each, Text) and each.is_file]
        if texts:
            yield replace(texts[0], text=PARAGRAPH.join(each.text for each in texts))
        else:
            yield from records
