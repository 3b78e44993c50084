"""mesp-export of GGUF files: bundles equal to those of the same models in mlx-lm's form."""

from __future__ import annotations

from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from conftest import TEXT, random_tensors, run, write_model
from gguf_files import MODELS, write_gguf
from mesp.bundle.reader import Bundle
from mesp.engine.prompts import load_tokenizer

SIZE = ("--seq-len", 8, "--rank", 2, "--device", "cpu")


def export(model: Path, out: Path, *options: object) -> Bundle:
    done = run("export", "--model", model, "--out", out, *SIZE, *options)
    assert done.returncode == 0, done.stderr
    return Bundle(out)


def in_8_bits(tensors: dict[str, mx.array], is_matrix) -> dict[str, mx.array]:
    """Matrices in groups of 32, each number d · q of Q8_0 as scale · (q + 128) - 128 · scale."""
    found = {}
    for name, tensor in tensors.items():
        if not is_matrix(name, tensor):
            found[name] = tensor
            continue
        blocks = gguf.quantize(np.array(tensor), Type.Q8_0).reshape(len(tensor), -1, 34)
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
        codes = np.ascontiguousarray(blocks[..., 2:] + np.uint8(128)).reshape(len(tensor), -1)
        module = name.removesuffix(".weight")
        found[name] = mx.array(codes.view(np.uint32))
        found[f"{module}.scales"] = mx.array(scales)
        found[f"{module}.biases"] = mx.array(-128 * scales)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_bundle_is_that_of_the_same_model_in_mlx_lms_form(name: str, tmp_path: Path):
    _, config = MODELS[name]
    tensors = random_tensors(config)
    file = write_gguf(tmp_path / "tiny.gguf", name, tensors)
    whole = in_8_bits(tensors, lambda name, tensor: tensor.ndim == 2)
    folder = write_model(
        tmp_path / "tiny", config | {"quantization": {"group_size": 32, "bits": 8}}, whole
    )
    ours, theirs = export(file, tmp_path / "a.mesp"), export(folder, tmp_path / "b.mesp")
    assert ours.architecture.to_manifest() == theirs.architecture.to_manifest()
    for path, layout in theirs.weight_files().items():
        found, expected = layout.unpack(ours.words(path)), layout.unpack(theirs.words(path))
        for key, array in expected.items():
            # The file has the exponential of these.
            equal = mx.allclose if key.endswith("A_log") else mx.array_equal
            assert equal(found[key], array), f"{path} {key}"
    assert load_tokenizer(ours.path).encode(TEXT) == load_tokenizer(theirs.path).encode(TEXT)
    assert ours.to_mlx_lm() is not None
