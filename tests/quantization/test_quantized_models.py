import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from helpers.exports import export, exported, refused
from helpers.mlx_models import with_few_values
from helpers.models import (
    FAMILIES,
    TINY,
    mlx_lm_model,
    random_tensors,
    write_mixed_model,
    write_model,
)
from mesp.bundle.compare_with_source import compare_with_source
from mesp.bundle.reader import Bundle
from mesp.models.quantization_formats import Quantization
from mesp.source_model.find import find_source

pytestmark = pytest.mark.usefixtures("working_folder")


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


def parts(arrays: dict[str, mx.array], module: str = "") -> list[mx.array]:
    return [arrays[module + part] for part in ("weight", "scales", "biases")]


QUANTIZED = {
    **{recipe: recipe for recipe in ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")},
    **{f"{bits} bits": Quantization(bits, 64) for bits in (2, 3, 5, 6, 8)},
    "nvfp4": Quantization(4, 16, "nvfp4"),
    "mxfp4": Quantization(4, 32, "mxfp4"),
    "mxfp8": Quantization(8, 32, "mxfp8"),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_checkpoints_are_taken_as_they_are(name):
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


FEW_BITS = {**FAMILIES["qwen3"], "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
FEW_BITS |= {"tie_word_embeddings": False}


def write_few_bits(folder: Path, bits: int, group: int, **more: object) -> Path:
    quantization = {"bits": bits, "group_size": group, **more}
    tensors = with_few_values(random_tensors(FEW_BITS), bits, group)
    return write_model(folder, {**FEW_BITS, "quantization": quantization}, tensors)


def edit_config(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_matrices_of_two_and_three_values_are_carried_over(bits: int, group: int):
    folder = write_few_bits(Path("few"), bits, group)
    given = mx.load(str(folder / "model.safetensors"))
    done = export("--model", folder, "--seq-len", 8, "--out", "out.mesp")
    assert done.exit_code == 0, done.output
    assert ("codes of 1 bit" in done.stderr) == (bits == 1)
    assert f"2 bits in groups of {group}, scales in float32" in done.stdout
    bundle = Bundle("out.mesp")
    config = json.loads(Path("out.mesp/config.json").read_text())
    assert config["quantization"] == {"bits": 2, "group_size": group}
    found = dict(tree_flatten(bundle.to_mlx_lm().parameters()))
    matrices = [name.removesuffix("scales") for name in given if name.endswith(".scales")]
    assert len(matrices) == 7 * FEW_BITS["num_hidden_layers"] + 2
    for name in matrices:
        theirs, ours = parts(given, name), parts(found, name)
        assert ours[1].dtype == mx.float32
        assert mx.array_equal(ours[1], theirs[1]) and mx.array_equal(ours[2], theirs[2])
        factors = (array.astype(mx.float32) for array in theirs[1:])
        expected = mx.dequantize(theirs[0], *factors, group, bits)
        assert mx.array_equal(mx.dequantize(*ours, group, 2), expected)
        levels = mx.unflatten(expected, 1, (-1, group)) / -theirs[2].astype(mx.float32)[..., None]
        assert set(np.unique(np.array(levels))) == ({-1, 1} if bits == 1 else {-1, 0, 1})


@pytest.mark.parametrize("bits", [1, 2])
def test_a_model_of_few_bits_computes_as_in_mlx_lm(bits: int):
    folder = write_few_bits(Path("few"), bits, 128)
    bundle = exported("--model", folder, "--seq-len", 8)
    found = compare_with_source(bundle, find_source("few", False))
    assert max(found.read, found.written) < 1e-5 and found.loss.kl.max() < 1e-6


def test_modules_of_other_bits_become_2_bits_each():
    def of(path: str) -> Quantization:
        return Quantization(1 if path == "lm_head" else 4, 64)

    tensors = dict(tree_flatten(mlx_lm_model(FEW_BITS, of).parameters()))
    quantization = {"bits": 4, "group_size": 64, "lm_head": {"bits": 1}}
    write_model(Path("few"), {**FEW_BITS, "quantization": quantization}, tensors)
    bundle = exported("--model", "few", "--seq-len", 8)
    config = json.loads(Path("out.mesp/config.json").read_text())["quantization"]
    assert config == quantization | {"lm_head": {"bits": 2}}
    ours, head = parts(bundle.head()), parts(tensors, "lm_head.")
    assert mx.array_equal(mx.dequantize(*ours, 64, 2), mx.dequantize(*head, 64, 1))


TURNED = {"bits": 2, "group_size": 128, "rotation": "r1"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"quantization": {"bits": 1}}, "do not fit its config.json"),
        ({"quantization": {"bits": 4}}, "do not fit its config.json"),
        ({"quantization": {"hadamard": {"block": 128}}}, "quantization's hadamard to "),
        ({"quantization": {"rotation": True}}, "quantization's rotation to true"),
        ({"quantization": {"global_scale": True}}, "quantization's global_scale to true"),
        ({"quantization": {"lm_head": TURNED}}, 'quantization\'s rotation of lm_head to "r1"'),
        ({"quantization_config": {"rotated": 1}}, "quantization_config's rotated to 1"),
        ({"quantization_config": {"quant_method": "spinquant"}}, "quantized by spinquant, which"),
        ({"quantization_config": {"quant_method": "bitnet"}}, "whose activations are not rounded"),
        ({"text_config": {"quantization_config": {"quant_method": "quip"}}}, "quantized by quip"),
        ({"model_type": "prism_hadamard_qwen35"}, "that a Hadamard transform rotates"),
        ({"model_type": "bitnet"}, "its activation is a squared ReLU"),
    ],
)
def test_what_a_quantization_says_wrongly_or_beside_is_refused(sections: dict, said: str):
    def change(config: dict) -> None:
        for key, value in sections.items():
            config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value

    folder = write_few_bits(Path("few"), 2, 128)
    edit_config(folder, change)
    assert said in refused("--model", folder)


def test_what_changes_nothing_in_a_quantization_is_taken():
    more = {"rotation": None, "global_scale": False, "vision_tower.a": False}
    more |= {"vision_tower.b": True, "vision_tower.c": {"bits": 8, "group_size": 64}}
    folder = write_few_bits(Path("few"), 2, 128, **more)
    edit_config(folder, lambda config: config.update(quantization_config=config["quantization"]))
    assert export("--model", folder, "--seq-len", 8).exit_code == 0


def test_a_quantization_that_mlx_lm_does_not_read_is_refused():
    folder = write_few_bits(Path("few"), 2, 128)
    edit_config(folder, lambda c: c.update(quantization_config=c.pop("quantization")))
    assert "sets quantization_config to {" in refused("--model", folder)


def test_gemma_3_with_a_head_of_its_own():
    """Older versions of mlx-lm stored a quantized copy of the tied embedding as the head."""
    config = {**FAMILIES["gemma3_text"], "tie_word_embeddings": True}
    model = mlx_lm_model(config, lambda _: Quantization(4, 32))
    tensors = dict(tree_flatten(model.parameters()))
    wide = mx.quantize(random_tensors(config)["model.embed_tokens.weight"], 32, 8)
    for part, array in zip(("weight", "scales", "biases"), wide, strict=True):
        tensors[f"lm_head.{part}"] = array
    quantization = {"bits": 4, "group_size": 32, "lm_head": {"bits": 8, "group_size": 32}}
    write_model(Path("gemma"), {**config, "quantization": quantization}, tensors)
    bundle = exported("--model", "gemma", "--seq-len", 8)
    assert bundle.head()["weight"].shape == (320, 16)
    assert bundle.embedding()["weight"].shape == (320, 8)
    tokens = mx.array([[1, 2, 3]])
    expected, _ = load_model(Path("gemma"))
    assert mx.array_equal(bundle.to_mlx_lm()(tokens), expected(tokens))


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize(
    ("scales", "norms", "stored"),
    [
        ("float16", "float16", "float16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("float32", "float32", "float32"),
        ("float16", "bfloat16", "float32"),
        ("bfloat16", "float32", "float32"),
    ],
)
def test_a_quantized_model_keeps_its_numbers(scales: str, norms: str, stored: str, mode: str):
    config = FAMILIES["lfm2"]
    quantization = Quantization() if mode == "affine" else Quantization(4, 32, mode)
    tensors = dict(tree_flatten(mlx_lm_model(config, lambda _: quantization).parameters()))
    of_scales = (".scales", ".biases")
    for name, array in tensors.items():
        if mx.issubdtype(array.dtype, mx.floating):
            its = scales if name.endswith(of_scales) else norms
            tensors[name] = array.astype(getattr(mx, its))
    write_model(Path("model"), {**config, "quantization": asdict(quantization)}, tensors)
    bundle = exported("--model", "model", "--seq-len", 8)
    assert bundle.manifest.dtype == (stored if mode == "affine" else norms)
    given = load_model(Path("model"))[0].parameters()
    pairs = (tree_flatten(each) for each in (bundle.to_mlx_lm().parameters(), given))
    for (name, a), (_, b) in zip(*pairs, strict=True):
        assert mx.array_equal(a.astype(mx.float32), b.astype(mx.float32)), name
