from __future__ import annotations

import csv
import gzip
import io
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from mesp.errors import MespError
from mesp.files import UnclearError, open_regular, parse_json

SPLITS = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev", "eval", "evaluation"),
    "test": ("test",),
}
SPLIT_OF = {name: split for split, names in SPLITS.items() for name in names}

SIZE = 4 << 30  # the maximum size of a file's text in bytes
# The largest text of a compressed file: UNPACKED bytes or, if more, TIMES the file's size.
UNPACKED, TIMES = 16 << 20, 200
ROWS = 4096

Row = tuple[str, str | dict[str, Any]]


class FileName(NamedTuple):
    """A file's name in lower case: its `stem`, its ending `kind`, and whether it ends in .gz
    (`packed`).
    """

    stem: str
    kind: str
    packed: bool

    @classmethod
    def of(cls, name: str) -> FileName:
        lower = name.lower()
        stem, dot, end = lower.removesuffix(".gz").rpartition(".")
        return cls(stem, dot + end, lower.endswith(".gz"))

    @property
    def is_read(self) -> bool:
        return self.kind in READERS and bool(self.stem)

    @property
    def is_text(self) -> bool:
        return READERS.get(self.kind) is _read_text

    @property
    def split(self) -> str | None:
        shard = SHARD.fullmatch(self.stem)
        return SPLIT_OF.get(shard["stem"] if shard else self.stem) if self.is_read else None


# The Hub's names of a split's shards.
SHARD = re.compile(r"(?P<stem>.+?)-(?P<number>\d{5})-of-(?P<count>\d{5})(-[0-9a-f]+)?")


def read_file(
    path: Path, name: str | None = None, root: Path | None = None, size: int = SIZE
) -> Iterator[Row]:
    """Yields the records of a file, or its one text.

    If `root` is the `root_of` a folder, the file must not be a link that leads out of that folder.
    The text of a compressed file must have at most `UNPACKED` bytes or, if that is more, `TIMES`
    the file's size.

    Raises MespError if the file cannot be read, is damaged or not regular, has no reader, or has
    more than `size` bytes of text.
    """
    name, parts = name or str(path), FileName.of(path.name)
    with _plain_errors(name):
        if path.is_dir():
            raise MespError(f"{name} is a folder; name a file in it.")
        if not os.path.lexists(path):
            raise MespError(f"There is no file {name}; correct the path.")
    if not parts.is_read:
        raise MespError(f"{name} is a kind of file that is not read; {KINDS}.")
    with _plain_errors(name), _opened(path, root) as file:
        most, content = size, file
        if parts.packed or parts.kind == ".parquet":
            most = min(size, max(UNPACKED, TIMES * os.fstat(file.fileno()).st_size))
        if parts.packed:
            content = gzip.GzipFile(fileobj=file)
        if parts.packed or parts.kind != ".parquet":
            content = io.BufferedReader(_Bounded(content, name, most))
        yield from READERS[parts.kind](content, name, most)


def read_lines(file: BinaryIO, name: str) -> Iterator[Row]:
    """Raises MespError if a line is not a record, or if the bytes are not UTF-8."""
    text = io.TextIOWrapper(file, "utf-8-sig")
    try:
        with _plain_errors(name):
            for number, line in enumerate(text, 1):
                if line.strip():
                    yield _line(name, number, line)
    finally:
        text.detach()  # keeps the file open


def _opened(path: Path, root: Path | None) -> BinaryIO:
    try:
        return open_regular(path, root)
    except ValueError as error:
        remedy = "give a file, or to mesp evaluate - and standard input"
        remedy = remedy if root is None else "put the file there"
        raise MespError(f"{error}; {remedy}.") from error


@contextmanager
def _plain_errors(name: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise MespError(f"{name} is not UTF-8 text; convert it first.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise MespError(f"{name} is not a whole gzip file; compress it again.") from error
    except OSError as error:
        raise MespError(f"{name} cannot be read: {error.strerror or error}.") from error


class _Bounded(io.RawIOBase):
    def __init__(self, file: BinaryIO, name: str, most: int) -> None:
        self._file, self._name, self._most, self._left = file, name, most, most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise _too_large(self._name, self._most)
        buffer[: len(data)] = data
        return len(data)


def _too_large(name: str, most: int) -> MespError:
    return MespError(f"{name} has more than {most >> 20:,} MiB of text; put less in a file.")


def read_utf8(name: str, read: Callable[[], bytes]) -> str:
    """Returns the UTF-8 text from `read`, with universal newlines. Error messages call the text
    `name`.

    Raises MespError if reading fails, or if the bytes are not UTF-8.
    """
    with _plain_errors(name):
        return io.TextIOWrapper(io.BytesIO(read()), encoding="utf-8-sig").read()


def read_value(where: str, text: str) -> Any:
    """Raises MespError if the text is not valid JSON, repeats a key, or has a number such as NaN or
    a string that is not valid Unicode.
    """
    try:
        return parse_json(text, strict=True)
    except UnicodeEncodeError as error:
        raise MespError(f"{where} has half a character, such as \\ud83d; fix it.") from error
    except UnclearError as error:
        raise MespError(f"{where} {error}.") from error
    except ValueError as error:
        raise MespError(f"{where} is not JSON.") from error


def as_object(where: str, record: Any) -> dict[str, Any]:
    if isinstance(record, list) and any(isinstance(each, dict) for each in record):
        raise MespError(f'{where} is a list: write it as an object, {{"messages": […]}}.')
    if not isinstance(record, dict):
        raise MespError(f"{where} is not an object; write each record as one.")
    return record


def read_cell(where: str, value: Any, type: Any = None) -> Any:
    """`type` is its type in Arrow, which may be JSON.

    The result lacks null entries, because a table has null where an object lacks a key.
    """
    if value is not None and getattr(type, "extension_name", None) == "arrow.json":
        return read_value(where, value)
    if isinstance(value, dict):
        types = {each.name: each.type for each in getattr(type, "fields", ())}
        return {k: read_cell(where, v, types.get(k)) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [read_cell(where, each, getattr(type, "value_type", None)) for each in value]
    return value


def _read_text(file: BinaryIO, name: str, _: int) -> Iterator[Row]:
    yield name, io.TextIOWrapper(file, "utf-8-sig").read()


def _read_json(file: BinaryIO, name: str, _: int) -> Iterator[Row]:
    text = io.TextIOWrapper(file, "utf-8-sig")
    # Iterating over the file splits only at line ends. str.splitlines would also split inside JSON
    # strings.
    lines = ((number, line) for number, line in enumerate(text, 1) if line.strip())
    number, first = next(lines, (0, ""))
    if first.lstrip().startswith("["):
        rest = text.read()
        if rest.lstrip().startswith("["):  # a list on each line
            _line(name, number, first)
        for number, record in enumerate(read_value(name, first + rest), 1):
            where = f"Record {number} of {name}"
            yield where, as_object(where, record)
    elif first:
        others = [*islice(lines, 1)]
        if first.strip() == "{" and others:
            raise MespError(
                f"{name} has an object over several lines; write a list of records, or a record a "
                "line."
            )
        yield _line(name, number, first)
        yield from (_line(name, number, line) for number, line in chain(others, lines))


def _line(name: str, number: int, line: str) -> Row:
    where = f"Line {number} of {name}"
    return where, as_object(where, read_value(where, line))


def _read_table(file: BinaryIO, name: str, most: int, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(most)
    rows = csv.reader(io.TextIOWrapper(file, "utf-8-sig"), delimiter=delimiter, strict=True)
    columns: list[str] = []
    start = 1
    try:
        for row in rows:
            where, start = f"Line {start} of {name}", rows.line_num + 1
            if not any(row):
                continue
            if columns and len(row) != len(columns):
                raise MespError(
                    f"{where} has {len(row)} cells, and the header has {len(columns)}; fix it."
                )
            if columns:
                yield where, dict(zip(columns, row, strict=True))
            elif len(row) == 1 and ";" in row[0]:
                raise MespError(
                    f"{where}, the header, has semicolons between its cells: write "
                    f"{'tabs' if delimiter != ',' else 'commas'}."
                )
            elif "" in row or len({*row}) < len(row):
                raise MespError(
                    f"{where}, the header, has a column without a name, or two of one name; give "
                    "each a name."
                )
            columns = columns or row
    except csv.Error as error:
        raise MespError(f"Line {rows.line_num} of {name} is not a table's: {error}.") from error


def _read_parquet(file: BinaryIO, name: str, most: int) -> Iterator[Row]:
    """A few bytes of a file may stand for gigabytes of repeated text. So the texts are first read
    as dictionary indices, to compute the decoded size.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise MespError(
            f"{name} is read with the datasets library, which is not there: pip install datasets, "
            "or write the records to a .jsonl file."
        ) from error
    content = file if file.seekable() else io.BytesIO(file.read())
    try:
        whole = ParquetFile(content)
        columns = [whole.schema.column(i) for i in range(len(whole.schema))]
        # Raises an error for a damaged file, which could crash the library later.
        whole.scan_contents()
        table = ParquetFile(content, read_dictionary=[column.path for column in columns])
        if len({*table.schema_arrow.names}) < len(table.schema_arrow.names):
            raise MespError(f"{name} has two columns of one name; give each its own.")
        groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
        chunks = [group.column(i) for group in groups for i in range(len(columns))]
        says = sum(max(each.total_uncompressed_size, each.num_values) for each in chunks)
        widest = max((column.length for column in columns), default=0)
        number, left = 0, most
        if max(says, ROWS * widest) > most:
            raise _too_large(name, most)
        for batch in table.iter_batches(batch_size=ROWS):
            left -= sum(map(_decoded_size, batch.columns))
            if left < 0:
                raise _too_large(name, most)
            types = dict(zip(batch.schema.names, batch.schema.types, strict=True))
            for row in batch.to_pylist():
                number += 1
                where = f"Record {number} of {name}"
                yield where, {key: read_cell(where, row[key], types[key]) for key in row}
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise MespError(f"{name} is not a parquet file that can be read: {reason}.") from error


def _decoded_size(array: Any) -> int:
    from pyarrow import ExtensionArray, StructArray, compute

    size = 8 * len(array)
    if isinstance(array, ExtensionArray):
        return _decoded_size(array.storage)
    if hasattr(array, "dictionary"):
        lengths = compute.binary_length(array.dictionary)
        return size + (compute.sum(compute.take(lengths, array.indices)).as_py() or 0)
    if hasattr(array, "flatten"):
        parts = array.flatten()
        parts = parts if isinstance(array, StructArray) else [parts]
        return size + sum(map(_decoded_size, parts))
    return size + array.nbytes


READERS: dict[str, Callable[[BinaryIO, str, int], Iterator[Row]]] = {
    ".jsonl": _read_json,
    ".ndjson": _read_json,
    ".json": _read_json,
    ".csv": _read_table,
    ".tsv": partial(_read_table, delimiter="\t"),
    ".parquet": _read_parquet,
    ".txt": _read_text,
    ".md": _read_text,
}
KINDS = (
    "give records as .jsonl, .ndjson, .json, .csv, .tsv or .parquet, or text as .txt or .md, each "
    "also with .gz"
)
