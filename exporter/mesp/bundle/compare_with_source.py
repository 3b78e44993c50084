from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mesp.bundle.reader import Bundle
from mesp.bundle.to_source_model import to_source_model
from mesp.data.load import read_general_text
from mesp.data.tokenizer import load_tokenizer
from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.models.config_json import complete, for_mlx_lm
from mesp.quantization.choose import find_quantizations
from mesp.source_model.calibration import choose_excerpts, draw_tokens
from mesp.source_model.find import Source
from mesp.source_model.forward_pass import SourceModel
from mesp.source_model.quantization_loss import QuantizationLoss, compute_head_inputs, measure_loss
from mesp.source_model.safetensors import SafetensorsWeights

# The largest number of tokens to compare. mlx-lm ignores sliding windows for some families, so the
# text is also no longer than a window.
LENGTH = 64
# The largest relative error of logits that float32 rounding may explain. The errors are 1e-6 in
# tiny models, and about 1e-5 after dozens of blocks.
TOLERANCE = 1e-3
_ROPE = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq",
    "partial_rotary_factor",
)  # fmt: skip


@dataclass(frozen=True)
class SourceComparison:
    read: float  # error of MeSP's forward pass with the source's weights, against mlx-lm's
    written: float  # error of MeSP's forward pass with the bundle's weights, against mlx-lm's
    loss: QuantizationLoss

    def check(self) -> None:
        """Raises MespError if the bundle differs from its source by more than quantization."""
        for error, sentence in (
            (self.read, "With the source's weights, its logits differ from the source's in mlx-lm"),
            (self.written, "Its logits differ from those of its config.json in mlx-lm"),
        ):
            if not error <= TOLERANCE:
                raise MespError(
                    f"The bundle does not compute what its source does. {sentence} by {error:.2g} "
                    "of their norm, which quantization does not explain; export the model again."
                )


def compare_with_source(bundle: Bundle, source: Source) -> SourceComparison:
    """Compares the logits of a short text or, without a tokenizer, of random tokens.

    Raises MespError if the source is not a folder of safetensors files, if the bundle is not of
    this source, or if mlx-lm cannot load the source.
    """
    if source.gguf or source.folder is None:
        raise MespError(
            f"{source.name} is not a model that mlx-lm reads; name a folder of safetensors files."
        )
    arch, length = bundle.architecture, max(bundle.manifest.seq_lens)
    weights = SafetensorsWeights(source.folder, Architecture.from_config(source.config, length))
    if _shapes(weights.arch) != _shapes(arch):
        raise MespError(
            f"{bundle.path} is not a bundle of {source.name}: their blocks or vocabularies differ; "
            "name the model that it was exported from."
        )
    quantizations = find_quantizations(source.name, source.config, arch, None, None, None, None)
    models = SourceModel(weights, arch, quantizations), to_source_model(bundle)
    tokens = draw_tokens(arch.vocab_size)[:LENGTH]
    if (bundle.path / "tokenizer_config.json").exists():
        tokenizer = load_tokenizer(bundle.path)
        tokens = read_general_text(None, tokenizer, arch.vocab_size).tokens[:LENGTH]
    windows = (getattr(mixer, "sliding_window", None) or LENGTH + 1 for mixer in arch.mixers)
    sequences = [choose_excerpts(tokens, source, arch, 1, LENGTH)[0][: min(windows)]]
    given = [compute_head_inputs(model, sequences) for model in models]
    loss = measure_loss(*models, sequences, *given)
    errors = []
    loads = (lambda: _own_model(source, length), bundle.to_mlx_lm)
    for model, (x,), load in zip(models, given, loads, strict=True):
        found = model.logits(x, slice(0, arch.vocab_size))
        errors.append(_error(found, load(), sequences[0]))
    return SourceComparison(errors[0], errors[1], loss)


def _shapes(arch: Architecture) -> list[object]:
    return [arch.model_type, arch.vocab_size, *(block.matrices() for block in arch.blocks)]


def _error(found: mx.array, model: nn.Module, tokens: list[int]) -> float:
    with mx.stream(mx.cpu):  # GPUs may round the factors of products
        model.set_dtype(mx.float32)
        modules: list[Any] = model.modules()
        for module in modules:  # Gemma 4's embedding scale is rounded to bfloat16
            if hasattr(module, "embed_scale"):
                module.embed_scale = mx.array(module.embed_scale, mx.bfloat16).item()
        expected = model(mx.array([tokens]))[0, :, : found.shape[1]]
        error = mx.linalg.norm(found - expected) / mx.linalg.norm(expected)
        return float(np.array(error))


def _own_model(source: Source, length: int) -> nn.Module:
    from mesp.dependencies import mlx_lm

    assert source.folder is not None
    told = _for_mlx_lm(source.config, length)
    try:
        model, _ = mlx_lm.utils.load_model(
            source.folder, lazy=True, model_config=told | {"model_file": None}
        )
    except Exception as error:  # mlx-lm raises various errors for unknown models
        raise MespError(
            f"The installed mlx-lm cannot load {source.name}, so there is nothing to compare "
            "the bundle with; leave out --source."
        ) from error
    assert isinstance(model, nn.Module)
    return model


def _for_mlx_lm(config: dict[str, Any], length: int) -> dict[str, Any]:
    read = for_mlx_lm(complete(config), length)
    rope = {key: read[key] for key in _ROPE if key in read}
    is_long = (read.get("rope_scaling") or {}).get("type") == "longrope"

    def told(part: dict[str, Any]) -> dict[str, Any]:
        return part | rope if is_long or "rope_parameters" in part else part

    config = told(config)
    if isinstance(config.get("text_config"), dict):
        config = config | {"text_config": told(config["text_config"])}
    return config
