from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from mesp.data.images import Image, read_image
from mesp.errors import MespError

OPTIONS = "chat_template_kwargs"  # TRL's key for chat template options
KEYS = ("text", "prompt", "completion", "messages", "tools", "chosen", "rejected", "label")
# Names of columns and keys, in lower case and with _ for -, that no public data set uses for what a
# model reads or writes.
NEVER_CONTENT = (*(files("mesp.data") / "never_content.txt").read_text("utf-8").split(),)


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and not value)


def refuse_unread(places: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Raises MespError if a record has columns or keys that nothing reads and that may be content.

    `places` has each record's place, and the names.
    """
    found: dict[str, list[str]] = {}
    for where, unread in places:
        if names := [n for n in unread if n.lower().replace("-", "_") not in NEVER_CONTENT]:
            found.setdefault(where, []).extend(names)
    if not found:
        return
    where, first = next(iter(found.items()))
    names = [*dict.fromkeys(name for each in found.values() for name in each)]
    quoted = [f'"{name}"' for name in names]
    said = " and ".join([", ".join(quoted[:-1]), quoted[-1]] if quoted[1:] else quoted)
    have = f"{where} has" if {*first} == {*names} else f"{where} and records after it have"
    text, them = ("its text", "it") if len(names) == 1 else ("their text", "them")
    raise MespError(
        f"{have} {said}, which nothing reads: write {text} into what is read, or leave {them} out "
        f"with --ignore {','.join(names)}."
    )


@dataclass(frozen=True)
class Selection:
    """`subset` is the name of a dataset's configuration. `splits` has the source of each of MeSP's
    splits, as an expression of the datasets library.
    """

    subset: str | None = None
    splits: dict[str, str] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @property
    def is_of_dataset(self) -> bool:
        return self.subset is not None or bool(self.splits)


class Fields:
    """A record's columns, under the keys that --columns gives them. A kind takes what it reads.

    Null counts as absent. Raises MespError if one of the columns is not there.
    """

    def __init__(
        self, where: str, record: dict[str, Any], chosen: Selection | None = None,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        columns, ignored = (chosen.columns, chosen.ignored) if chosen else ({}, ())
        for column in columns.values():
            if column not in record:
                raise MespError(
                    f"{where} has no column {column}, which --columns names; it has "
                    f"{', '.join(record) or 'none'}."
                )
        renamed = {key: record[column] for key, column in columns.items()}
        gone = {*columns.values()}.difference(columns).union(ignored)
        self.where, self.ignored = where, ignored
        self.values = {k: v for k, v in {**record, **renamed}.items() if k not in gone}
        self.names = [*self.values]
        self.unread: list[str] = []
        self.images: list[Image] = []
        self._folder, self._column = folder, list[Any]()

    def has(self, *keys: str) -> bool:
        return all(self.values.get(key) is not None for key in keys)

    def take(self, key: str) -> Any:
        return self.values.pop(key, None)

    def take_text(self, key: str) -> str:
        """Raises MespError if it is not a string."""
        value = self.take(key)
        if not isinstance(value, str):
            raise MespError(f'{self.where} has a "{key}" that is not a string: write it as one.')
        return value

    def add_image(self, where: str, source: Any) -> None:
        """`source` is in a part of content. None: the next image of the column `images`.

        Raises MespError if there is no image.
        """
        if source is None:
            self._open_column()
            source = self._column.pop(0) if self._column else None
        self.images.append(read_image(where, source, self._folder))

    def _open_column(self) -> None:
        for key in ("images", "image"):
            if not is_empty(self.values.get(key)):
                column = self.take(key)
                self._column += column if isinstance(column, list) else [column]

    def add_column(self) -> int:
        """Adds the images of the column, and returns their number."""
        self._open_column()
        count = len(self._column)
        for _ in range(count):
            self.add_image(f"{self.where} has", None)
        return count

    def left(self) -> tuple[str, ...]:
        if self._column:
            return ("images",)
        return (*(key for key, value in self.values.items() if not is_empty(value)), *self.unread)
