from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mesp.errors import MespError
from mesp.files import create, inside, read_object
from mesp.models.architecture import PER_LAYER_EMBEDDING, PER_LAYER_PROJECTION, Architecture
from mesp.models.layout import Layout
from mesp.models.quantization_formats import Quantization

FORMAT = 7
# The formats that `mesp-export --from` reads. They differ only in the block functions.
OF_SAME_WEIGHTS = (6, FORMAT)
PER_LAYER = {
    "per_layer_embedding": PER_LAYER_EMBEDDING,
    "per_layer_projection": PER_LAYER_PROJECTION,
}
MODEL = ("id", "revision", "license")
MORE_OF_MODEL = ("license_name", "license_link")  # these keys may be absent
ENCODING = {"chat": bool, "split_special_tokens": bool, "chat_template_kwargs": dict}

_PACKED = {"words": int, "arrays": [{"name": str, "offset": int, "shape": [int], "dtype": str}]}
READ = {
    "name": str,
    "model": {"id": str},
    "seq_lens": [int],
    "ranks": [int],
    "architecture": dict,
    "quantization": {"bits": int, "group_size": int, "mode": str},
    "blocks": [{"layers": [int], "functions": dict, "plain_functions": dict, **_PACKED}],
    "embedding": {"file": str, **_PACKED},
    "head": {"file": str, **_PACKED},
    "files": [{"path": str, "size": int, "sha256": str}],
}


IMAGES = {"file": str, "count": int, "dtype": str, "places": str}


@dataclass(frozen=True)
class ImageRows:
    """The file of the rows [count, hidden] of images in `dtype`, and the file that has for each
    token 0, or 1 + its row.
    """

    file: str
    count: int
    dtype: str
    places: str


def fits(value: Any, wanted: Any) -> bool:
    """Returns whether a JSON value has the keys and types of `wanted`. Integers must be from 0 to
    2⁵³ - 1.
    """
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(fits(value.get(k), wanted[k]) for k in wanted)
    if isinstance(wanted, list):
        return isinstance(value, list) and all(fits(each, wanted[0]) for each in value)
    return type(value) is wanted and (wanted is not int or 0 <= value < 1 << 53)


def _is_line(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.isprintable())


def _is_split(entry: Any) -> bool:
    return (
        fits(entry, {"file": str, "tokens": int})
        and ("examples" not in entry or fits(entry["examples"], {"file": str, "count": int}))
        and all(key not in entry or fits(entry[key], str) for key in ("mask", "labels"))
        and ("begin" not in entry or fits(entry["begin"], int))
        and ("pack" not in entry or fits(entry["pack"], bool))
        and ("images" not in entry or fits(entry["images"], IMAGES))
    )


@dataclass(frozen=True)
class ModelName:
    """`revision` is None unless the weights came from the Hugging Face Hub."""

    id: str
    revision: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None

    def to_json(self) -> dict[str, Any]:
        entries = asdict(self)
        return {k: v for k, v in entries.items() if k in MODEL or v is not None}

    def __str__(self) -> str:
        return f"{self.id}@{self.revision}" if self.revision else self.id


@dataclass(frozen=True)
class BlockGroup:
    """Blocks with the same layout, mixer and MLP, and the files of their functions by sequence
    length.

    A GPU uses `functions` and, for packed records, `packed_functions`. A CPU uses
    `plain_functions`. Blocks with experts have no functions.
    """

    layers: tuple[int, ...]
    functions: dict[str, str]
    plain_functions: dict[str, str]
    layout: Layout
    packed_functions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, entry: dict[str, Any]) -> BlockGroup:
        layers, layout = tuple(entry["layers"]), Layout.of_json(entry)
        packed = entry.get("packed_functions", {})
        if not isinstance(packed, dict):
            raise ValueError("the functions of packed records are not by length")
        return cls(layers, entry["functions"], entry["plain_functions"], layout, packed)

    @property
    def files(self) -> list[dict[str, str]]:
        packed = [self.packed_functions] if self.packed_functions else []
        kinds = [self.functions, self.plain_functions, *packed]
        return kinds if any(kinds) else []

    def to_json(self) -> dict[str, Any]:
        functions = {"functions": self.functions, "plain_functions": self.plain_functions}
        functions |= {"packed_functions": self.packed_functions} if self.packed_functions else {}
        return {"layers": self.layers, **functions, **self.layout.to_json()}


@dataclass(frozen=True)
class Table:
    file: str
    layout: Layout

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Table:
        return cls(entry["file"], Layout.of_json(entry))

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, **self.layout.to_json()}


@dataclass(frozen=True)
class DataSplit:
    """The files of a split. The split has `tokens` token ids, as one stream or as `count` examples.

    `begin` replaces the first token of each window of a stream, unless it is None.
    """

    file: str
    tokens: int
    examples: str | None = None
    count: int | None = None
    mask: str | None = None
    labels: str | None = None
    begin: int | None = None
    pack: bool = False
    images: ImageRows | None = None

    @classmethod
    def of(cls, entry: dict[str, Any]) -> DataSplit:
        examples, images = entry.get("examples") or {}, entry.get("images")
        return cls(
            entry["file"], entry["tokens"], examples.get("file"), examples.get("count"),
            entry.get("mask"), entry.get("labels"), entry.get("begin"), entry.get("pack", False),
            ImageRows(**{key: images[key] for key in IMAGES}) if images else None,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        examples = {"examples": {"file": self.examples, "count": self.count}}
        others = {"mask": self.mask, "labels": self.labels, "begin": self.begin}
        others |= {"pack": True} if self.pack else {}
        return {
            "file": self.file,
            "tokens": self.tokens,
            **(examples if self.examples is not None else {}),
            **{key: value for key, value in others.items() if value is not None},
            **({"images": asdict(self.images)} if self.images else {}),
        }

    def sizes(self, hidden: int) -> dict[str, int]:
        """Returns the bytes of each file of the split, of a model with `hidden` features."""
        files = {
            self.file: 4 * self.tokens,
            self.examples: 8 * (self.count or 0),
            self.mask: self.tokens,
            self.labels: self.count or 0,
        }
        if self.images:
            width = (4 if self.images.dtype == "float32" else 2) * hidden
            files |= {self.images.file: width * self.images.count}
            files |= {self.images.places: 4 * self.tokens}
        return {file: size for file, size in files.items() if file is not None}


@dataclass(frozen=True)
class File:
    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A bundle's manifest. docs/formats.md describes each field."""

    name: str
    model: ModelName
    architecture: Architecture
    quantization: Quantization
    seq_lens: tuple[int, ...]
    ranks: tuple[int, ...]
    blocks: tuple[BlockGroup, ...]
    embedding: Table
    head: Table
    per_layer: Mapping[str, Table] = field(default_factory=dict)
    data: Mapping[str, DataSplit] = field(default_factory=dict)
    end_tokens: tuple[int, ...] = ()
    encoding: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[File, ...] = ()

    @property
    def dtype(self) -> str:
        """The dtype of the stored scales and biases, and of vectors that are not always float32."""
        layouts = [group.layout for group in self.blocks]
        layouts += [t.layout for t in (self.embedding, self.head, *self.per_layer.values())]
        found = {array.dtype for layout in layouts for array in layout.arrays}
        return next((dtype for dtype in ("bfloat16", "float16") if dtype in found), "float32")

    @classmethod
    def of(cls, entries: dict[str, Any]) -> Manifest:
        """Returns the manifest of a JSON object.

        Raises ValueError, TypeError, LookupError, AttributeError or ArithmeticError if the object
        is not a valid manifest.
        """
        data, model = entries.get("data") or {}, entries.get("model")
        encoding = entries.get("encoding", {})
        if not (
            fits(entries, READ)
            and isinstance(model, dict)
            and model.keys() >= {*MODEL}
            and all(map(_is_line, (entries["name"], *map(model.get, (*MODEL, *MORE_OF_MODEL)))))
            and entries["seq_lens"]
            and entries["ranks"]
            and 0 not in (*entries["seq_lens"], *entries["ranks"])
            and isinstance(data, dict)
            and all(map(_is_split, data.values()))
            and all(map(_is_line, data))
            and fits(entries.get("end_tokens", []), [int])
            and isinstance(encoding, dict)
            and all(type(value) is ENCODING.get(key) for key, value in encoding.items())
        ):
            raise ValueError("a field is missing, or of another type")
        return cls(
            name=entries["name"],
            model=ModelName(model["id"], *map(model.get, (*MODEL[1:], *MORE_OF_MODEL))),
            architecture=Architecture.from_manifest(entries["architecture"]),
            quantization=Quantization(**entries["quantization"]),
            seq_lens=tuple(entries["seq_lens"]),
            ranks=tuple(entries["ranks"]),
            blocks=tuple(map(BlockGroup.of, entries["blocks"])),
            embedding=Table.of(entries["embedding"]),
            head=Table.of(entries["head"]),
            per_layer={
                name: Table.of(entries[key]) for key, name in PER_LAYER.items() if key in entries
            },
            data={split: DataSplit.of(entry) for split, entry in data.items()},
            end_tokens=tuple(entries.get("end_tokens", [])),
            encoding=encoding,
            files=tuple(
                File(each["path"], each["size"], each["sha256"]) for each in entries["files"]
            ),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "name": self.name,
            "model": self.model.to_json(),
            "architecture": self.architecture.to_manifest(),
            "quantization": asdict(self.quantization),
            "seq_lens": self.seq_lens,
            "ranks": self.ranks,
            "blocks": [group.to_json() for group in self.blocks],
            "embedding": self.embedding.to_json(),
            "head": self.head.to_json(),
            **{
                key: self.per_layer[name].to_json()
                for key, name in PER_LAYER.items()
                if name in self.per_layer
            },
            "data": {split: each.to_json() for split, each in self.data.items()},
            **({"end_tokens": self.end_tokens} if self.end_tokens else {}),
            **({"encoding": self.encoding} if self.encoding else {}),
            "files": [asdict(each) for each in self.files],
        }

    def write(self, folder: Path) -> None:
        text = json.dumps(self.to_json(), indent=1, ensure_ascii=False, allow_nan=False)
        with create(folder / "manifest.json") as file:
            file.write(f"{text}\n".encode())


def read_manifest(path: Path, formats: tuple[int, ...] = (FORMAT,)) -> Manifest:
    """Returns the manifest of the bundle at `path`, after checks.

    Raises MespError if the folder is not a bundle, has a format that is not in `formats`, or has a
    damaged manifest, or if a file in the manifest is missing, has another size or is outside of the
    folder.
    """
    try:
        entries = read_object(path / "manifest.json")
        version = entries["format"]
    except (FileNotFoundError, NotADirectoryError) as error:
        if not path.exists():
            raise MespError(
                f"There is no folder {path}; name a bundle, which mesp-export writes."
            ) from error
        raise MespError(
            f"{path} is not a bundle (it has no manifest.json); write one with mesp-export."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MespError(
            f"{path / 'manifest.json'} cannot be read; write the bundle again with mesp-export."
        ) from error
    if version not in formats:
        again = f" --from {path} --overwrite" if version in OF_SAME_WEIGHTS else ""
        raise MespError(
            f"{path} has bundle format {version}, and this version reads format {FORMAT}; "
            f"write it again with mesp-export{again}."
        )
    try:
        manifest = Manifest.of(entries)
        rank, most = max(manifest.ranks), manifest.architecture.largest_rank
    except (TypeError, LookupError, AttributeError, ValueError, ArithmeticError) as error:
        raise damaged(path) from error
    if rank > most:
        raise MespError(
            f"{path} has rank {rank:,}, and the model's matrices have at most rank {most:,}; "
            "write the bundle again with mesp-export."
        )
    for entry in manifest.files:
        try:
            file = inside(path, entry.path)
        except ValueError as error:
            raise MespError(
                f"{path} names a file outside of it, {entry.path!r:.200}; do not use it."
            ) from error
        size = file.stat().st_size if file.is_file() else None
        if size != entry.size:
            found = "missing" if size is None else f"{size:,} bytes long, not {entry.size:,}"
            raise MespError(f"{file} is {found}; write the bundle again with mesp-export.")
    return manifest


def check_rank(rank: int, arch: Architecture) -> None:
    """Raises MespError if the rank, the value of --rank, is larger than the model allows."""
    if rank > arch.largest_rank:
        raise MespError(
            f"The model's matrices have at most rank {arch.largest_rank:,}, and --rank names "
            f"{rank:,}; take a --rank up to {arch.largest_rank}."
        )


def damaged(path: Path) -> MespError:
    return MespError(f"{path / 'manifest.json'} is damaged; write the bundle again.")


def describe_files(bundle: Path, folder: str = ".") -> tuple[File, ...]:
    files = sorted(path for path in (bundle / folder).rglob("*") if path.is_file())
    return tuple(
        File(file.relative_to(bundle).as_posix(), file.stat().st_size, sha256(file))
        for file in files
    )


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
