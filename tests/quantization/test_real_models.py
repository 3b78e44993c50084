"""Tests that the loss of two real models in 4 bits is within bounds (`make test-slow`).

The models come from PyPI and are dequantized first. The scored text is Python's documentation, and
`--calibrate` reads docs/guide.md.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from helpers.paths import ROOT
from mesp.source_model.quantization_loss import QuantizationLoss, compute_head_inputs, measure_loss
from studies import quantizers
from studies.quantizers import Study, mesp
from studies.real_models import GEMMA, SMOLLM2, hugging_face_folder

pytestmark = pytest.mark.quantizer

SEQUENCES, LENGTH = 8, 256


class Bars(NamedTuple):
    """Upper bounds for an export in 4 bits with groups of 64."""

    kl: float  # KL divergence from the source, without calibration
    calibrated: float  # KL divergence from the source, with calibration
    perplexity: float  # ratio to the perplexity with 8 bits
    size: float  # ratio to the bytes of MLX's nearest quantization


BARS = {
    SMOLLM2: Bars(kl=0.08, calibrated=0.07, perplexity=1.08, size=1.12),
    GEMMA: Bars(kl=0.15, calibrated=0.11, perplexity=1.15, size=1.35),
}


@pytest.mark.parametrize("name", BARS)
def test_an_export_keeps_the_model(name, request, tmp_path):
    bars = BARS[name]
    request.getfixturevalue("smollm2_gguf" if name == SMOLLM2 else "gemma_gguf")
    model = hugging_face_folder(name)
    study = Study(model, tmp_path, ROOT / "docs" / "guide.md", "bfloat16")
    text = tmp_path / "text.txt"
    text.write_text(quantizers.python_docs_text())
    source, _ = study.open(model)
    sequences = study.sequences(text, SEQUENCES, LENGTH)
    of_source = compute_head_inputs(source, sequences)

    def export(*options: object) -> tuple[QuantizationLoss, int]:
        quantized, size = mesp(*options)(study)
        return measure_loss(source, quantized, sequences, of_source), size

    default, size = export()
    calibrated, _ = export("--calibrate")
    eight, _ = export("--bits", 8)
    _, nearest = mesp("--quantize", "nearest", "--head-bits", 4)(study)
    ratio = default.perplexities[1] / eight.perplexities[1]
    print(
        f"{name}: KL {default.kl.mean():.4f}, calibrated {calibrated.kl.mean():.4f}, perplexity "
        f"{ratio:.3f} times that of 8 bits, {size / nearest:.3f} times the bytes"
    )
    assert default.kl.mean() <= bars.kl
    assert calibrated.kl.mean() <= bars.calibrated
    assert ratio <= bars.perplexity
    assert size <= bars.size * nearest
