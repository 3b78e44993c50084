import json
from pathlib import Path

import mlx.core as mx
import pytest

from helpers.exports import refused
from helpers.models import FAMILIES, TINY, random_tensors, write_model, write_tokenizer

pytestmark = pytest.mark.usefixtures("working_folder")


@pytest.fixture
def model():
    return write_model(Path("model"), TINY, shards=2)


def damage(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000, -1])
def test_truncated_weights(model, keep):
    damage(model / "model-00001-of-00002.safetensors", keep)
    message = refused("--model", model)
    assert "model-00001-of-00002.safetensors are truncated" in message


def test_damaged_index(model):
    damage(model / "model.safetensors.index.json", 20)
    assert "model.safetensors.index.json cannot be read" in refused("--model", model)


UP = "model.layers.2.mlp.up_proj.weight"
EXPERTS = "model.layers.1.mlp.switch_mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("config", "name", "tensor", "said"),
    [
        (TINY, UP, None, f"lack {UP}"),
        (TINY, "model.norm.weight", mx.ones(128, mx.int8), "norm.weight in model is of type I8"),
        (TINY, UP, mx.zeros((384, 128)), "mlp.up_proj.weight is [384, 128], not [320, 128]"),
        (FAMILIES["qwen3_moe"], EXPERTS, mx.zeros((4097, 0, 1)), "are truncated or damaged"),
    ],
)
def test_tensors_that_do_not_fit(config, name, tensor, said):
    tensors = random_tensors(config) | {name: tensor}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    assert said in refused("--model", write_model(Path("model"), config, given))


Q4 = {"bits": 4, "group_size": 64}


def quantized(**quantization: object) -> str:
    return json.dumps({**TINY, "quantization": quantization})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("{", "config.json cannot be read"),
        ("[]", "config.json cannot be read"),
        (json.dumps({**TINY, "model_type": "gemma3n"}), "gemma3n"),
        (json.dumps({**TINY, "quantization_config": {"quant_method": "gptq"}}), "gptq"),
        (json.dumps({**TINY, "quantization_config": "x"}), "its quantization_config cannot"),
        (json.dumps({**TINY, "quantization": "4bit"}), "config.json is not valid"),
        (json.dumps({**TINY, "quantization": [1]}), "config.json is not valid"),
        (quantized(**Q4, mode=[]), "its quantization cannot be used"),
        (quantized(bits=[4], group_size=64), "its quantization cannot be used"),
        (quantized(bits=7, group_size=64), "7 bits in groups of 64, which MLX does not have"),
        (quantized(bits=4, group_size=64, mode="mxfp4"), "mxfp4, 4 bits in groups of 64, which"),
        (quantized(bits=4, group_size=32, mode="int4"), "int4, 4 bits in groups of 32, which MLX"),
        (quantized(**{**Q4, "model.layers.1.mlp.up_proj": {"bits": 9}}), "9 bits in groups of 64"),
        (quantized(bits=1, group_size=16), "1 bit in groups of 16, which MLX does not have"),
        (quantized(**{**Q4, "model.layers.1.mlp.up_proj": False}), "layers.1.mlp.up_proj is not"),
        (quantized(**Q4), "model.layers.0.self_attn.q_proj is not quantized, unlike the rest"),
    ],
)
def test_bad_config(model, config, named):
    (model / "config.json").write_text(config)
    assert named in refused("--model", model)


def test_part_of_a_multimodal_model():
    tensors = {f"language_model.{name}": a for name, a in random_tensors(TINY).items()}
    write_model(Path("part"), TINY, tensors)
    assert "multimodal model; take a text-only one" in refused("--model", "part")


def test_quantized_model_stays_as_it_is(model):
    (model / "config.json").write_text(quantized(**Q4))
    said = "leave out --mode, --bits, --head-bits and --group-size"
    for option in (("--bits", 8), ("--group-size", 32), ("--mode", "nvfp4")):
        assert said in refused("--model", model, *option)


def test_folder_that_holds_no_model():
    Path("folder").mkdir()
    assert "no config.json" in refused("--model", "folder")
    Path("folder/config.json").write_text(json.dumps(TINY))
    assert "no weights" in refused("--model", "folder")


def test_model_without_tokenizer():
    folder = write_model(Path("model"), TINY, tokenizer=False)
    assert "has no tokenizer" in refused("--model", folder, "--data", "python-docs")


def test_damaged_tokenizer(model):
    damage(model / "tokenizer.json", 100)
    message = refused("--model", model, "--data", "python-docs")
    assert "tokenizer in model cannot be loaded" in message


def test_tokenizer_of_another_model():
    folder = write_model(Path("model"), {**TINY, "vocab_size": 100}, tokenizer=False)
    write_tokenizer(folder, 512)
    assert "do not belong together" in refused("--model", folder, "--data", "python-docs")


def test_queries_that_would_be_scaled_are_refused():
    folder = write_model(Path("model"), FAMILIES["mistral3"])
    assert "From 64 tokens on" in refused("--model", folder, "--seq-len", "64,65")
