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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from mesp.errors import MespError
from mesp.models import BIASED, NORMS, Architecture

FORMAT = 1
PAGE = 16384  # bytes: the page of Apple's processors; weight files are whole pages, to be mapped
ALIGNMENT = 16  # words: every array starts on a 64-byte boundary

DTYPES = {"uint32": mx.uint32, "float32": mx.float32, "bfloat16": mx.bfloat16}


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
        return next(spec for spec in self.arrays if spec.name == name)

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
            # A bfloat16 array of odd length is padded to a whole word.
            arrays[spec.name] = flat[: math.prod(spec.shape)].reshape(spec.shape)
        return arrays


@dataclass(frozen=True)
class Quantization:
    """MLX's affine quantization: `bits` a weight, a scale and a bias per `group_size` weights."""

    bits: int = 4
    group_size: int = 64

    def arrays(self, prefix: str, rows: int, columns: int, dtype: str) -> list:
        """(name, shape, dtype) of the three arrays of a quantized [rows, columns] matrix."""
        groups = (rows, columns // self.group_size)
        return [
            (prefix + "weight", (rows, columns * self.bits // 32), "uint32"),
            (prefix + "scales", groups, dtype),
            (prefix + "biases", groups, dtype),
        ]


def block_layout(arch: Architecture, quantization: Quantization, dtype: str) -> Layout:
    """The layout of every ``blocks/NN.bin``; array names are mlx-lm's."""
    arrays: list = [(name, (arch.hidden_size,), dtype) for name in NORMS]
    for name, (rows, columns) in arch.projections().items():
        arrays += quantization.arrays(name + ".", rows, columns, dtype)
        if name in BIASED:
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
    "architecture": {"num_hidden_layers": int},
    "files": [{"path": str, "size": int}],
}
_PACKED = {
    "words": int,
    "arrays": [{"name": str, "offset": int, "shape": [int], "dtype": str}],
}
READ_BY_BUNDLE = {
    "architecture": {"hidden_size": int, "vocab_size": int},
    "quantization": {"bits": int, "group_size": int},
    "block": {"functions": dict, "plain_functions": dict, **_PACKED},
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
        raise MespError(f"{path / 'manifest.json'} is damaged; write the bundle again.")
    for entry in manifest["files"]:
        file = path / entry["path"]
        _check_inside(path, entry["path"])
        size = file.stat().st_size if file.is_file() else None
        if size != entry["size"]:
            found = "missing" if size is None else f"{size:,} bytes long, not {entry['size']:,}"
            raise MespError(f"{file} is {found}; write the bundle again with mesp-export.")
    return manifest


class Bundle:
    """A bundle, read from its folder. Weights are mapped, and copied when they become arrays."""

    def __init__(self, path: Path | str):
        """Raises MespError where the bundle cannot be used; see `read_manifest`."""
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        try:
            self.architecture = Architecture(**self.manifest["architecture"])
            self.quantization = Quantization(**self.manifest["quantization"])
            self.layout = Layout.from_manifest(self.manifest["block"])
            self._check_files()
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise MespError(
                f"The manifest of {path} is damaged; write the bundle again."
            ) from error

    def _check_files(self) -> None:
        """Raises ValueError unless each file that the manifest names is in its list, and each
        array within its file."""
        sizes = {entry["path"]: entry["size"] for entry in self.manifest["files"]}
        manifest = self.manifest
        if not _fits(manifest, READ_BY_BUNDLE) or self.architecture.num_hidden_layers > len(sizes):
            raise ValueError("it lacks something")
        named = [file for split in manifest.get("data", {}).values() for file in _data_files(split)]
        for functions in ("functions", "plain_functions"):
            named += manifest["block"][functions].values()
        if not sizes.keys() >= set(named):
            raise ValueError("it names a file that it does not list")
        packed = {
            f"blocks/{i:02d}.bin": "block" for i in range(self.architecture.num_hidden_layers)
        }
        packed |= {manifest[table]["file"]: table for table in ("embedding", "head")}
        for file, layout in packed.items():
            layout = Layout.from_manifest(manifest[layout])
            if sizes[file] != layout.words * 4 or any(
                spec.offset + spec.words > layout.words for spec in layout.arrays
            ):
                raise ValueError("an array is not within its file")

    def block_words(self, index: int) -> mx.array:
        """A block's file as the block function takes it: uint32 [layout.words]."""
        return self._words(f"blocks/{index:02d}.bin")

    def block(self, index: int) -> dict[str, mx.array]:
        """A block's arrays by mlx-lm's names, such as ``self_attn.q_proj.weight``."""
        return self.layout.unpack(self.block_words(index))

    def embedding(self) -> dict[str, mx.array]:
        """The embedding's ``weight`` (packed [vocab_size, …]), ``scales`` and ``biases``."""
        return self._table("embedding")

    def head(self) -> dict[str, mx.array]:
        """The output projection's arrays as in `embedding`, and ``norm``, the final RMSNorm's."""
        return self._table("head")

    def to_mlx_lm(self) -> nn.Module:
        """The weights, quantized as they are, as mlx-lm's model."""
        from mlx_lm.models import qwen2  # here, as it takes tens of MB

        config = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        model = qwen2.Model(qwen2.ModelArgs.from_dict(config))
        nn.quantize(model, self.quantization.group_size, self.quantization.bits)
        weights = {"model.norm.weight": self.head()["norm"]}
        for name in ("weight", "scales", "biases"):
            weights[f"model.embed_tokens.{name}"] = self.embedding()[name]
            if not config["tie_word_embeddings"]:
                weights[f"lm_head.{name}"] = self.head()[name]
        for index in range(self.architecture.num_hidden_layers):
            for name, array in self.block(index).items():
                weights[f"model.layers.{index}.{name}"] = array
        model.load_weights(list(weights.items()))
        return model

    def function(self, seq_len: int, plain: bool = False) -> Any:
        """The block function, or its plain twin: (x, lora, scale, weights) to nine arrays."""
        files = self.manifest["block"]["plain_functions" if plain else "functions"]
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
