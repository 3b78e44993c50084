"""Data shared out among the people of a simulation.

A topic is a file of the data. Texts are shared out by paragraphs, other records whole, and each
share keeps the order of the data: one client's share is the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from mesp.data.held_out import HELD_OUT
from mesp.data.records import Document
from mesp.data.sources import Selection, read_documents
from mesp.errors import MespError

KINDS = (".jsonl", ".txt")
PARAGRAPH = "\n\n"


@dataclass(frozen=True)
class Unit:
    """A unit that is not divided: a record, or a paragraph of the text that `origin` numbers."""

    origin: int
    document: Document


@dataclass(frozen=True)
class Split:
    """The way in which topics are shared out: `iid`, `by-file`, or `dirichlet` with its alpha."""

    kind: str
    alpha: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Split:
        """Raises MespError where it is not one of them."""
        if text in ("iid", "by-file"):
            return cls(text)
        match = re.fullmatch(r"dirichlet:(\d+\.?\d*|\.\d+)", text)
        if match is None or not float(match[1]) > 0:
            raise MespError(
                f"--split is iid, by-file or dirichlet:ALPHA with ALPHA above 0, and not {text}."
            )
        return cls("dirichlet", float(match[1]))


def read_topics(
    data: str, selection: Selection | None = None
) -> tuple[dict[str, list[Unit]], list[Document]]:
    """The units of each topic, and the held-out documents.

    `data` is a folder with a file a topic and perhaps one called valid, or what `mesp data` takes,
    of which `selection` is read.
    Without held-out data the last tenth of each topic is held out. There may be no topics.
    Raises MespError.
    """
    selection, folder = selection or Selection(), Path(data)
    files = sorted(f for f in folder.glob("*") if f.suffix in KINDS) if folder.is_dir() else []
    if files and all(file.stem != "train" for file in files):
        named = {f.name: read_documents(str(f), selection)["train"] for f in files}
    else:
        named = read_documents(data, selection)
    is_named = {split: [n for n in named if Path(n).stem == split] for split in ("valid", "test")}
    held_out = [document for name in is_named["valid"] for document in named[name]]
    topics = {
        name: list(_units(documents))
        for name, documents in named.items()
        if name not in is_named["valid"] + is_named["test"]
    }
    if held_out:
        return topics, held_out
    if not topics:
        raise MespError(f"{data} has no text; add a .jsonl or .txt file for a topic.")
    for name, units in topics.items():
        count = max(len(units) // HELD_OUT, 1)
        if count == len(units):
            raise MespError(
                f"{name} of {data} has one record, too few to train on and hold out one; give it "
                "more, or add a valid.jsonl or valid.txt."
            )
        topics[name], last = units[:-count], units[-count:]
        held_out += _documents(last)
    return topics, held_out


def share_out(
    data: str, topics: dict[str, list[Unit]], clients: int, split: Split, seed: int
) -> list[list[Document]]:
    """The documents of each client. Raises MespError where one would get none.

    - iid: every unit to a random client, all of them as many;
    - by-file: topic i to client i mod N;
    - dirichlet: of each topic client i gets a share p[i], p ~ Dirichlet(alpha, …, alpha): the
      smaller alpha, the fewer clients have most of a topic (Hsu, Qi, Brown, arXiv:1909.06335).
    """
    if not topics:
        raise MespError(f"{data} has nothing to train on; add a .jsonl or .txt file for a topic.")
    random = np.random.default_rng(seed)
    shares: list[list[list[Unit]]] = [[] for _ in range(clients)]
    all_units = [unit for units in topics.values() for unit in units]
    pools = {"": all_units} if split.kind == "iid" else topics
    for number, units in enumerate(pools.values()):
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
            share.append([units[index] for index in part])
    documents = [[each for part in share for each in _documents(part)] for share in shares]
    for number, each in enumerate(documents):
        if not each:
            raise MespError(
                f"Of {data}, client {number} of {clients} would get nothing: take fewer --clients, "
                "more data, or another --split or --seed."
            )
    return documents


def _units(documents: list[Document]) -> Iterator[Unit]:
    for origin, document in enumerate(documents):
        if not isinstance(document.content, str):
            yield Unit(origin, document)
            continue
        for paragraph in document.content.split(PARAGRAPH):
            yield Unit(origin, Document(document.where, paragraph))


def _documents(units: list[Unit]) -> Iterator[Document]:
    for _, group in groupby(units, key=lambda unit: (unit.origin, unit.document.where)):
        documents = [unit.document for unit in group]
        if not isinstance(documents[0].content, str):
            yield from documents
            continue
        yield Document(documents[0].where, PARAGRAPH.join(str(each.content) for each in documents))
