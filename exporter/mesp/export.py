"""mesp-export: quantizes a model and writes it as a bundle."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mesp.block import BlockFunction, block_function, export_block, tiles
from mesp.bundle import (
    DTYPES,
    FORMAT,
    MODES,
    BlockGroup,
    Layout,
    Piece,
    Quantization,
    block_layout,
    describe_files,
    new_folder,
    table_layout,
    write_manifest,
    write_weights,
)
from mesp.data import (
    SOURCES,
    DataOptions,
    Split,
    data_options,
    describe,
    load,
    load_tokenizer,
    random_data,
    write_data,
)
from mesp.engine import CHECKOUT, built_engine, find_plan
from mesp.errors import MespError, plain_os_errors
from mesp.hub import download
from mesp.log import megabytes
from mesp.models.architecture import Architecture
from mesp.models.attention_kinds import Attention
from mesp.models.config_json import complete
from mesp.models.short_names import KNOWN, geometries

TILE = 1 << 22  # elements of a matrix that are quantized at a time
DEMO = Path(__file__).parent / "demo_model"
BITS = (4, 8)  # that a model is quantized to here
DEVICE = "gpu" if mx.metal.is_available() else "cpu"
DTYPE_OF = {"cpu": "float32", "gpu": "bfloat16"}  # where none is asked for
CONSOLE = Console(stderr=True)
COLUMNS = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True)
class Source:
    """Where a model comes from; `folder` is None for random weights of a built-in geometry."""

    name: str
    id: str
    config: dict[str, Any]
    folder: Path | None = None
    revision: str | None = None
    license: str | None = None


def find_source(model: str, random_weights: bool) -> Source:
    """Finds a model by short name, folder, Hub id or ``demo``, downloading it where need be.

    With `random_weights` only its geometry and tokenizer are needed, and for a short name nothing
    is downloaded.
    """
    if model == "demo":
        return replace(_local_source(DEMO), name="demo", id="demo")
    if os.path.isdir(model):
        return _local_source(Path(model))
    for short, (repo, _, config) in KNOWN.items():
        if model.lower() in (short.lower(), repo.lower()):
            return Source(short, repo, config) if random_weights else _hub_source(repo)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        return _hub_source(model, random_weights)
    raise MespError(
        f"There is no model {model}; name a folder, a model on the Hugging Face Hub such as "
        "Qwen/Qwen2.5-0.5B, demo, or a short name that --list-models prints."
    )


def _local_source(folder: Path) -> Source:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except FileNotFoundError as error:
        raise MespError(f"{folder} is not a Hugging Face model: it has no config.json.") from error
    except (OSError, ValueError) as error:
        raise MespError(f"{folder / 'config.json'} cannot be read as a JSON object.") from error
    name = folder.resolve().name
    return Source(name, name, config, folder, license=_license(folder / "README.md"))


def _hub_source(repo: str, random_weights: bool = False) -> Source:
    patterns = ["config.json", *TOKENIZER_FILES, "README.md", "LICENSE*"]
    if not random_weights:
        patterns += ["model*.safetensors", "*.safetensors.index.json"]
    folder = download("model", repo, patterns)
    return replace(_local_source(folder), name=repo.split("/")[1], id=repo, revision=folder.name)


def _license(model_card: Path) -> str | None:
    from huggingface_hub import ModelCard

    try:
        return ModelCard(model_card.read_text(encoding="utf-8")).data.get("license")
    except Exception:  # there is no model card, or it is not in order: it only informs
        return None


@dataclass(frozen=True)
class Quantizations:
    """Of a model's matrices: the main one, and those of modules that differ, by their names.

    A module that is named with None is not quantized.
    """

    main: Quantization
    others: dict[str, Quantization | None] = field(default_factory=dict)
    config: dict[str, Any] | None = None  # the model's own ``quantization``

    def of(self, module: str) -> Quantization:
        """Raises MespError where the module is not quantized."""
        quantization = self.others.get(module, self.main)
        if quantization is None:
            raise _not_quantized(module)
        return quantization


def _not_quantized(module: str) -> MespError:
    return MespError(
        f"{module} is not quantized, unlike the rest of the model, which is not supported; take "
        "the model it was made from."
    )


def _not_in_order(key: str) -> MespError:
    return MespError(
        f"The model's config.json is not in order (its {key} cannot be used); take an unchanged "
        "config.json."
    )


def find_quantizations(
    source: Source, mode: str | None, bits: int | None, group_size: int | None
) -> Quantizations:
    """The quantization asked for (None: the default), or that of a model that has one already."""
    config = source.config
    for key in ("quantization_config", "quantization"):
        if not isinstance(config.get(key) or {}, dict):
            raise _not_in_order(key)
    method = (config.get("quantization_config") or {}).get("quant_method")
    if method:
        raise MespError(
            f"{source.name} is quantized by {method}, which is not supported; take the model it "
            "was made from, or one quantized by mlx-lm."
        )
    given = config.get("quantization")
    asked = (mode, bits, group_size)
    if not given:
        return Quantizations(choose_quantization(*asked))

    def read(entry: dict[str, Any]) -> Quantization:
        size, group, mode = entry.get("bits"), entry.get("group_size"), entry.get("mode", "affine")
        sound = all(n is None or type(n) is int for n in (size, group)) and isinstance(mode, str)
        if not sound:
            raise _not_in_order("quantization")
        default = MODES.get(mode) or (4, 64)
        quantization = Quantization(size or default[0], group or default[1], mode)
        if not quantization.is_of_mlx:
            raise MespError(
                f"{source.name} is quantized to {describe_quantization(quantization)}, which MLX "
                "does not have; take the model it was made from."
            )
        return quantization

    main = read(given)
    had = (main.mode, main.bits, main.group_size)
    if any(a is not None and a != b for a, b in zip(asked, had, strict=True)):
        raise MespError(
            f"{source.name} is quantized already, to {describe_quantization(main)}; leave out "
            "--mode, --bits and --group-size."
        )
    # As mlx-lm: a dictionary for a module's own, or whether it is quantized as the rest.
    others = {
        name: read(entry) if isinstance(entry, dict) else main if entry else None
        for name, entry in given.items()
        if isinstance(entry, dict | bool)
    }
    return Quantizations(main, others, given)


def choose_quantization(mode: str | None, bits: int | None, group_size: int | None) -> Quantization:
    mode = mode or "affine"
    if mode == "affine":
        return Quantization(bits or 4, group_size or 64)
    quantization = Quantization(*MODES[mode], mode)
    if (bits or quantization.bits, group_size or quantization.group_size) != MODES[mode]:
        raise MespError(
            f"--mode {mode} is {quantization.bits} bits in groups of {quantization.group_size}; "
            "leave out --bits and --group-size."
        )
    return quantization


def describe_quantization(quantization: Quantization) -> str:
    mode = "" if quantization.mode == "affine" else f"{quantization.mode}, "
    return f"{mode}{quantization.bits} bits in groups of {quantization.group_size}"


class RandomWeights:
    """Weights of a geometry, drawn at random as they are asked for."""

    def __init__(self, seed: int, norm: float = 1.0):
        """`norm` is what the norms' weights are."""
        self.seed, self.norm = seed, norm
        self.generators: dict[str, np.random.Generator] = {}

    has_float16_scales = False

    def is_quantized(self, name: str) -> bool:
        return False

    def rows(self, name: str, shape: tuple[int, ...], rows: slice) -> mx.array:
        size = (rows.stop - rows.start, *shape[1:])
        if "norm" in name:
            return mx.full(size, self.norm)
        seed = (self.seed, zlib.crc32(name.encode()))
        generator = self.generators.setdefault(name, np.random.default_rng(seed))
        return mx.array(0.02 * generator.standard_normal(size, dtype=np.float32))


# Types in a safetensors file: as NumPy reads them (it has no bfloat16), and what they are.
TENSOR_DTYPES = {
    "F32": (np.float32, mx.float32),
    "F16": (np.float16, mx.float16),
    "BF16": (np.uint16, mx.bfloat16),
    "U32": (np.uint32, mx.uint32),
    "U8": (np.uint8, mx.uint8),
}


class SafetensorsWeights:
    """The tensors of a model folder, mapped, and read by rows."""

    def __init__(self, folder: Path):
        """Raises MespError where a file is missing or truncated."""
        self.folder = folder
        self.tensors: dict[str, tuple[np.ndarray, mx.Dtype]] = {}
        self.unreadable: dict[str, str] = {}  # the dtypes of those that cannot be used
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise MespError(f"{index} cannot be read; download the model again.") from error
            files = [folder / name for name in sorted(names)]
        else:
            files = sorted(folder.glob("model*.safetensors"))
        if not files:
            raise MespError(f"{folder} holds no weights (model*.safetensors).")
        for file in files:
            self._map(file)

    def _map(self, file: Path) -> None:
        """Adds a file's tensors: after its length, a JSON header says where in the rest each lies.

        The safetensors package is not used as it cannot read part of a bfloat16 tensor.
        """
        try:
            with open(file, "rb") as opened:
                start = 8 + int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(start - 8))
            data = np.memmap(file, mode="r", offset=start)
            header.pop("__metadata__", None)
            for name, tensor in header.items():
                if tensor["dtype"] not in TENSOR_DTYPES:
                    self.unreadable[name] = tensor["dtype"]
                    continue
                stored, dtype = TENSOR_DTYPES[tensor["dtype"]]
                begin, end = tensor["data_offsets"]
                array = data[begin:end].view(stored).reshape(tensor["shape"])
                self.tensors[name] = (array, dtype)
        except OSError as error:
            raise MespError(
                f"The weights {file} cannot be read ({error.strerror}); download the model again."
            ) from error
        except Exception as error:  # a damaged header can say anything
            raise MespError(
                f"The weights {file} are truncated or damaged; download the model again."
            ) from error

    def is_quantized(self, name: str) -> bool:
        return name + ".scales" in self.tensors

    @property
    def has_float16_scales(self) -> bool:
        return any(
            dtype == mx.float16 and name.endswith(".scales")
            for name, (_, dtype) in self.tensors.items()
        )

    def rows(self, name: str, shape: tuple[int, ...], rows: slice) -> mx.array:
        """Some rows of a tensor. Raises MespError unless it is there, in this `shape`."""
        if name in self.unreadable:
            raise MespError(
                f"{name} in {self.folder} is of type {self.unreadable[name]}, which is not "
                f"supported; take a model of one of {', '.join(TENSOR_DTYPES)}."
            )
        if name not in self.tensors:
            if any(each.startswith("language_model.") for each in self.tensors):
                raise MespError(
                    f"The weights in {self.folder} are part of a multimodal model; take a "
                    "text-only one."
                )
            raise MespError(f"The weights in {self.folder} lack {name}; download the model again.")
        array, dtype = self.tensors[name]
        if array.shape != shape:
            raise MespError(
                f"The weights in {self.folder} do not fit its config.json: {name} is "
                f"{list(array.shape)}, not {list(shape)}."
            )
        return mx.array(array[rows]).view(dtype)


Weights = RandomWeights | SafetensorsWeights


def block_pieces(
    weights: Weights, index: int, layout: Layout, arch: Architecture, quantizations: Quantizations
) -> Iterator[Piece]:
    """What goes into a block's file."""
    prefix = f"model.layers.{index}."
    for name in arch.norms():
        yield name, 0, norm(weights, prefix + name, layout[name].shape, arch)
    for name in arch.biases:
        shape = layout[f"{name}.bias"].shape
        yield f"{name}.bias", 0, weights.rows(f"{prefix}{name}.bias", shape, slice(0, *shape))
    for name in arch.modules:
        yield from matrix_pieces(weights, prefix + name, layout, f"{name}.", quantizations)


def table_pieces(
    weights: Weights, source: str, layout: Layout, arch: Architecture, quantizations: Quantizations
) -> Iterator[Piece]:
    """What goes into the file of the embedding or the head; the one used as head has the norm."""
    yield from matrix_pieces(weights, source, layout, "", quantizations)
    if "norm" in layout:
        yield "norm", 0, norm(weights, "model.norm.weight", layout["norm"].shape, arch)


def norm(weights: Weights, source: str, shape: tuple[int], arch: Architecture) -> mx.array:
    """What a normed vector is multiplied by."""
    return weights.rows(source, shape, slice(0, *shape)).astype(mx.float32) + arch.norm_offset


def matrix_pieces(
    weights: Weights, source: str, layout: Layout, prefix: str, quantizations: Quantizations
) -> Iterator[Piece]:
    """The matrix `source` quantized, some rows at a time; as it is where it comes quantized.

    A bfloat16 bundle rounds float16 scales and biases, by 3 bits of their mantissa.
    """
    quantization = quantizations.of(source)
    parts = quantization.parts
    shapes = [layout[prefix + part].shape for part in parts]
    count, columns = shapes[0][0], shapes[0][1] * 32 // quantization.bits
    if (
        quantizations.config
        and not weights.is_quantized(source)
        and isinstance(weights, SafetensorsWeights)
        and f"{source}.weight" in weights.tensors
    ):
        raise _not_quantized(source)
    for rows in tiles(count, TILE // columns):
        if weights.is_quantized(source):
            arrays = [
                weights.rows(f"{source}.{part}", shape, rows)
                for part, shape in zip(parts, shapes, strict=True)
            ]
        else:
            matrix = weights.rows(f"{source}.weight", (count, columns), rows)
            arrays = mx.quantize(matrix.astype(mx.float32), **asdict(quantization))
        for part, array in zip(parts, arrays, strict=True):
            yield prefix + part, rows.start, array


WeightFiles = dict[str, tuple[Layout, Iterable[Piece]]]  # by path


@dataclass(frozen=True)
class Options:
    """What to write, all of it checked."""

    out: Path
    data: str | None
    data_options: DataOptions
    seq_lens: list[int]
    ranks: list[int]
    quantizations: Quantizations
    dtype: str
    device: str
    seed: int
    overwrite: bool


def export(source: Source, weights: Weights, arch: Architecture, options: Options) -> dict:
    """Writes the bundle `options.out` and returns its manifest."""
    check_quantizations(arch, options.quantizations)
    files = weight_files(weights, arch, options)
    total = weight_bytes(files)
    with (
        plain_os_errors(f"Cannot write {options.out}"),
        new_folder(options.out.resolve(), options.overwrite) as folder,
        Progress(*COLUMNS, transient=True, disable=not CONSOLE.is_terminal, console=CONSOLE) as bar,
    ):
        check_disk(options.out, folder, total)
        task = bar.add_task("Tokenizing", total=None)
        splits = tokenize(source, weights, arch, options)
        bar.update(task, description=f"Writing {options.out.name}", total=total)
        manifest = write_model(folder, source, arch, files, options, partial(bar.advance, task))
        manifest["data"] = write_data(folder, "data", splits)
        copy_texts(source, folder, arch, options.quantizations)
        manifest["files"] = describe_files(folder)
        write_manifest(folder, manifest)
    return manifest


def weight_files(weights: Weights | None, arch: Architecture, options: Options) -> WeightFiles:
    """The layout and the content of every weight file; no content where there are no `weights`."""
    quantizations, files = options.quantizations, {}
    for i in range(arch.num_hidden_layers):
        modules = {name: quantizations.of(f"model.layers.{i}.{name}") for name in arch.modules}
        layout = block_layout(arch, modules, options.dtype)
        pieces = block_pieces(weights, i, layout, arch, quantizations) if weights else ()
        files[f"blocks/{i:02d}.bin"] = layout, pieces
    tied = arch.tie_word_embeddings
    tables = [("embedding.bin", "model.embed_tokens", tied)]
    if not tied:
        tables.append(("head.bin", "lm_head", True))
    for file, name, is_head in tables:
        layout = table_layout(arch, quantizations.of(name), options.dtype, norm=is_head)
        pieces = table_pieces(weights, name, layout, arch, quantizations) if weights else ()
        files[file] = layout, pieces
    return files


def weight_bytes(files: WeightFiles) -> int:
    return sum(layout.words * 4 for layout, _ in files.values())


def write_model(
    folder: Path, source: Source, arch: Architecture, files: WeightFiles, options: Options,
    progress: Callable[[int], Any],
) -> dict[str, Any]:  # fmt: skip
    """Writes functions and weights, and returns the manifest but for its data and files."""
    (folder / "blocks").mkdir()
    layouts = {file: layout for file, (layout, _) in files.items()}
    blocks = [layouts[f"blocks/{i:02d}.bin"] for i in range(arch.num_hidden_layers)]
    groups = write_functions(folder, arch, blocks, options)
    for file, (layout, pieces) in files.items():
        write_weights(folder / file, layout, pieces, progress)
    head = "head.bin" if "head.bin" in files else "embedding.bin"
    return {
        "format": FORMAT,
        "name": source.name,
        "model": {"id": source.id, "revision": source.revision, "license": source.license},
        "mlx_version": mx.__version__,
        "device": options.device,
        "dtype": options.dtype,
        "architecture": arch.to_manifest(),
        "quantization": asdict(options.quantizations.main),
        "seq_lens": options.seq_lens,
        "ranks": options.ranks,
        "blocks": [group.to_manifest() for group in groups],
        "embedding": {"file": "embedding.bin", **layouts["embedding.bin"].to_manifest()},
        "head": {"file": head, **layouts[head].to_manifest()},
    }


def write_functions(
    folder: Path, arch: Architecture, layouts: list[Layout], options: Options
) -> list[BlockGroup]:
    """Writes the block functions and their plain twins, a file for each sequence length.

    Blocks of one layout and one kind of attention are a group, with functions of its own for the
    lengths at which no group before has the same: a window counts only for longer sequences.
    """
    members: dict[tuple[Layout, Attention], list[int]] = {}
    for i, layout in enumerate(layouts):
        members.setdefault((layout, arch.kind(i)), []).append(i)
    groups, written = [], {}
    for number, ((layout, kind), layers) in enumerate(members.items()):
        prefix = f"block.{number}." if number else "block."
        group = BlockGroup(tuple(layers), {}, {}, layout)
        for plain, files in ((False, group.functions), (True, group.plain_functions)):
            function = block_function(arch, kind, layout, options.device, plain)
            for seq_len in options.seq_lens:
                same = (layout, kind.within(seq_len), plain, seq_len)
                if same not in written:
                    written[same] = f"{prefix}{'plain.' if plain else ''}{seq_len}.mlxfn"
                    write_function(folder / written[same], function, arch, layout, seq_len, options)
                files[str(seq_len)] = written[same]
        groups.append(group)
    return groups


def write_function(
    path: Path,
    function: BlockFunction,
    arch: Architecture,
    layout: Layout,
    seq_len: int,
    options: Options,
) -> None:
    dtype, device, ranks = DTYPES[options.dtype], options.device, options.ranks
    try:
        export_block(str(path), function, arch, layout, dtype, device, [seq_len], ranks)
    except RuntimeError as error:
        raise MespError(f"Cannot write {options.out}: is the disk full? ({error})") from error


def check_quantizations(arch: Architecture, quantizations: Quantizations) -> None:
    """Raises MespError unless every matrix is quantized, and groups divide its rows."""
    columns = {"model.embed_tokens": arch.hidden_size}
    if not arch.tie_word_embeddings:
        columns["lm_head"] = arch.hidden_size
    for i in range(arch.num_hidden_layers):
        for name, (_, inp) in arch.sizes().items():
            columns[f"model.layers.{i}.{name}"] = inp
    for name, size in columns.items():
        group_size = quantizations.of(name).group_size
        if size % group_size:
            raise MespError(
                f"Groups of {group_size} weights do not divide the rows of {size} of {name}; take "
                "another --group-size, such as 32."
            )


def check_disk(out: Path, folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise MespError(
            f"Cannot write {out}: it takes {size / 1e6:,.0f} MB, and its disk has "
            f"{free / 1e6:,.0f} MB free; free some space or name another --out."
        )


def tokenize(
    source: Source, weights: Weights, arch: Architecture, options: Options
) -> dict[str, Split]:
    """The tokenized data by split; empty where there is none."""
    longest = max(options.seq_lens)
    if options.data is None:
        if isinstance(weights, RandomWeights):
            return random_data(arch.vocab_size, longest, options.seed)
        return {}
    if source.folder is None:
        raise MespError(
            f"{source.name} has no tokenizer here, so --data cannot be used with it; leave out "
            "--data (random weights then get random tokens), or give a folder with a tokenizer."
        )
    tokenizer = load_tokenizer(source.folder)
    return load(options.data, tokenizer, longest, arch.vocab_size, options.data_options)


def copy_texts(
    source: Source, folder: Path, arch: Architecture, quantizations: Quantizations
) -> None:
    """Writes config.json as of the bundle's weights; copies the tokenizer and the licence."""
    config = complete(source.config) | {
        "num_hidden_layers": arch.num_hidden_layers,
        "tie_word_embeddings": arch.tie_word_embeddings,
        "quantization": quantizations.config or asdict(quantizations.main),
    }
    for key in ("layer_types", "no_rope_layers"):  # one entry a block
        if isinstance(config.get(key), list):
            config[key] = config[key][: arch.num_hidden_layers]
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if source.folder:
        licenses = [f.name for f in source.folder.glob("LICENSE*") if f.is_file()]
        for name in (*TOKENIZER_FILES, *licenses):
            if (source.folder / name).is_file():
                shutil.copyfile(source.folder / name, folder / name)


def summary(out: Path, manifest: dict[str, Any]) -> str:
    """What was written, for people."""
    arch = Architecture.from_manifest(manifest["architecture"])
    size = sum(file["size"] for file in manifest["files"])
    lora = {r: arch.num_hidden_layers * arch.lora_size(r) for r in manifest["ranks"]}
    blocks = dict.fromkeys(f"{g['words'] * 4 / 1e6:,.2f}" for g in manifest["blocks"])
    lines = {
        "model": f"{manifest['name']}, {arch.num_hidden_layers} blocks, hidden size "
        f"{arch.hidden_size}, vocabulary {arch.vocab_size:,}",
        "weights": f"{describe_weights(manifest)}, "
        f"{manifest['dtype']} on the {manifest['device'].upper()}",
        "size": f"{size / 1e6:,.1f} MB: blocks of {' or '.join(blocks)} MB, "
        f"embedding {manifest['embedding']['words'] * 4 / 1e6:,.2f} MB",
        "sequences": " or ".join(map(str, manifest["seq_lens"])) + " tokens",
        "LoRA": "; ".join(f"rank {r}: {n:,} parameters" for r, n in lora.items()),
        "data": describe(manifest["data"]) or "none (training needs --data)",
    }
    if memory := predicted_memory(out, manifest):
        lines["memory"] = memory
    return "\n".join([f"Wrote {out}", *(f"  {key:10} {value}" for key, value in lines.items())])


def describe_weights(manifest: dict[str, Any]) -> str:
    """The quantization, and whether some matrices have another."""
    main = Quantization(**manifest["quantization"])
    arch = Architecture.from_manifest(manifest["architecture"])
    layouts = [(Layout.from_manifest(group), arch.sizes()) for group in manifest["blocks"]]
    table = {"": (arch.vocab_size, arch.hidden_size)}
    layouts += [(Layout.from_manifest(manifest[name]), table) for name in ("embedding", "head")]
    differ = any(
        Quantization.of(layout, f"{name}." if name else "", columns) != main
        for layout, sizes in layouts
        for name, (_, columns) in sizes.items()
    )
    return describe_quantization(main) + (", some matrices otherwise" if differ else "")


def predicted_memory(out: Path, manifest: dict[str, Any]) -> str | None:
    """The trainer's predicted peak for each length with its default plan, and the least possible.

    None where the engine has not been built: exporting does not need it.
    """
    try:
        plans = find_plans(out, manifest)
    except (MespError, OSError):
        return None
    peaks = (
        f"{length} tokens {megabytes(plan['predicted_peak_bytes'])} MB "
        f"(at least {megabytes(plan['least_peak_bytes'])})"
        for length, plan in plans.items()
    )
    return "training peaks at " + ", ".join(peaks)


def find_plans(bundle: Path, manifest: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The trainer's default plan by length, for the lowest rank.

    Raises OSError where the engine has not been built, MespError where it refuses.
    """
    size = {"bundle": str(bundle.resolve()), "rank": manifest["ranks"][0]}
    return {n: find_plan(engine_path(), {**size, "seq_len": n}) for n in manifest["seq_lens"]}


def engine_path() -> Path:
    return Path(os.environ.get("MESP_ENGINE") or built_engine(CHECKOUT))


# The list of models

LISTED_LENGTHS, LISTED_RANK = [256, 1024], 8
# Columns of the list, and to which side their text goes.
LISTED = {"model": "<", "parameters": ">", "MB on disk": ">", "licence": "<"}
LISTED |= {f"peak MB, {length:,} tokens": ">" for length in LISTED_LENGTHS}


def list_models(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    """Prints the models that have short names as a Markdown table, row by row, and exits.

    The size is that of the weights; peaks are of training with the default plan. Variants of one
    geometry share a row.
    """
    if not wanted:
        return
    labels = {
        first: ", ".join([first, *(name.removeprefix(first) for name in others)])
        for first, *others in geometries()
    }
    longest = {"model": labels.values(), "licence": [license for _, license, _ in KNOWN.values()]}
    widths = {title: max(map(len, (title, *longest.get(title, ())))) for title in LISTED}
    console = Console()

    def show(*cells: str) -> None:
        padded = (
            f"{cell:{side}{widths[title]}}"
            for cell, (title, side) in zip(cells, LISTED.items(), strict=True)
        )
        console.out(f"| {' | '.join(padded)} |", highlight=False)

    show(*LISTED)
    show(*(f"{'-' * (widths[title] - 1)}{'-' if s == '<' else ':'}" for title, s in LISTED.items()))
    built = os.access(engine_path(), os.X_OK)
    with console.status("") as status:
        for name, label in labels.items():
            status.update(f"Planning {name}")
            repo, license, config = KNOWN[name]
            arch = Architecture.from_config(config)
            options = Options(
                out=Path(name), data=None, data_options=DataOptions(), seq_lens=LISTED_LENGTHS,
                ranks=[LISTED_RANK], quantizations=Quantizations(Quantization()),
                dtype=DTYPE_OF[DEVICE], device=DEVICE, seed=0, overwrite=False,
            )  # fmt: skip
            files = weight_files(None, arch, options)
            peaks = ["-"] * len(LISTED_LENGTHS)
            if built:
                try:
                    plans = plans_without_weights(Source(name, repo, config), arch, files, options)
                    peaks = [megabytes(plan["predicted_peak_bytes"]) for plan in plans.values()]
                except MespError as error:
                    click.echo(f"{name}: {error.message}", err=True)
            size = megabytes(weight_bytes(files))
            show(label, f"{arch.num_parameters / 1e6:,.0f} M", size, license, *peaks)
    if not built:
        click.echo("The trainer predicts the peaks: build it with `make engine`.", err=True)
    context.exit()


def plans_without_weights(
    source: Source, arch: Architecture, files: WeightFiles, options: Options
) -> dict[int, dict[str, Any]]:
    """`find_plans` of a bundle whose weight files are holes: planning reads none of them."""
    with (
        plain_os_errors("Cannot plan the training"),
        tempfile.TemporaryDirectory(prefix="mesp-") as path,
    ):
        folder = Path(path)
        manifest = write_model(folder, source, arch, files, options, lambda size: None)
        manifest["data"] = {}
        manifest["files"] = [
            {"path": str(file.relative_to(folder)), "size": file.stat().st_size, "sha256": ""}
            for file in folder.rglob("*")
            if file.is_file()
        ]
        write_manifest(folder, manifest)
        return find_plans(folder, manifest)


class ListOptions(click.Command):
    """A command without positional arguments whose options may be given several values:

    ``--rank 4 8`` is ``--rank 4 --rank 8``.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        repeatable = {o for p in self.params if getattr(p, "multiple", False) for o in p.opts}
        spelled, current = [], None
        for arg in args:
            if arg.startswith("-"):
                current = arg if arg in repeatable else None
            elif current and spelled[-1] != current:
                spelled.append(current)
            spelled.append(arg)
        return super().parse_args(ctx, spelled)


@click.command(cls=ListOptions, context_settings={"show_default": True})
@click.option(
    "--list-models", is_flag=True, is_eager=True, expose_value=False, callback=list_models,
    help="List the models that have short names, with the memory that training takes, and exit.",
)  # fmt: skip
@click.option("--model", required=True, metavar="NAME|HUB_ID|DIR|demo", help="The model to export.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", show_default="NAME.mesp",
    help="The bundle to write.",
)  # fmt: skip
@click.option(
    "--data", metavar="FILE|DIR|NAME", show_default="python-docs for demo",
    help=f"Data to train on: {SOURCES}.",
)  # fmt: skip
@data_options
@click.option(
    "--seq-len", "seq_lens", multiple=True, type=click.IntRange(min=1), default=[256],
    metavar="N ...", help="Sequence lengths to train with.",
)  # fmt: skip
@click.option(
    "--mode", type=click.Choice(list(MODES)), show_default="affine",
    help="Kind of quantization; those but affine set the bits and the groups.",
)  # fmt: skip
@click.option(
    "--bits", type=click.Choice(list(map(str, BITS))), show_default="4", help="Bits a weight.",
)  # fmt: skip
@click.option(
    "--group-size", type=click.Choice(["32", "64", "128"]), show_default="64",
    help="Weights that share a scale.",
)  # fmt: skip
@click.option(
    "--rank", "ranks", multiple=True, type=click.IntRange(min=1), default=[8], metavar="R ...",
    help="LoRA ranks to train with.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]),
    show_default="float32 on the CPU, bfloat16 on the GPU", help="Type of activations.",
)  # fmt: skip
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "gpu"]), default="auto",
    help="Device the bundle runs on.",
)  # fmt: skip
@click.option("--random-weights", is_flag=True, help="The model's geometry with random weights.")
@click.option("--layers", type=click.IntRange(min=1), help="Keep only the first N blocks.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of --random-weights.")
@click.option("--overwrite", is_flag=True, help="Replace --out where it is a bundle.")
def main(
    model, out, data, data_options, seq_lens, mode, bits, group_size, ranks, dtype, device,
    random_weights, layers, seed, overwrite,
):  # fmt: skip
    """Quantize a model and write it as a bundle to fine-tune on an iPhone, a Mac or Linux."""
    if device == "auto":
        device = DEVICE
    elif device == "gpu" and DEVICE == "cpu":
        raise MespError("There is no GPU that MLX can use here; export with --device cpu.")
    source = find_source(model, random_weights)
    arch = Architecture.from_config(source.config)
    if layers and layers > arch.num_hidden_layers:
        raise MespError(f"{source.name} has {arch.num_hidden_layers} blocks, fewer than --layers.")
    arch = arch.first(layers or arch.num_hidden_layers)
    quantizations = find_quantizations(
        source, mode, bits and int(bits), group_size and int(group_size)
    )
    if random_weights:
        source = replace(source, name=f"{source.name}-random", revision=None)
        weights = RandomWeights(seed, norm=1 - arch.norm_offset)
    else:
        weights = SafetensorsWeights(source.folder)
        if arch.model_type == "gemma3_text" and weights.is_quantized("lm_head"):
            arch = replace(arch, tie_word_embeddings=False)  # a copy that older mlx-lm made
    if data is None and data_options != DataOptions():
        raise MespError("--pack, --mask-prompt and --long say how --data is taken; name it too.")
    if data is None and model == "demo" and not random_weights:
        data = "python-docs"
    options = Options(
        out=out or Path(f"{source.name}.mesp"),
        data=data,
        data_options=data_options,
        seq_lens=sorted(set(seq_lens)),
        ranks=sorted(set(ranks)),
        quantizations=quantizations,
        dtype=dtype or DTYPE_OF[device],
        device=device,
        seed=seed,
        overwrite=overwrite,
    )
    manifest = export(source, weights, arch, options)
    if options.dtype == "bfloat16" and quantizations.config and weights.has_float16_scales:
        click.echo(
            "Note: the model's scales are float16, and lose 3 bits of their mantissa in bfloat16; "
            "--dtype float32 keeps them.",
            err=True,
        )
    click.echo(summary(options.out, manifest))
