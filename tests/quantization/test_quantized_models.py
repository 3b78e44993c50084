"""Models that come quantized, and the modes of MLX."""

import json
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from helpers.exports import export, exported, refused
from helpers.models import (
    FAMILIES,
    TINY,
    mlx_lm_model,
    random_tensors,
    write_mixed_model,
    write_model,
)
from mesp.models.quantization_formats import Quantization

pytestmark = pytest.mark.usefixtures("working_folder")


def test_other_quantization(tiny):
    how = ("--bits", 8, "--group-size", 32, "--quantize", "nearest")
    bundle = exported("--model", tiny, *how, "--seq-len", 8)
    name = "model.layers.1.self_attn.o_proj.weight"
    expected = mx.quantize(random_tensors(TINY)[name], 32, 8)
    for part, array in zip(("weight", "scales", "biases"), expected, strict=True):
        assert mx.array_equal(bundle.block(1)[f"self_attn.o_proj.{part}"], array)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_modes_of_mlx(tiny, mode):
    bundle = exported("--model", tiny, "--mode", mode, "--seq-len", 8)
    name = "model.layers.1.mlp.down_proj.weight"
    weight, scales = mx.quantize(random_tensors(TINY)[name], mode=mode)
    block = bundle.block(1)
    assert mx.array_equal(block["mlp.down_proj.weight"], weight)
    assert mx.array_equal(block["mlp.down_proj.scales"], scales)
    assert "mlp.down_proj.biases" not in block and "biases" not in bundle.head()
    quantization = bundle.manifest.quantization
    assert quantization.mode == mode
    assert f"{mode}, {quantization.bits} bits" in export("--model", tiny, "--mode", mode).stdout
    assert "leave out" in refused("--model", tiny, "--mode", mode, "--group-size", 64)


# A model as mlx-lm quantizes it, by its name.
QUANTIZED = {
    **{recipe: recipe for recipe in ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")},
    **{f"{bits} bits": Quantization(bits, 64) for bits in (2, 3, 5, 6, 8)},
    "nvfp4": Quantization(4, 16, "nvfp4"),
    "mxfp4": Quantization(4, 32, "mxfp4"),
    "mxfp8": Quantization(8, 32, "mxfp8"),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_checkpoints_are_taken_as_they_are(name):
    """Every mode, width and mixture of mlx-lm's, with a head of its own."""
    config = {**TINY, "tie_word_embeddings": False, "hidden_size": 64, "intermediate_size": 128}
    folder = Path("checkpoint")
    how = QUANTIZED[name]
    if isinstance(how, str):
        write_mixed_model(folder, config, how)
    else:
        model = mlx_lm_model(config, lambda _: how)
        tensors = dict(tree_flatten(model.parameters()))
        write_model(folder, {**config, "quantization": asdict(how)}, tensors)
    expected = mx.load(str(folder / "model.safetensors"))

    bundle = exported("--model", folder, "--seq-len", 8)
    found = dict(tree_flatten(bundle.to_mlx_lm().parameters()))
    assert found.keys() == expected.keys()
    for array in expected:
        assert mx.array_equal(found[array], expected[array]), array
    again = json.loads(Path("out.mesp/config.json").read_text())["quantization"]
    assert again == json.loads((folder / "config.json").read_text())["quantization"]
    assert len(bundle.manifest.blocks) == (2 if isinstance(how, str) else 1)
    other = "some matrices otherwise" in export("--model", folder, "--out", "b.mesp").stdout
    assert other == isinstance(how, str)


def test_gemma_3_with_a_head_of_its_own():
    """Older versions of mlx-lm wrote the embedding a second time, quantized too."""
    config = {**FAMILIES["gemma3_text"], "tie_word_embeddings": True}
    tensors = random_tensors(config)
    model = mlx_lm_model(config, lambda _: Quantization(4, 32))
    tensors = dict(tree_flatten(model.parameters()))
    wide = mx.quantize(random_tensors(config)["model.embed_tokens.weight"], 32, 8)
    for part, array in zip(("weight", "scales", "biases"), wide, strict=True):
        tensors[f"lm_head.{part}"] = array
    quantization = {"bits": 4, "group_size": 32, "lm_head": {"bits": 8, "group_size": 32}}
    write_model(Path("gemma"), {**config, "quantization": quantization}, tensors)
    bundle = exported("--model", "gemma", "--seq-len", 8)
    assert bundle.head()["weight"].shape == (320, 16) and bundle.embedding()["weight"].shape == (
        320,
        8,
    )
    tokens = mx.array([[1, 2, 3]])
    expected, _ = load_model(Path("gemma"))
    assert mx.array_equal(bundle.to_mlx_lm()(tokens), expected(tokens))


def test_float16_scales_in_bfloat16_are_noted():
    tensors = dict(tree_flatten(mlx_lm_model(TINY, lambda _: Quantization()).parameters()))
    tensors = {n: a.astype(mx.float16) if "scales" in n else a for n, a in tensors.items()}
    write_model(Path("half"), {**TINY, "quantization": {"bits": 4, "group_size": 64}}, tensors)
    for dtype, noted in (("bfloat16", True), ("float32", False)):
        done = export("--model", "half", "--dtype", dtype, "--seq-len", 8, "--out", dtype)
        assert done.exit_code == 0, done.output
        assert ("Note: the model's scales are float16" in done.stderr) == noted
