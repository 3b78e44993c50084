from __future__ import annotations

import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from helpers.adapters import (
    RANK,
    SCALE,
    exported,
    with_weighted_sum,
    write_adapters,
    write_peft,
)
from helpers.commands import call
from helpers.derivatives import relative_error
from helpers.gguf_files import MODELS, q8_0, write_gguf
from helpers.models import FAMILIES, random_tensors
from mesp.adapters.load import apply_adapters, read_adapters, stack_adapters
from mesp.bundle.reader import Bundle
from mesp.source_model.gguf.header import GGUF
from mesp.source_model.gguf.weights import GGUFWeights

NAMES = ["llama", "phi3", "granitemoehybrid", "lfm2", "qwen3_5", "gemma2", "lfm2_moe"]
EXACT, BFLOAT16 = 1e-5, 2**-8
TOKENS = mx.array([[5, 6, 7, 8, 9, 10]])


@pytest.fixture(scope="module", params=NAMES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    bundle = exported(folder, FAMILIES[request.param])
    return bundle, write_adapters(folder / "adapters", bundle, dora=True)


def base(bundle: Path) -> nn.Module:
    model = Bundle(bundle).to_mlx_lm()
    model.set_dtype(mx.float32)
    return model


def with_adapters(bundle: Path, folder: Path) -> nn.Module:
    model = base(bundle)
    read = read_adapters(folder, Bundle(bundle).architecture)
    apply_adapters(model, stack_adapters([(read, 1.0)], model))
    return model


def test_mlx_lm_loads_and_computes_the_same(family):
    bundle, adapters = family
    expected = load_adapters(base(bundle), str(adapters))(TOKENS)
    assert relative_error(with_adapters(bundle, adapters)(TOKENS), expected) <= EXACT
    assert relative_error(base(bundle)(TOKENS), expected) > 0.1


def test_what_mlx_lm_trains_is_read(family, tmp_path: Path):
    bundle, adapters = family
    shutil.copytree(adapters, tmp_path, dirs_exist_ok=True)
    keys = sorted({name for block in Bundle(bundle).architecture.kinds for name in block.modules})
    parameters = {"rank": RANK, "scale": SCALE, "dropout": 0.1, "keys": keys[::2]}
    model = base(bundle)
    model.freeze()
    linear_to_lora_layers(model, 1, parameters, use_dora=True)
    trained = dict(tree_flatten(model.trainable_parameters()))
    assert {name.rpartition(".")[2] for name in trained} == {"lora_a", "lora_b", "m"}
    key = mx.random.key(1)
    changed = {
        name: array + 0.1 * mx.random.normal(array.shape, key=key)
        for name, array in trained.items()
    }
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), changed)
    model.load_weights([*changed.items()], strict=False)
    model.eval()
    expected = model(TOKENS)
    assert relative_error(with_adapters(bundle, tmp_path)(TOKENS), expected) <= EXACT
    assert relative_error(base(bundle)(TOKENS), expected) > 0.01


@pytest.mark.parametrize("end", ["", ".weight"])
def test_pefts_form_is_the_same(family, tmp_path: Path, end: str):
    """PEFT writes the names of magnitudes without `.weight`, and reads names with `.weight` too."""
    bundle, adapters = family
    peft = write_peft(tmp_path / "peft", bundle, adapters)
    file = peft / "adapter_model.safetensors"
    arrays = {
        f"{name}{end}" if name.endswith("vector") else name: array
        for name, array in mx.load(str(file)).items()
    }
    mx.eval(arrays)
    mx.save_safetensors(str(file), arrays)
    arch = Bundle(bundle).architecture
    ours, theirs = read_adapters(adapters, arch), read_adapters(peft, arch)
    assert ours.scale == theirs.scale and ours.matrices.keys() == theirs.matrices.keys()
    for path, matrices in ours.matrices.items():
        assert len(matrices) == 3
        for one, other in zip(matrices, theirs.matrices[path], strict=True):
            assert mx.array_equal(one, other), path


def test_the_fused_weights_are_those_of_mlx_lm(family, tmp_path: Path):
    """Fused weights are m ∘ (W + s (A B)ᵀ) / ‖W + s (A B)ᵀ‖, with a norm for each row.

    The computation is in float32, with one rounding to bfloat16.
    """
    bundle, adapters = family
    expected = load_adapters(base(bundle), str(adapters))
    layers = {
        f"{path}.{name}": array
        for path, layer in expected.named_modules()
        if hasattr(layer, "lora_a")
        for name, array in layer.fuse(dequantize=True).parameters().items()
    }
    options = ("--bits", "bfloat16", "--val-batches", 0, "--out", tmp_path / "fused")
    call("fuse", bundle, "--adapters", adapters, *options)
    fused = dict(tree_flatten(mlx_lm.load(str(tmp_path / "fused"))[0].parameters()))
    assert layers
    for name, array in layers.items():
        error = mx.abs(fused[name].astype(mx.float32) - array)
        assert (error <= BFLOAT16 * mx.abs(array) + 1e-7).all(), name


def blocks_in_8_bits(name: str, matrix: np.ndarray) -> tuple[np.ndarray, Type]:
    return q8_0(name, matrix) if name.startswith("blk.") else (np.float16(matrix), Type.F16)


@pytest.mark.parametrize("name", ["qwen2", "llama", "phi3", "qwen3_5_text"])
def test_a_gguf_file_gets_them_in_its_weights(name: str, tmp_path: Path):
    tensors = random_tensors(MODELS[name][1])
    file = write_gguf(tmp_path / "base.gguf", name, tensors, blocks_in_8_bits)
    bundle = tmp_path / "b.mesp"
    call("export", "--model", file, "--out", bundle, "--seq-len", 8)
    adapters = write_adapters(tmp_path / "adapters", bundle, dora=True)
    options = ("--bits", "bfloat16", "--val-batches", 0, "--out", tmp_path / "fused")
    call("fuse", bundle, "--adapters", adapters, "--gguf-base", file, *options)
    arch = Bundle(bundle).architecture
    found = GGUFWeights(GGUF.read(tmp_path / "fused" / "model.gguf"), arch)
    expected = dict(tree_flatten(with_weighted_sum(bundle, {adapters: 1.0}).parameters()))
    for layer, block in enumerate(arch.blocks):
        for module, shape in block.sizes().items():
            there = f"model.layers.{layer}.{module}.weight"
            weight = expected[f"{arch.mlx_root}model.layers.{layer}.{module}.weight"]
            array = found.rows(there, shape, slice(None)).astype(mx.float32)
            assert (mx.abs(array - weight) <= BFLOAT16 * mx.abs(weight) + 1e-6).all(), there
