from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mesp.block_function.check import check_block_functions
from mesp.block_function.mlxfn import check_mlx
from mesp.bundle.manifest import (
    FORMAT,
    BlockGroup,
    DataSplit,
    Table,
    damaged,
    read_manifest,
    sha256,
)
from mesp.errors import MespError, plain_os_errors
from mesp.files import read_bytes, read_object
from mesp.models.architecture import Architecture
from mesp.models.config_json import for_mlx_lm, plain_json
from mesp.models.families import FAMILIES
from mesp.models.layout import (
    DTYPE_OF,
    DTYPES,
    Layout,
    block_layout,
    per_layer_layout,
    table_layout,
)
from mesp.models.quantization_formats import Quantization
from mesp.models.tensor_names import CONVOLUTIONS, name_there

# The maximum size of a function file in bytes, about 100 times the largest that mesp-export writes.
FUNCTIONS = 64 << 20


def block_file(index: int) -> str:
    return f"blocks/{index:02d}.bin"


def _check_arrays(found: Layout, expected: Layout) -> None:
    described = [
        {a.name: (a.shape, a.dtype, a.stride is None) for a in layout.arrays}
        for layout in (found, expected)
    ]
    if described[0] != described[1]:
        raise ValueError("its arrays are not the architecture's")


class Bundle:
    """A bundle, read from its folder. Weight files are memory-mapped."""

    def __init__(self, path: str | os.PathLike[str], formats: tuple[int, ...] = (FORMAT,)):
        self.path = Path(path)
        self.manifest = read_manifest(self.path, formats)
        self.architecture = self.manifest.architecture
        try:
            if not self.manifest.quantization.is_of_mlx:
                raise ValueError("its quantization is unknown")
            self._check_groups()
            self._check_files()
        except (TypeError, LookupError, AttributeError, ValueError, ArithmeticError) as error:
            raise damaged(self.path) from error

    def _check_groups(self) -> None:
        arch = self.architecture
        layers = [layer for group in self.manifest.blocks for layer in group.layers]
        if sorted(layers) != list(range(arch.num_hidden_layers)):
            raise ValueError("a block is in no group, or in several")
        for group in self.manifest.blocks:
            kinds = {(arch.layers[layer], arch.mlp_layers[layer]) for layer in group.layers}
            if len(kinds) != 1:
                raise ValueError("blocks of a group differ in their mixer or their MLP")
        expected = self._expected_layouts()
        for file, layout in self.weight_files().items():
            _check_arrays(layout, expected[file])

    def tables(self) -> list[Table]:
        return [
            self.manifest.embedding, self.manifest.head, *self.manifest.per_layer.values()
        ]  # fmt: skip

    def _check_files(self) -> None:
        manifest = self.manifest
        sizes = {entry.path: entry.size for entry in manifest.files}
        hidden, splits = self.architecture.hidden_size, manifest.data.values()
        data = {file: size for each in splits for file, size in each.sizes(hidden).items()}
        for group in manifest.blocks:
            for functions in group.files:
                if not functions.keys() >= set(map(str, manifest.seq_lens)):
                    raise ValueError("it lacks a function")
        if not sizes.keys() >= {*data, *self.function_files()}:
            raise ValueError("it names a file that it does not list")
        if not all(split.tokens for split in manifest.data.values()) or any(
            sizes[file] != size for file, size in data.items()
        ):
            raise ValueError("a file of its data has another size than its arrays")
        for file, layout in self.weight_files().items():
            if sizes[file] != layout.words * 4 or any(
                not spec.is_within(layout.words) for spec in layout.arrays
            ):
                raise ValueError("an array is not within its file")

    def weight_files(self) -> dict[str, Layout]:
        blocks = {
            block_file(i): group.layout for group in self.manifest.blocks for i in group.layers
        }
        return blocks | {table.file: table.layout for table in self.tables()}

    def _expected_layouts(self) -> dict[str, Layout]:
        arch, dtype, files = self.architecture, self.manifest.dtype, self.weight_files()
        for group in self.manifest.blocks:
            block = arch.blocks[group.layers[0]]
            quantizations = {
                name: Quantization.of(group.layout, f"{name}.", columns)
                for name, (_, columns) in block.matrices().items()
            }
            files |= dict.fromkeys(
                map(block_file, group.layers), block_layout(block, quantizations, dtype)
            )
        for table in (self.manifest.embedding, self.manifest.head):
            quantization = Quantization.of(files[table.file], "", arch.hidden_size)
            norm = table is self.manifest.head or arch.tie_word_embeddings
            files[table.file] = table_layout(arch, quantization, dtype, norm)
        if self.manifest.per_layer.keys() != arch.per_layer_shapes.keys():
            raise ValueError("it has embeddings for each layer, or lacks them")
        for name, table in self.manifest.per_layer.items():
            _, columns = arch.per_layer_shapes[name]
            quantization = Quantization.of(files[table.file], "", columns)
            files[table.file] = per_layer_layout(arch, name, quantization, dtype)
        return files

    def function_files(self) -> set[str]:
        named = [each for group in self.manifest.blocks for each in group.files]
        return {file for functions in named for file in functions.values()}

    def group(self, index: int) -> BlockGroup:
        return next(group for group in self.manifest.blocks if index in group.layers)

    def words(self, name: str) -> mx.array:
        """Returns the words of a weight file, uint32 [words]."""
        return mx.array(self._map(name))

    def block_words(self, index: int) -> mx.array:
        """Returns the uint32 words of a block's weight file, an input of the block function."""
        return self.words(block_file(index))

    def block(self, index: int) -> dict[str, mx.array]:
        """Returns a block's arrays by their names, such as ``self_attn.q_proj.weight``."""
        return self.group(index).layout.unpack(self.block_words(index))

    def embedding(self) -> dict[str, mx.array]:
        """Returns the embedding's ``weight`` (packed [vocab_size, …]), ``scales`` and, in the
        affine mode, ``biases``. If the head is the embedding, also returns the final ``norm``.
        """
        return self._table(self.manifest.embedding)

    def head(self) -> dict[str, mx.array]:
        """Returns the head's arrays, named as in `embedding`, and ``norm``, the final RMSNorm's
        weight divided by the architecture's `logits_scaling`.
        """
        return self._table(self.manifest.head)

    def per_layer(self) -> dict[str, mx.array]:
        """Returns the arrays of the per-layer embeddings, by mlx-lm's names. Empty without such
        embeddings.
        """
        arrays = {}
        for name, table in self.manifest.per_layer.items():
            for part, array in self._table(table).items():
                whole = "model.per_layer_projection_norm.weight"
                arrays[whole if part == "norm" else f"{name}.{part}"] = array
        return arrays

    def to_mlx_lm(self) -> nn.Module:
        """Returns mlx-lm's model with the bundle's quantized weights.

        Raises MespError if mlx-lm does not have the model's family or computes the model
        differently, or if config.json describes another model.
        """
        from mesp.dependencies import mlx_lm

        arch = self.architecture
        config = for_mlx_lm(self.config(), max(self.manifest.seq_lens))
        try:
            model_class, arguments = mlx_lm.utils._get_classes(config)
        except ValueError as error:
            raise MespError(
                f"The installed mlx-lm cannot run {arch.model_type} models; use the adapters in "
                "adapters/peft with PEFT."
            ) from error
        try:
            model = model_class(arguments.from_dict(config))
        except Exception as error:  # an invalid config.json raises various errors
            raise self._other_model() from error

        weights = self.checkpoint()
        weights = {arch.mlx_root + n: a for n, a in weights.items()}
        if hasattr(model, "sanitize"):
            weights = model.sanitize(weights)
        for name, array in weights.items():  # mlx-lm's LFM2-VL takes only turned convolutions
            if name.endswith(CONVOLUTIONS) and array.shape[1] == 1:
                weights[name] = array.swapaxes(1, 2)

        names = {path.rpartition(".")[2] for path, _ in model.named_modules()}
        if not arch.is_tied_in_mlx_lm and "lm_head" not in names:
            raise MespError(
                f"The model's head is not its embedding, but mlx-lm ties both in {arch.model_type} "
                "models; use the adapters in adapters/peft with PEFT."
            )

        def quantization(path: str, module: nn.Module) -> dict[str, Any] | bool:
            if f"{path}.scales" not in weights:
                return False
            return asdict(Quantization.of(weights, f"{path}.", module.weight.shape[1]))

        try:
            nn.quantize(model, class_predicate=quantization)
            model.load_weights(list(weights.items()))
        except (ValueError, LookupError) as error:
            raise self._other_model() from error
        assert isinstance(model, nn.Module)
        return model

    def checkpoint(self) -> dict[str, mx.array]:
        """Returns the weights with the names of Hugging Face's checkpoints.

        Matrices stay quantized. Where a checkpoint has one matrix that joins several projections,
        the projections are returned separately. Experts' matrices are stacked, as in mlx-lm, and
        have mlx-lm's names.
        """
        arch = self.architecture
        head = self.head()
        norm = head.pop("norm") * arch.logits_scaling - arch.norm_offset
        weights = {name_there("model.norm.weight", arch.model_type): norm}
        tables = {"model.embed_tokens": self.embedding()}
        tables |= {} if arch.is_tied_in_mlx_lm else {"lm_head": head}
        for table, arrays in tables.items():
            weights |= {f"{table}.{part}": a for part, a in arrays.items() if part != "norm"}
        weights |= self.per_layer()
        for index in range(arch.num_hidden_layers):
            block = self.block(index)
            norms = arch.blocks[index].norms()
            block |= {name: block[name] - arch.norm_offset for name in norms}
            for name, array in block.items():
                if name.endswith(CONVOLUTIONS):
                    array = array[:, None]
                weights[name_there(f"model.layers.{index}.{name}", arch.model_type)] = array
        return weights

    def config(self) -> dict[str, Any]:
        """Raises MespError if config.json cannot be read, is not in the manifest or describes
        another model.
        """
        arch = self.architecture
        wanted = {
            "model_type": FAMILIES[arch.model_type].mlx_type or arch.model_type,
            # Without this key, mlx-lm builds a default number of blocks.
            "num_hidden_layers": arch.num_hidden_layers,
        }
        if not any(entry.path == "config.json" for entry in self.manifest.files):
            raise damaged(self.path)
        try:
            config: dict[str, Any] = plain_json(read_object(self.path / "config.json"))
        except (OSError, ValueError) as error:
            raise self._other_model() from error
        text = config.get("text_config", {})
        of_text = isinstance(text, dict) and text.get("num_hidden_layers", arch.num_hidden_layers)
        found = {key: config.get(key) for key in wanted}
        if found != wanted or of_text != arch.num_hidden_layers:
            raise self._other_model()
        try:
            blocks = Architecture.from_config(config).blocks
        except MespError as error:
            raise self._other_model() from error
        if [block.matrices() for block in blocks] != [block.matrices() for block in arch.blocks]:
            raise self._other_model()
        return config

    def _other_model(self) -> MespError:
        return MespError(
            f"{self.path / 'config.json'} does not describe the bundle's model; write the bundle "
            "again with mesp-export."
        )

    def function(
        self, seq_len: int, index: int = 0, plain: bool = False, packed: bool = False
    ) -> Any:
        """Returns the function of block `index` for a GPU, with `plain` its plain function, or with
        `packed` its function for packed records.

        The function takes (x, lora, scale, weights), the inputs whose shapes `Block.given_shapes`
        returns and, if `packed`, starts. Raises MespError if the bundle lacks this function, the
        installed MLX does not read it, or `check_block_functions` refuses its file.
        """
        group = self.group(index)
        block, which = self.architecture.blocks[index], f"Block {index} of {self.path}"
        if not group.files and block.mlp.experts:
            raise MespError(f"{which} mixes experts and has no function.")
        if not group.files:
            raise MespError(f"{which} has no function; add one with mesp-export --from.")
        files = group.plain_functions if plain else group.functions
        files = group.packed_functions if packed else files
        if str(seq_len) not in files:
            raise MespError(
                f"{which} has no such function for {seq_len} tokens; add one with mesp-export "
                "--from."
            )
        check_mlx()
        path = self.path / files[str(seq_len)]
        file = read_bytes(path, FUNCTIONS)
        device = "cpu" if plain else "gpu"
        sizes = (group.layout.words, [seq_len], list(self.manifest.ranks), packed)
        try:
            check_block_functions(file, device, DTYPES[DTYPE_OF[device]], block, *sizes)
        except ValueError as error:
            raise MespError(
                f"{path} is not a function that mesp-export wrote ({error}); do not use it."
            ) from error
        return mx.import_function(str(path))

    def tokens(self, split: str) -> np.ndarray:
        """Returns the tokens of a split (``train``, ``valid`` or ``test``): uint32 [N],
        memory-mapped."""
        return self._map(self._data(split).file)

    def examples(self, split: str) -> np.ndarray | None:
        """Returns the range of each example in `tokens`: uint32 [M, 2], memory-mapped.

        A row is (start, length). The result is None if the split is one stream.
        """
        file = self._data(split).examples
        return None if file is None else self._map(file).reshape(-1, 2)

    def pack(self, split: str) -> bool:
        """Returns whether short examples of the split share a sequence in training."""
        return self._data(split).pack

    def begin(self, split: str) -> int | None:
        """Returns the token that replaces the first token of each window of a stream, or None if
        the first token stays.
        """
        return self._data(split).begin

    def mask(self, split: str) -> np.ndarray | None:
        """Returns 1 for each token of `tokens` whose prediction is in the loss, else 0: uint8 [N],
        memory-mapped.

        None: all predictions are in the loss.
        """
        return self._bytes(self._data(split).mask)

    def labels(self, split: str) -> np.ndarray | None:
        """Returns each example's label, as numbered in `mesp.data.preferences`: uint8 [M],
        memory-mapped.

        None: the data has no labels.
        """
        return self._bytes(self._data(split).labels)

    def images(self, split: str) -> tuple[mx.array, np.ndarray] | None:
        """Returns the rows of images [R, hidden], and for each token of `tokens` 0, or 1 + the row
        that takes the place of its embedding: uint32 [N]. None: the split has no images.
        """
        images = self._data(split).images
        if images is None:
            return None
        words = mx.array(np.memmap(self.path / images.file, dtype=np.uint8, mode="r"))
        rows = words.view(DTYPES[images.dtype]).reshape(images.count, self.architecture.hidden_size)
        return rows, self._map(images.places)

    def _bytes(self, file: str | None) -> np.ndarray | None:
        return None if file is None else np.memmap(self.path / file, dtype=np.uint8, mode="r")

    def verify(self) -> None:
        """Raises MespError naming the first file that cannot be read, or whose content has changed
        since it was written.
        """
        for entry in self.manifest.files:
            with plain_os_errors(f"{self.path / entry.path} cannot be read"):
                digest = sha256(self.path / entry.path)
            if digest != entry.sha256:
                raise MespError(
                    f"{self.path / entry.path} is damaged (its SHA-256 is not the manifest's); "
                    "write the bundle again with mesp-export."
                )

    def _data(self, split: str) -> DataSplit:
        if split not in self.manifest.data:
            raise MespError(f"{self.path} holds no {split} data; add some with mesp data.")
        return self.manifest.data[split]

    def _table(self, table: Table) -> dict[str, mx.array]:
        return table.layout.unpack(self.words(table.file))

    def _map(self, name: str) -> np.ndarray:
        return np.memmap(self.path / name, dtype="<u4", mode="r")


def load(path: str | os.PathLike[str]) -> Bundle:
    """Opens the bundle at `path`.

    Raises MespError if the bundle is invalid.
    """
    return Bundle(path)
