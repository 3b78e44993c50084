"""The bundle: a model as the trainer reads it (docs/architecture.md has the format)."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import math
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mesp.errors import MespError
from mesp.models.architecture import Architecture

FORMAT = 2
PAGE = 16384  # bytes: the page of Apple's processors; weight files are whole pages, to be mapped
ALIGNMENT = 16  # words: every array starts on a 64-byte boundary

DTYPES = {
    "uint32": mx.uint32,
    "uint8": mx.uint8,
    "float32": mx.float32,
    "bfloat16": mx.bfloat16,
}


@dataclass(frozen=True)
class ArraySpec:
    """Where an array lies in a weight file: `offset` in 32-bit words."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def words(self) -> int:
        return math.ceil(math.prod(self.shape) * DTYPES[self.dtype].size / 4)


@dataclass(frozen=True)
class Layout:
    """The arrays of a weight file and its length in 32-bit words."""

    words: int
    arrays: tuple[ArraySpec, ...]

    @classmethod
    def of(cls, arrays: Iterable[tuple[str, tuple[int, ...], str]]) -> Layout:
        """Lays (name, shape, dtype) out one after another."""
        specs, offset = [], 0
        for name, shape, dtype in arrays:
            spec = ArraySpec(name, offset, tuple(shape), dtype)
            specs.append(spec)
            offset += math.ceil(spec.words / ALIGNMENT) * ALIGNMENT
        return cls(math.ceil(offset * 4 / PAGE) * PAGE // 4, tuple(specs))

    def __getitem__(self, name: str) -> ArraySpec:
        for spec in self.arrays:
            if spec.name == name:
                return spec
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        return any(spec.name == name for spec in self.arrays)

    @classmethod
    def from_manifest(cls, entry: dict[str, Any]) -> Layout:
        arrays = (ArraySpec(**{**a, "shape": tuple(a["shape"])}) for a in entry["arrays"])
        return cls(entry["words"], tuple(arrays))

    def to_manifest(self) -> dict[str, Any]:
        return {"words": self.words, "arrays": [asdict(a) for a in self.arrays]}

    def unpack(self, words: mx.array) -> dict[str, mx.array]:
        """The arrays in `words` (uint32 [self.words]), as views of the same memory."""
        arrays = {}
        for spec in self.arrays:
            dtype = DTYPES[spec.dtype]
            flat = words[spec.offset : spec.offset + spec.words].view(dtype)
            # An array of 8 or 16 bits may be padded to a whole word.
            arrays[spec.name] = flat[: math.prod(spec.shape)].reshape(spec.shape)
        return arrays


# MLX's modes: their (bits, group size), where the mode leaves no choice.
MODES = {"affine": None, "mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
AFFINE = {2, 3, 4, 5, 6, 8}, {32, 64, 128}  # bits and group sizes of the one that does


@dataclass(frozen=True)
class Quantization:
    """One of MLX's: `bits` a weight, and for each `group_size` weights a scale.

    ``affine`` has a bias for each group too; the other modes' weights are small floating-point
    numbers, and their scales as well, in a `uint8` each.
    """

    bits: int = 4
    group_size: int = 64
    mode: str = "affine"

    @classmethod
    def of(cls, arrays: Mapping[str, Any], prefix: str, columns: int) -> Quantization:
        """What the shapes of `prefix`weight, `prefix`scales and, where there are, `prefix`biases

        say of the matrix of so many columns. Raises ValueError where they fit no quantization.
        """
        weight, scales = (arrays[prefix + part].shape[1] for part in ("weight", "scales"))
        bits, group_size = 32 * weight // columns, columns // scales
        if (32 * weight, columns) == (bits * columns, group_size * scales):
            for mode in MODES:
                found = cls(bits, group_size, mode)
                if found.is_of_mlx and (mode == "affine") == (prefix + "biases" in arrays):
                    return found
        raise ValueError(f"{prefix}weight has {bits} bits in groups of {group_size}")

    @property
    def is_of_mlx(self) -> bool:
        """Whether MLX has it."""
        if self.mode == "affine":
            return self.bits in AFFINE[0] and self.group_size in AFFINE[1]
        return MODES.get(self.mode) == (self.bits, self.group_size)

    @property
    def parts(self) -> tuple[str, ...]:
        """The arrays of a quantized matrix."""
        return ("weight", "scales", "biases")[: 3 if self.mode == "affine" else 2]

    def arrays(self, prefix: str, rows: int, columns: int, dtype: str) -> list:
        """(name, shape, dtype) of the arrays of a quantized [rows, columns] matrix."""
        groups = (rows, columns // self.group_size)
        kinds = [
            ((rows, columns * self.bits // 32), "uint32"),
            (groups, dtype if self.mode == "affine" else "uint8"),
            (groups, dtype),
        ]
        return [(prefix + part, *kind) for part, kind in zip(self.parts, kinds, strict=False)]


def block_layout(
    arch: Architecture, quantizations: Mapping[str, Quantization], dtype: str
) -> Layout:
    """The layout of a block whose modules are quantized so; array names are mlx-lm's."""
    arrays: list = [(name, (size,), dtype) for name, size in arch.norms().items()]
    for name, (rows, columns) in arch.sizes().items():
        arrays += quantizations[name].arrays(name + ".", rows, columns, dtype)
        if name in arch.biases:
            arrays.append((name + ".bias", (rows,), dtype))
    return Layout.of(arrays)


def table_layout(arch: Architecture, quantization: Quantization, dtype: str, norm: bool) -> Layout:
    """The layout of ``embedding.bin`` or ``head.bin``; the one used as head has the `norm`."""
    arrays = quantization.arrays("", arch.vocab_size, arch.hidden_size, dtype)
    if norm:
        arrays.append(("norm", (arch.hidden_size,), dtype))
    return Layout.of(arrays)


# Reading


# What commands read of a manifest, by its type; `Bundle` reads the rest.
READ_BY_COMMANDS = {
    "name": str,
    "device": str,
    "seq_lens": [int],
    "ranks": [int],
    "architecture": dict,
    "files": [{"path": str, "size": int}],
}
_PACKED = {
    "words": int,
    "arrays": [{"name": str, "offset": int, "shape": [int], "dtype": str}],
}
READ_BY_BUNDLE = {
    "quantization": {"bits": int, "group_size": int, "mode": str},
    "blocks": [{"layers": [int], "functions": dict, "plain_functions": dict, **_PACKED}],
    "embedding": {"file": str, **_PACKED},
    "head": {"file": str, **_PACKED},
}


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a JSON value has the keys and types `wanted`; a number may not be negative."""
    if isinstance(wanted, dict):
        return isinstance(value, dict) and all(_fits(value.get(k), wanted[k]) for k in wanted)
    if isinstance(wanted, list):
        return isinstance(value, list) and all(_fits(each, wanted[0]) for each in value)
    return type(value) is wanted and (wanted is not int or 0 <= value < 1 << 53)


def _block_file(index: int) -> str:
    return f"blocks/{index:02d}.bin"


def _check_arrays(found: Layout, expected: Layout) -> None:
    """Raises ValueError unless both hold the same arrays."""
    described = [
        {spec.name: (spec.shape, spec.dtype) for spec in layout.arrays}
        for layout in (found, expected)
    ]
    if described[0] != described[1]:
        raise ValueError("its arrays are not the architecture's")


def _data_files(entry: dict[str, Any]) -> list[Any]:
    """The files of a split."""
    return [entry["file"], *([entry["examples"]["file"]] if "examples" in entry else [])]


def _is_split(entry: Any) -> bool:
    return _fits(entry, {"tokens": int}) and (
        "examples" not in entry or _fits(entry["examples"], {"count": int})
    )


def _check_inside(bundle: Path, name: str) -> None:
    """Raises MespError where a file's name, or a link on the way to it, leads out of the bundle."""
    parts = name.split("/")
    usable = "\0" not in name and not {"", ".", ".."}.intersection(parts)
    if not usable or (bundle / name).resolve() != bundle.resolve().joinpath(*parts):
        raise MespError(f"{bundle} names a file outside of it, {name!r}; do not use it.")


def read_manifest(path: Path, to_run: bool = True) -> dict[str, Any]:
    """The manifest of the bundle at `path`, after checking that this machine can run it.

    Raises MespError where the folder is no bundle, is of another format, lacks a file or part of
    one, or, unless it is not `to_run`, is of another MLX version or needs a GPU that is not there.
    Contents are checked by `Bundle.verify`.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        version, mlx_version = manifest["format"], manifest["mlx_version"]
    except FileNotFoundError as error:
        raise MespError(
            f"{path} is not a bundle (it has no manifest.json); write one with mesp-export."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MespError(
            f"{path / 'manifest.json'} cannot be read; write the bundle again with mesp-export."
        ) from error
    if version != FORMAT:
        raise MespError(
            f"{path} has bundle format {version}, and this version reads format {FORMAT}; "
            "write the bundle again with this version's mesp-export."
        )
    if to_run and mlx_version != mx.__version__:
        raise MespError(
            f"{path} was exported with MLX {mlx_version}, and this is MLX {mx.__version__}; "
            f"write the bundle again, or install mlx=={mlx_version}."
        )
    if to_run and manifest.get("device") == "gpu" and not mx.metal.is_available():
        raise MespError(
            f"{path} was exported for a GPU, and this machine has none that MLX can use; "
            "write the bundle again with --device cpu."
        )
    data = manifest.get("data") or {}
    if (
        not _fits(manifest, READ_BY_COMMANDS)
        or not (manifest["seq_lens"] and manifest["ranks"])
        or not (isinstance(data, dict) and all(_is_split(split) for split in data.values()))
    ):
        raise _damaged(path)
    try:
        Architecture.from_manifest(manifest["architecture"])
    except (TypeError, KeyError, ValueError, ArithmeticError) as error:
        raise _damaged(path) from error
    for entry in manifest["files"]:
        file = path / entry["path"]
        _check_inside(path, entry["path"])
        size = file.stat().st_size if file.is_file() else None
        if size != entry["size"]:
            found = "missing" if size is None else f"{size:,} bytes long, not {entry['size']:,}"
            raise MespError(f"{file} is {found}; write the bundle again with mesp-export.")
    return manifest


def _damaged(path: Path) -> MespError:
    return MespError(f"{path / 'manifest.json'} is damaged; write the bundle again.")


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of one layout and one kind of attention, and their functions' files by length."""

    layers: tuple[int, ...]
    functions: dict[str, str]
    plain_functions: dict[str, str]
    layout: Layout

    @classmethod
    def from_manifest(cls, entry: dict[str, Any]) -> BlockGroup:
        layers, layout = tuple(entry["layers"]), Layout.from_manifest(entry)
        return cls(layers, entry["functions"], entry["plain_functions"], layout)

    def to_manifest(self) -> dict[str, Any]:
        described = {name: getattr(self, name) for name in ("functions", "plain_functions")}
        return {"layers": self.layers, **described, **self.layout.to_manifest()}


class Bundle:
    """A bundle, read from its folder. Weights are mapped, and copied when they become arrays."""

    def __init__(self, path: Path | str):
        """Raises MespError where the bundle cannot be used; see `read_manifest`."""
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        try:
            self.architecture = Architecture.from_manifest(self.manifest["architecture"])
            if not _fits(self.manifest, READ_BY_BUNDLE):
                raise ValueError("it lacks something")
            self.quantization = Quantization(**self.manifest["quantization"])
            self.groups = [BlockGroup.from_manifest(entry) for entry in self.manifest["blocks"]]
            self._check_groups()
            self._check_files()
        except (TypeError, LookupError, AttributeError, ValueError, ArithmeticError) as error:
            raise _damaged(self.path) from error

    def _check_groups(self) -> None:
        """Raises ValueError unless each block is in one group, of one kind of attention, and every
        layout holds the architecture's arrays."""
        arch, dtype = self.architecture, self.manifest["dtype"]
        layers = [layer for group in self.groups for layer in group.layers]
        if sorted(layers) != list(range(arch.num_hidden_layers)):
            raise ValueError("a block is in no group, or in several")
        for group in self.groups:
            if len({arch.kind(layer) for layer in group.layers}) != 1:
                raise ValueError("blocks of a group differ in their attention")
            quantizations = {
                name: Quantization.of(group.layout, f"{name}.", columns)
                for name, (_, columns) in arch.sizes().items()
            }
            _check_arrays(group.layout, block_layout(arch, quantizations, dtype))
        for table in ("embedding", "head"):
            layout = Layout.from_manifest(self.manifest[table])
            quantization = Quantization.of(layout, "", arch.hidden_size)
            norm = table == "head" or arch.tie_word_embeddings
            _check_arrays(layout, table_layout(arch, quantization, dtype, norm))

    def _check_files(self) -> None:
        """Raises ValueError unless each file that the manifest names is in its list, and each
        array within its file."""
        sizes = {entry["path"]: entry["size"] for entry in self.manifest["files"]}
        manifest = self.manifest
        named = [file for split in manifest.get("data", {}).values() for file in _data_files(split)]
        for group in self.groups:
            for functions in (group.functions, group.plain_functions):
                if not functions.keys() >= set(map(str, manifest["seq_lens"])):
                    raise ValueError("it lacks a function")
                named += functions.values()
        if not sizes.keys() >= set(named):
            raise ValueError("it names a file that it does not list")
        packed = {_block_file(i): group.layout for group in self.groups for i in group.layers}
        for table in ("embedding", "head"):
            packed[manifest[table]["file"]] = Layout.from_manifest(manifest[table])
        for file, layout in packed.items():
            if sizes[file] != layout.words * 4 or any(
                spec.offset + spec.words > layout.words for spec in layout.arrays
            ):
                raise ValueError("an array is not within its file")

    def group(self, index: int) -> BlockGroup:
        """The group that block `index` is in."""
        return next(group for group in self.groups if index in group.layers)

    def block_words(self, index: int) -> mx.array:
        """A block's file as the block function takes it: uint32 [words]."""
        return self._words(_block_file(index))

    def block(self, index: int) -> dict[str, mx.array]:
        """A block's arrays by mlx-lm's names, such as ``self_attn.q_proj.weight``."""
        return self.group(index).layout.unpack(self.block_words(index))

    def embedding(self) -> dict[str, mx.array]:
        """The embedding's ``weight`` (packed [vocab_size, …]), ``scales`` and ``biases``."""
        return self._table("embedding")

    def head(self) -> dict[str, mx.array]:
        """The output projection's arrays as in `embedding`, and ``norm``, the final RMSNorm's."""
        return self._table("head")

    def to_mlx_lm(self) -> nn.Module:
        """The weights, quantized as they are, as mlx-lm's model."""
        from mlx_lm.utils import _get_classes  # here, as it takes tens of MB

        arch = self.architecture
        config = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        model_class, arguments = _get_classes(config)
        model = model_class(arguments.from_dict(config))

        head = self.head()
        weights = {"model.norm.weight": head.pop("norm") - arch.norm_offset}
        tables = {"model.embed_tokens": self.embedding()}
        tables |= {} if arch.tie_word_embeddings else {"lm_head": head}
        for table, arrays in tables.items():
            weights |= {f"{table}.{part}": a for part, a in arrays.items() if part != "norm"}
        for index in range(arch.num_hidden_layers):
            block = self.block(index)
            block |= {name: block[name] - arch.norm_offset for name in arch.norms()}
            weights |= {f"model.layers.{index}.{name}": array for name, array in block.items()}
        if hasattr(model, "sanitize"):
            weights = model.sanitize(weights)

        def quantization(path: str, module: nn.Module) -> dict[str, Any] | bool:
            if f"{path}.scales" not in weights:
                return False
            return asdict(Quantization.of(weights, f"{path}.", module.weight.shape[1]))

        nn.quantize(model, class_predicate=quantization)
        model.load_weights(list(weights.items()))
        return model

    def function(self, seq_len: int, index: int = 0, plain: bool = False) -> Any:
        """Block `index`'s function, or its plain twin: (x, lora, scale, weights) to its arrays."""
        group = self.group(index)
        files = group.plain_functions if plain else group.functions
        return mx.import_function(str(self.path / files[str(seq_len)]))

    def tokens(self, split: str) -> np.ndarray:
        """The token stream ``train``, ``valid`` or ``test``: uint32 [N], mapped."""
        return self._map(self._data(split)["file"])

    def examples(self, split: str) -> np.ndarray | None:
        """Where in `tokens` each example lies: uint32 [M, 3], mapped; None for a packed stream.

        A row is (start, length, prompt): the tokens [start, start + length), of which the
        prediction of the first `prompt` is not in the loss.
        """
        entry = self._data(split).get("examples")
        return None if entry is None else self._map(entry["file"]).reshape(-1, 3)

    def verify(self) -> None:
        """Raises MespError naming the first file whose content is not what was exported."""
        for entry in self.manifest["files"]:
            if sha256(self.path / entry["path"]) != entry["sha256"]:
                raise MespError(
                    f"{self.path / entry['path']} is damaged (its SHA-256 is not the manifest's); "
                    "write the bundle again with mesp-export."
                )

    def _data(self, split: str) -> dict[str, Any]:
        if split not in self.manifest.get("data", {}):
            raise MespError(f"{self.path} holds no {split} data; add some with mesp-data.")
        return self.manifest["data"][split]

    def _table(self, which: str) -> dict[str, mx.array]:
        entry = self.manifest[which]
        return Layout.from_manifest(entry).unpack(self._words(entry["file"]))

    def _words(self, name: str) -> mx.array:
        return mx.array(self._map(name))

    def _map(self, name: str) -> np.ndarray:
        return np.memmap(self.path / name, dtype="<u4", mode="r")


# Writing

Piece = tuple[str, int, mx.array]  # an array of the layout, a row of it, the rows from there on


def write_weights(
    path: Path, layout: Layout, pieces: Iterable[Piece], progress: Callable[[int], Any]
) -> None:
    """Writes a weight file; `progress` is called with the number of bytes after each piece."""
    with open(path, "xb") as file:
        file.truncate(layout.words * 4)
        for name, row, array in pieces:
            spec = layout[name]
            data = np.array(array.astype(DTYPES[spec.dtype]).flatten().view(mx.uint8))
            file.seek(spec.offset * 4 + row * data.size // array.shape[0])
            file.write(data)
            progress(data.size)


@contextmanager
def new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    """A folder to write a bundle into; see `replacing`. Raises MespError where `path` is taken."""
    if overwrite and path.exists() and not (path / "manifest.json").is_file():
        raise MespError(f"{path} is not a bundle, so it is not replaced; name another --out.")
    if not overwrite and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise MespError(f"{path} exists; name another --out, or replace it with --overwrite.")
    old = f"mesp-export or mesp-data is writing to {path}"
    with (
        locked(path, old) if path.exists() else nullcontext(),
        replacing(path, f"mesp-export is writing {path}") as folder,
    ):
        yield folder


@contextmanager
def replacing(path: Path, doing: str) -> Iterator[Path]:
    """A folder beside `path` to write into, which becomes `path` at once when all went well.

    Otherwise it is removed; what a killed process left behind is removed by the next one. Raises
    MespError where another process is `doing` the same.
    """
    parents = [parent for parent in path.parents if not parent.exists()]
    unfinished = path.parent / f".{path.name}.partial"
    unfinished.mkdir(parents=True, exist_ok=True)
    with locked(unfinished, doing):
        try:
            _empty(unfinished)
            yield unfinished
            for written in (*unfinished.rglob("*"), unfinished):
                sync(written)
            put_in_place(unfinished, path)
            sync(path.parent)
            shutil.rmtree(unfinished, ignore_errors=True)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            for parent in parents:
                with suppress(OSError):
                    parent.rmdir()
            raise


def put_in_place(new: Path, path: Path) -> None:
    """Gives the folder `new` the name `path`. A folder there before gets the name `new`.

    Whoever looks sees the one or the other; where the file system cannot exchange two names, for
    a moment neither.
    """
    if not path.exists() or not any(path.iterdir()):
        os.rename(new, path)
    elif not _exchange(new, path):
        old = path.with_name(f".{path.name}.replaced")
        os.rename(path, old)
        os.rename(new, path)
        os.rename(old, new)


def _exchange(a: Path, b: Path) -> bool:
    """Exchanges two names at once, as Python's os cannot; False where this system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(a), os.fsencode(b)
    if sys.platform == "darwin":
        return library.renamex_np(*names, 2) == 0  # RENAME_SWAP
    if not hasattr(library, "renameat2"):
        return False
    at = -100  # AT_FDCWD
    return library.renameat2(at, names[0], at, names[1], 2) == 0  # RENAME_EXCHANGE


@contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """A lock on a folder, which ends with the process at the latest.

    Raises MespError where another process holds it, who is `doing` that; it begins a sentence.
    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise MespError(f"Another {doing}{_holder(lock)}; wait for it.") from error
        yield
    finally:
        os.close(lock)


def _holder(lock: int) -> str:
    """Who holds the lock on an open folder, as Linux tells; empty where it does not."""
    with suppress(OSError):
        inode = os.fstat(lock).st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "FLOCK" in fields and fields[-3].split(":")[-1] == str(inode):
                return f" (process {fields[fields.index('FLOCK') + 3]} on {socket.gethostname()})"
    return ""


def _empty(folder: Path) -> None:
    for left in folder.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def describe_files(bundle: Path, folder: str = ".") -> list[dict[str, Any]]:
    """The manifest's ``files``: every file in the bundle, or in a folder of it."""
    files = sorted(path for path in (bundle / folder).rglob("*") if path.is_file())
    return [
        {
            "path": file.relative_to(bundle).as_posix(),
            "size": file.stat().st_size,
            "sha256": sha256(file),
        }
        for file in files
    ]


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps(manifest, indent=1, ensure_ascii=False)
    (folder / "manifest.json").write_text(text + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
