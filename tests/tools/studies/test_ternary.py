"""Tests of ternary models: the meaning of their codes, and their export."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mesp
from mesp.block_function.dequantize import unpack
from mesp.bundle.to_source_model import to_source_model
from mesp.models.quantization_formats import Quantization
from mesp.quantization.coordinate_descent import shrink
from mesp.source_model.find import find_source
from studies.ternary import ternary, write_ternary

OF_128 = Quantization(2, 128)
SHAPE = 24, 256


def products(tokens: int = 512) -> mx.array:
    """Returns X^T X for correlated inputs of very different sizes."""
    generator = np.random.default_rng(1)
    mix = generator.normal(size=(SHAPE[1], SHAPE[1])) * generator.gamma(0.5, size=SHAPE[1])
    inputs = generator.normal(size=(tokens, SHAPE[1])) @ mix
    return mx.array((inputs.T @ inputs).astype(np.float32))


def dequantize(packed: mx.array, scales: mx.array, biases: mx.array, size: int = 128) -> mx.array:
    return mx.dequantize(packed, scales, biases, size, 2)


def test_a_ternary_matrix_is_kept():
    generator = np.random.default_rng(0)
    signs = generator.integers(-1, 2, size=SHAPE)
    scales = np.repeat(generator.uniform(0.5, 2, size=(SHAPE[0], 2)), 128, axis=1)
    matrix = mx.array((scales * signs).astype(np.float32))
    found = dequantize(*ternary(matrix, products(), OF_128))
    np.testing.assert_allclose(np.array(found), np.array(matrix), rtol=1e-6)


def test_codes_are_three_and_lose_less_than_the_nearest_ones():
    matrix = mx.array(np.random.default_rng(0).normal(size=SHAPE).astype(np.float32))
    packed, scales, biases = ternary(matrix, products(), OF_128)
    assert set(np.unique(np.array(unpack(packed, 2)))) == {0, 1, 2}
    assert mx.array_equal(biases, -scales).item()

    def loss(found: mx.array) -> float:
        error = np.array(found - matrix, np.float64)
        return np.sum(error @ shrink(products()) * error)

    groups = matrix.reshape(SHAPE[0], 2, 128)
    absmean = mx.abs(groups).mean(axis=-1, keepdims=True)
    nearest = (absmean * mx.clip(mx.round(groups / absmean), -1, 1)).reshape(SHAPE)
    assert loss(dequantize(packed, scales, biases)) < 0.7 * loss(nearest)


@pytest.mark.slow
def test_an_export_keeps_the_ternary_weights(tmp_path: Path):
    folder = write_ternary(find_source("demo", random_weights=False), tmp_path / "t", "python-docs")
    bundle = mesp.export(str(folder), tmp_path / "t.mesp", seq_len=32)
    model, arrays = to_source_model(bundle), mx.load(str(folder / "model.safetensors"))
    for i, block in enumerate(bundle.architecture.blocks):
        for module, shape in block.sizes().items():
            name = f"model.layers.{i}.{module}"
            parts = [arrays[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
            assert mx.array_equal(model.matrix(name, shape, slice(0, shape[0])),
                                  dequantize(*parts, 64)).item()  # fmt: skip
