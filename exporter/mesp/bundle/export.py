from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mesp.bundle.export_options import BundleOptions, ExportArguments, ExportOptions
from mesp.bundle.manifest import OF_SAME_WEIGHTS, Manifest, check_rank, read_manifest
from mesp.bundle.reader import Bundle
from mesp.bundle.rewriter import rewrite_bundle
from mesp.bundle.to_source_model import to_source_model
from mesp.bundle.writer import write_bundle
from mesp.data.load import DataOptions, load_additional
from mesp.data.tokenizer import load_tokenizer
from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.models.quantization_formats import AFFINE, MODES
from mesp.models.weights import Weights
from mesp.progress import ProgressCallback
from mesp.quantization.choose import BITS, Quantizations, find_quantizations
from mesp.source_model.calibration import choose_excerpts
from mesp.source_model.find import Source, find_source
from mesp.source_model.forward_pass import SourceModel
from mesp.source_model.quantization_loss import QuantizationLoss, measure_loss
from mesp.source_model.random_weights import RandomWeights
from mesp.source_model.safetensors import SafetensorsWeights

log = logging.getLogger(__name__)
StrPath = str | os.PathLike[str]

QUANTIZERS = ("least-squares", "nearest")
MEASURE_SEQUENCES = 8
MEASURE_LENGTH = 256
# The dtype of the scales, biases and norms of a model that was not quantized before.
DTYPE = "bfloat16"


@dataclass(frozen=True)
class ExportJob:
    source: Source
    weights: Weights
    architecture: Architecture
    options: ExportOptions

    def run(self, progress: ProgressCallback | None = None) -> Manifest:
        manifest = write_bundle(
            self.source, self.weights, self.architecture, self.options, progress
        )
        is_random = isinstance(self.weights, RandomWeights)
        if self.options.quantizations.has_one_bit and not is_random:
            log.warning(
                "Note: the model has codes of 1 bit, which the bundle stores in 2 bits, with the "
                "same values."
            )
        return manifest

    def describe_gguf(self) -> str | None:
        """Returns a sentence on a GGUF file's matrices. None without a GGUF file or with random
        weights.
        """
        if self.source.gguf is None or isinstance(self.weights, RandomWeights):
            return None
        from mesp.source_model.gguf.weights import GGUFWeights

        assert isinstance(self.weights, GGUFWeights)
        return self.weights.describe()

    def sequences_to_measure(self, data: str) -> list[list[int]]:
        """Raises MespError if there is no tokenizer or no text, or if the weights are random."""
        if isinstance(self.weights, RandomWeights):
            raise MespError("Random weights predict nothing; leave out --measure.")
        assert self.source.folder is not None
        tokenizer = load_tokenizer(self.source.folder, "which --measure needs; leave it out")
        count, length = MEASURE_SEQUENCES, MEASURE_LENGTH
        vocab_size, encoding = self.architecture.vocab_size, self.options.data_options.encoding
        split = load_additional(data, tokenizer, length, vocab_size, encoding)
        return choose_excerpts(split.tokens, self.source, self.architecture, count, length)

    def measure(self, sequences: list[list[int]]) -> QuantizationLoss:
        model = SourceModel(self.weights, self.architecture, self.options.quantizations)
        bundle = Bundle(self.options.out)
        return measure_loss(model, to_source_model(bundle), sequences)


def prepare_export(model: str, out: StrPath | None, given: ExportArguments) -> ExportJob:
    """Finds or downloads the model, and checks the options. Writes no bundle.

    Raises MespError if an argument cannot be used.
    """
    _check_choices(
        quantize=(given.quantize, QUANTIZERS),
        mode=(given.mode, MODES),
        bits=(given.bits, BITS),
        group_size=(given.group_size, AFFINE[1]),
        head_bits=(given.head_bits, BITS),
    )
    random_weights, layers = given.random_weights, given.layers
    source = find_source(str(model), random_weights)
    seq_lens, ranks = sort_numbers(given.seq_len), sort_numbers(given.rank)
    arch = Architecture.from_config(source.config, max(seq_lens))
    check_rank(max(ranks), arch)
    if layers and layers > arch.num_hidden_layers:
        raise MespError(f"{source.name} has {arch.num_hidden_layers} blocks, fewer than --layers.")
    if layers and arch.per_layer and not random_weights:
        raise MespError(
            f"{source.name} has embeddings for each layer, which are stored for all layers together"
            "; leave out --layers, or take --random-weights."
        )
    asked = given.mode, given.bits, given.group_size, given.head_bits
    quantizations = find_quantizations(source.name, source.config, arch, *asked)
    if given.calibrate is not None:
        _check_calibrate(quantizations, given.quantize, random_weights)
    weights: Weights
    if random_weights:
        source = replace(source, name=f"{source.name}-random", revision=None)
        weights = RandomWeights(given.seed, norm=1 - arch.norm_offset)
    elif source.gguf:
        from mesp.source_model.gguf.weights import GGUFWeights

        weights = GGUFWeights(source.gguf, arch)
    else:
        assert source.folder is not None
        weights = SafetensorsWeights(source.folder, arch)
        arch = weights.arch
        if weights.left_out:
            log.warning(
                "Note: %s tensors are left out: the text alone is trained, without layers that "
                "predict several tokens.",
                f"{weights.left_out:,}",
            )
    arch = arch.first(layers or arch.num_hidden_layers)
    quantizations = find_quantizations(source.name, source.config, arch, *asked)
    data, data_options = given.data, given.data_options or DataOptions()
    if data is None and data_options != DataOptions():
        raise MespError("The options for data need --data; name it too.")
    if data is None and model == "demo" and not random_weights:
        data = "python-docs"
    options = ExportOptions(
        out=Path(f"{source.name}.mesp" if out is None else out),
        data=None if data is None else str(data),
        data_options=data_options,
        seq_lens=seq_lens,
        ranks=ranks,
        quantizations=quantizations,
        dtype=choose_dtype(weights),
        seed=given.seed,
        overwrite=given.overwrite,
        quantize=given.quantize,
        calibrate=given.calibrate,
    )
    return ExportJob(source, weights, arch, options)


def export(
    model: str,
    out: StrPath | None = None,
    *,
    data: str | None = None,
    data_options: DataOptions | None = None,
    seq_len: int | Sequence[int] = 256,
    rank: int | Sequence[int] = 8,
    mode: str | None = None,
    bits: int | None = None,
    group_size: int | None = None,
    head_bits: int | None = None,
    quantize: str = "least-squares",
    calibrate: str | None = None,
    random_weights: bool = False,
    layers: int | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> Bundle:
    """Quantizes a model, writes it as a bundle for fine-tuning, and returns the bundle.

    A model that is already quantized keeps its quantization.

    Args:
        model: A short name such as ``Qwen2.5-0.5B``, a name on the Hugging Face Hub, a folder, a
            GGUF file, or ``demo``.
        out: The bundle's folder; ``NAME.mesp`` by default.
        data: Training data: a file of records or of text, a folder or a dataset on the Hub with
            files called train, valid and test, ``python-docs`` or ``python-docs-pairs``. With
            None, random weights get random tokens, the demo model gets ``python-docs``, and other
            models get no data.
        data_options: How the data is read and encoded.
        seq_len: The sequence lengths to train with, in tokens.
        rank: The LoRA ranks to train with.
        mode: ``affine`` (the default), ``mxfp4``, ``nvfp4`` or ``mxfp8``.
        bits: Bits per weight in the affine mode: 4 (the default), 5, 6 or 8.
        group_size: The number of weights that share a scale in the affine mode: 32, 64 (the
            default) or 128.
        head_bits: Bits per weight of the output head, and of an embedding tied to it, in the affine
            mode. The default is 6, or `bits` if that is more.
        quantize: ``least-squares``, which changes the outputs of matrices least, or ``nearest``.
        calibrate: Data for ``least-squares``; None for random tokens.
        random_weights: Whether to replace the model's weights by random ones.
        layers: The number of blocks, from the first; all by default.
        seed: The seed of random weights and random tokens.
        overwrite: Whether to replace an existing bundle.
        progress: Called with the progress of the export.

    Raises:
        MespError: The model, the data or an argument is unsuitable, or the disk is full. Then no
            part of the bundle is left.
    """
    given = ExportArguments(
        data=data, data_options=data_options, seq_len=seq_len, rank=rank, mode=mode, bits=bits,
        group_size=group_size, head_bits=head_bits, quantize=quantize, calibrate=calibrate,
        random_weights=random_weights, layers=layers, seed=seed, overwrite=overwrite,
    )  # fmt: skip
    job = prepare_export(model, out, given)
    job.run(progress)
    return Bundle(job.options.out)


def rewrite(
    bundle: StrPath,
    out: StrPath | None = None,
    *,
    seq_len: int | Sequence[int] = (),
    rank: int | Sequence[int] = (),
    overwrite: bool = False,
    progress: ProgressCallback | None = None,
) -> Bundle:
    """Writes a bundle again with other functions and the same weights and data, and returns the new
    bundle.

    Arguments that are not given keep the bundle's values. By default, `out` is the bundle itself,
    which `overwrite` must allow. Raises MespError if the new bundle cannot be written.
    """
    old = Path(bundle)
    has = read_manifest(old, OF_SAME_WEIGHTS)
    options = BundleOptions(
        out=old if out is None else Path(out),
        seq_lens=sort_numbers(seq_len) or list(has.seq_lens),
        ranks=sort_numbers(rank) or list(has.ranks),
        overwrite=overwrite,
    )
    check_rank(max(options.ranks), has.architecture)
    rewrite_bundle(old, options, progress)
    return Bundle(options.out)


def choose_dtype(weights: Weights) -> str:
    return weights.dtype or DTYPE


def sort_numbers(numbers: int | Sequence[int]) -> list[int]:
    found = [numbers] if isinstance(numbers, int) else sorted(set(numbers))
    if any(number < 1 for number in found):
        raise MespError(f"Sequence lengths and ranks are 1 or more, and not {found[0]}.")
    return found


def _check_choices(**given: tuple[Any, Collection[Any]]) -> None:
    for name, (value, choices) in given.items():
        if value is not None and value not in choices:
            raise MespError(
                f"{name} is {value!r}, and must be one of {', '.join(map(str, choices))}."
            )


def _check_calibrate(quantizations: Quantizations, quantize: str, random_weights: bool) -> None:
    if quantizations.config is not None:
        raise MespError(
            "The model is quantized already, and stays unchanged; leave out --calibrate."
        )
    reasons = {
        "--quantize nearest": quantize == "nearest",
        "--random-weights": random_weights,
        f"--mode {quantizations.main.mode}": quantizations.main.mode != "affine",
    }
    for option, given in reasons.items():
        if given:
            raise MespError(f"{option} does not use --calibrate; leave out one of them.")
