"""Prints a table of ways to quantize a model, with their bytes and their loss against the source.

    python tools/studies/quantizers.py --model DIR --text TEXT --calibrate OTHER_TEXT
    .venv/llama/bin/python tools/studies/quantizers.py …    with llama.cpp's Q4_K_M too

KL is the mean Kullback-Leibler divergence from the source, over the whole vocabulary at every
position. The last column is the ratio of the perplexity to the source's. Both have 95% intervals by
a bootstrap over the sequences. The row of llama.cpp is left out if xllamacpp is not installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from helpers import openblas  # noqa: F401, before MLX

# isort: split
import click
import mlx.core as mx
import numpy as np
from click.testing import CliRunner

from mesp.bundle.export import DTYPE
from mesp.bundle.reader import Bundle
from mesp.bundle.to_source_model import to_source_model
from mesp.commands.command import Command
from mesp.commands.export import main as export
from mesp.data.plain_text import cut_text
from mesp.data.python_docs import python_docs
from mesp.data.source_files import read_text
from mesp.data.tokenizer import load_tokenizer
from mesp.evaluation.metrics import bootstrap, interval
from mesp.models.architecture import Architecture
from mesp.models.quantization_formats import Quantization
from mesp.models.weights import Weights
from mesp.quantization.choose import Quantizations, find_quantizations
from mesp.source_model.calibration import choose_excerpts
from mesp.source_model.find import Source, find_source
from mesp.source_model.forward_pass import SourceModel
from mesp.source_model.quantization_loss import compute_head_inputs, measure_loss
from mesp.source_model.safetensors import SafetensorsWeights

RESAMPLES = 10_000


@dataclass(frozen=True)
class Study:
    """The model, a folder for output, a text for calibration, and the dtype of exports."""

    model: Path
    folder: Path
    calibrate: Path
    dtype: str

    @property
    def source(self) -> Source:
        return find_source(str(self.model), random_weights=False)

    def open(self, folder: Path) -> tuple[SourceModel, int]:
        """Returns the model in a folder of safetensors, and the size in bytes of its tensors
        without the norms.
        """
        source = find_source(str(folder), random_weights=False)
        arch = Architecture.from_config(source.config)
        weights = SafetensorsWeights(folder, arch)
        quantizations = find_quantizations(source.name, source.config, arch, None, None, None, None)
        size = sum(
            array.nbytes for name, (array, _) in weights.tensors.items() if "norm" not in name
        )
        return SourceModel(weights, arch, quantizations), size

    def tokens(self, text: Path) -> np.ndarray:
        tokenizer = load_tokenizer(self.model)
        pieces = cut_text(read_text(text))
        return np.concatenate([tokenizer.encode(p, add_special_tokens=False) for p in pieces])

    def sequences(self, text: Path, count: int, length: int) -> list[list[int]]:
        arch = Architecture.from_config(self.source.config)
        return choose_excerpts(self.tokens(text), self.source, arch, count, length)


# returns the quantized model and its size in bytes
Way = Callable[[Study], tuple[SourceModel, int]]


def mesp(*options: object) -> Way:
    def way(study: Study) -> tuple[SourceModel, int]:
        out = study.folder / "model.mesp"
        arguments = ["--model", study.model, "--out", out, "--overwrite", "--seq-len", 8]
        arguments += options
        if "--calibrate" in options:
            arguments.append(study.calibrate)
        with mock.patch("mesp.bundle.export.DTYPE", study.dtype):
            result = CliRunner().invoke(export, list(map(str, arguments)), catch_exceptions=False)
        if result.exit_code:
            raise SystemExit(result.output)
        bundle = Bundle(out)
        size = sum(
            array.words * 4
            for layout in bundle.weight_files().values()
            for array in layout.arrays
            if "norm" not in array.name
        )
        return to_source_model(bundle), size

    return way


def mlx_lm_convert(study: Study) -> tuple[SourceModel, int]:
    from mlx_lm import convert

    folder = study.folder / "converted"
    convert(str(study.model), folder, quantize=True, q_bits=4, q_group_size=64, dtype="bfloat16")
    return study.open(folder)


def _saved(study: Study, model, tokenizer, config: dict, name: str) -> tuple[SourceModel, int]:
    from mlx_lm.utils import save

    model.set_dtype(mx.bfloat16)
    save(study.folder / name, study.model, model, tokenizer, config)
    return study.open(study.folder / name)


def mlx_lm_gptq(study: Study) -> tuple[SourceModel, int]:
    from mlx_lm.quant.gptq import gptq_quantize
    from mlx_lm.utils import load

    model, tokenizer, config = load(str(study.model), return_config=True)
    data = mx.array(study.sequences(study.calibrate, 16, 256))
    model, config["quantization"] = gptq_quantize(model, data, 4, 64, 6, 64)
    return _saved(study, model, tokenizer, config, "gptq")


def mlx_lm_awq(study: Study) -> tuple[SourceModel, int]:
    from mlx_lm.quant.awq import AWQ_MODEL_CONFIGS, awq_quantize, update_config
    from mlx_lm.utils import load

    model, tokenizer, config = load(str(study.model), return_config=True)
    data = mx.array(study.sequences(study.calibrate, 16, 256))
    awq = AWQ_MODEL_CONFIGS[config["model_type"]]
    awq_quantize(model, data, awq, 64, 4, embed_group_size=64, embed_bits=6)
    return _saved(study, model, tokenizer, update_config(model, config), "awq")


class Q4KM:
    """A model's weights, quantized to llama.cpp's Q4_K_M without an importance matrix.

    Most matrices are Q4_K. The head or tied embedding is Q6_K, and so are v and down in some
    blocks. If 256 does not divide the length of a matrix's rows, Q5_0 replaces Q4_K, and Q8_0
    replaces Q6_K.
    """

    dtype = None

    def __init__(self, weights: Weights, arch: Architecture):
        import gguf

        self.weights, self.arch, self.gguf, self.bytes = weights, arch, gguf, 0
        self.library = ctypes.CDLL(importlib.util.find_spec("xllamacpp.xllamacpp").origin)
        self.library.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.done: dict[str, mx.array] = {}

    @property
    def is_converted(self) -> bool:
        return self.weights.is_converted

    def is_quantized(self, name: str) -> bool:
        return False

    def is_stored_unquantized(self, name: str) -> bool:
        return True

    def rows(self, name: str, shape: tuple[int, ...], rows: slice) -> mx.array:
        if not name.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight")):
            return self.weights.rows(name, shape, rows)
        if name not in self.done:
            self.done[name] = self._quantized(name, shape)
        return self.done[name][rows]

    def _more_bits(self, name: str) -> bool:
        if not name.startswith("model.layers."):
            return self.arch.tie_word_embeddings or name.startswith("lm_head")
        layer, count = int(name.split(".")[2]), self.arch.num_hidden_layers
        first = count // 8
        more = layer < first or layer >= 7 * count // 8 or (layer - first) % 3 == 2
        return more and ("v_proj" in name or "down_proj" in name)

    def _quantized(self, name: str, shape: tuple[int, ...]) -> mx.array:
        types = self.gguf.GGMLQuantizationType
        whole, more = shape[1] % 256 == 0, self._more_bits(name)
        kind = (types.Q6_K if more else types.Q4_K) if whole else types.Q8_0 if more else types.Q5_0
        matrix = self.weights.rows(name, shape, slice(0, shape[0])).astype(mx.float32)
        floats = np.ascontiguousarray(np.asarray(matrix))
        block, size = self.gguf.GGML_QUANT_SIZES[kind]
        packed = np.empty((shape[0], shape[1] // block * size), np.uint8)
        self.library.ggml_quantize_chunk(
            ctypes.c_int(kind), ctypes.c_void_p(floats.ctypes.data),
            ctypes.c_void_p(packed.ctypes.data), ctypes.c_int64(0), ctypes.c_int64(shape[0]),
            ctypes.c_int64(shape[1]), None,
        )  # fmt: skip
        self.bytes += packed.nbytes
        return mx.array(self.gguf.quants.dequantize(packed, kind).reshape(shape))


def llama_cpp(study: Study) -> tuple[SourceModel, int]:
    arch = Architecture.from_config(study.source.config)
    weights = Q4KM(SafetensorsWeights(study.model, arch), arch)
    model = SourceModel(weights, arch, Quantizations(Quantization()))
    model.embed([0])
    for i, block in enumerate(arch.blocks):
        for module, shape in block.sizes().items():
            model.matrix(f"model.layers.{i}.{module}", shape, slice(0, 1))
    return model, weights.bytes


WAYS: dict[str, Way] = {
    "mesp-export": mesp(),
    "mesp-export --calibrate": mesp("--calibrate"),
    "mesp-export --head-bits 4": mesp("--head-bits", 4),
    "mesp-export --head-bits 8": mesp("--head-bits", 8),
    "mesp-export --bits 5": mesp("--bits", 5),
    "mesp-export --group-size 32": mesp("--group-size", 32),
    "mesp-export --quantize nearest": mesp("--quantize", "nearest"),
    "mlx-lm, convert": mlx_lm_convert,
    "mlx-lm, gptq": mlx_lm_gptq,
    "mlx-lm, awq": mlx_lm_awq,
    "llama.cpp, Q4_K_M": llama_cpp,
    "mesp-export --bits 8": mesp("--bits", 8),
}


def mean_and_error(values: Iterable[np.ndarray]) -> tuple[float, float]:
    """Returns the mean over positions, and half the width of its 95% bootstrap interval over
    sequences.
    """
    sums = np.array([each.sum() for each in values])
    counts = np.array([len(each) for each in values])
    low, high = interval(bootstrap(sums, counts, RESAMPLES))
    return sums.sum() / counts.sum(), (high - low) / 2


def python_docs_text() -> str:
    return "\n".join(each.text for each in python_docs()["train"])


@click.command(cls=Command)
@click.option("--model", type=click.Path(path_type=Path, exists=True), required=True)
@click.option(
    "--text", type=click.Path(path_type=Path, exists=True), show_default="Python's reference",
    help="The text that is scored.",
)  # fmt: skip
@click.option("--calibrate", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--ways", multiple=True, help="Those whose names begin so; all where none is named.")
@click.option("--sequences", default=8, help="How many, spread over the text.")
@click.option("--length", default=512, help="Tokens of each, after the one that begins a text.")
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), default=DTYPE,
    show_default=True, help="Of the scales, biases and norms of mesp-export's bundles.",
)  # fmt: skip
def main(
    model: Path,
    text: Path | None,
    calibrate: Path,
    dtype: str,
    ways: tuple[str, ...],
    sequences: int,
    length: int,
) -> None:
    """Print the loss of several ways to quantize a model."""
    chosen = {n: way for n, way in WAYS.items() if not ways or n.startswith(ways)}
    if importlib.util.find_spec("xllamacpp") is None:
        chosen.pop("llama.cpp, Q4_K_M", None)
    print("| way | MB | bits a weight | KL | perplexity / source's |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        study = Study(model, Path(folder), calibrate, dtype)
        if text is None:
            text = study.folder / "python-docs.txt"
            text.write_text(python_docs_text())
        source, _ = study.open(model)
        count = source.arch.num_parameters
        scored = study.sequences(text, sequences, length)
        of_source = compute_head_inputs(source, scored)
        for name, way in chosen.items():
            quantized, size = way(study)
            loss = measure_loss(source, quantized, scored, of_source)
            kl, error = mean_and_error(np.split(loss.kl, len(scored)))
            ratio, spread = mean_and_error(np.split(loss.model - loss.source, len(scored)))
            print(
                f"| {name} | {size / 1e6:,.1f} | {8 * size / count:.2f} | {kl:.4f} ± {error:.4f} | "
                f"{math.exp(ratio):.3f} ± {math.exp(ratio) * spread:.3f} |",
                flush=True,
            )
    before, _ = loss.perplexities
    print(f"\n{len(loss.kl):,} positions of {text.name}; the source's perplexity is {before:.2f}.")


if __name__ == "__main__":
    main()
