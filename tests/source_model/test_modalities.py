from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm.utils import load_model

from helpers import models
from helpers.exports import NEAREST, export, exported
from helpers.models import FAMILIES, mlx_lm_model, published, random_tensors, write_model
from mesp.bundle.reader import Bundle
from mesp.evaluation.evaluate import read_limits

pytestmark = pytest.mark.usefixtures("working_folder")


def of_several_modalities(folder: Path) -> Path:
    text = FAMILIES["qwen3_5"]
    tensors = random_tensors(text)
    tensors = {k.replace("model.", "model.language_model.", 1): v for k, v in tensors.items()}
    tensors |= {f"{name}.weight": mx.ones((4, 4)) for name in ("model.visual.blocks.0", "mtp.fc")}
    whole = {"model_type": "qwen3_5", "vision_config": {"depth": 2, "hidden_size": 32}}
    whole["text_config"] = {**text, "model_type": "qwen3_5_text"}
    write_model(folder, whole, tensors, tokenizer=False)
    models.write_tokenizer(folder, text["vocab_size"])
    return folder


def assert_same_logits(bundle: Bundle, model: nn.Module) -> None:
    tokens = mx.arange(1, 13)[None]
    expected = model(tokens)
    error = mx.linalg.norm(bundle.to_mlx_lm()(tokens) - expected)
    assert error <= 1e-5 * mx.linalg.norm(expected)


def test_the_text_of_a_model_of_several_modalities():
    folder = of_several_modalities(Path("whole"))
    result = export("--model", folder, "--seq-len", 8, "--out", "out.mesp", *NEAREST)
    assert result.exit_code == 0, result.output
    assert "2 tensors are left out" in result.stderr and result.stderr.count("\n") == 1
    bundle = Bundle("out.mesp")
    arch = bundle.architecture
    assert (arch.mlx_prefix, arch.hf_prefix) == ("language_model.model", "model.language_model")
    assert [mixer.type for mixer in arch.mixers] == ["gated_delta_net", "attention"]
    model, _ = load_model(folder)
    nn.quantize(model, 64, 4)
    assert_same_logits(bundle, model)


QWEN2_5_VL = {**FAMILIES["qwen2"], "model_type": "qwen2_5_vl"}
QWEN2_5_VL |= {"rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}}
QWEN3_VL = {**FAMILIES["qwen3"], "model_type": "qwen3_vl"}
QWEN3_VL |= {"rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]}}
SMOLVLM = {**FAMILIES["llama"], "model_type": "smolvlm", "is_llama_config": True}
SMOLVLM |= {"perceiver_config": {"model_type": "vllama3", "num_key_value_heads": 1}}
LFM2_VL = {**FAMILIES["lfm2"], "model_type": "lfm2_vl"}
OLDER_LFM2_VL = {**FAMILIES["lfm2"], "model_type": "lfm2-vl"}
SIGHT = ("vision_tower", "multi_modal_projector")
UNTIED_MISTRAL3 = {**FAMILIES["mistral3"], "tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "text", "others"),
    [
        (FAMILIES["gemma3"], "language_model.model.", SIGHT),
        (FAMILIES["gemma3"], "model.language_model.", [f"model.{name}" for name in SIGHT]),
        (UNTIED_MISTRAL3, "language_model.model.", SIGHT),
        (QWEN2_5_VL, "model.", ("visual",)),
        (QWEN3_VL, "model.language_model.", ("model.visual",)),
        (SMOLVLM, "model.text_model.", ("model.vision_model", "model.connector")),
        (SMOLVLM, "language_model.", ("vision_model", "connector")),
        (LFM2_VL, "model.language_model.", [f"model.{name}" for name in SIGHT]),
        (OLDER_LFM2_VL, "language_model.model.", SIGHT),
    ],
    ids=[
        "gemma3", "gemma3, newer", "mistral3", "qwen2_5_vl", "qwen3_vl", "smolvlm",
        "smolvlm of MLX", "lfm2_vl", "lfm2_vl, older",
    ],
)  # fmt: skip
def test_the_text_by_the_names_that_it_is_published_under(config, text, others):
    tensors = {name.replace("model.", text, 1): a for name, a in random_tensors(config).items()}
    if "lm_head.weight" in tensors and text != "model.text_model.":
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    tensors |= {f"{name}.blocks.0.weight": mx.ones((4, 4)) for name in others}
    whole, _ = published(config, {})
    folder = write_model(Path("whole"), config if text == "model." else whole, tensors)
    result = export("--model", folder, "--seq-len", 8, "--out", "out.mesp", *NEAREST)
    assert result.exit_code == 0, result.output
    assert f"{len(others)} tensors are left out" in result.stderr
    bundle = Bundle("out.mesp")
    arch = bundle.architecture
    prefixes = ("language_model.model", "model.language_model")
    if config is SMOLVLM:
        prefixes = ("language_model", "model.text_model")
    assert (arch.mlx_prefix, arch.hf_prefix) == prefixes
    assert read_limits(bundle.path)[0] == config.get("max_position_embeddings", 32768)
    model = mlx_lm_model(config)
    nn.quantize(model, 64, 4)
    assert_same_logits(bundle, model)


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_a_hybrid_model_that_mlx_lm_has_converted(family):
    if family == "qwen3_5":
        folder = of_several_modalities(Path("whole"))
    else:
        folder = write_model(Path("whole"), FAMILIES[family])
    mlx_lm.convert(str(folder), "converted", quantize=True, dtype="float32")
    bundle = exported("--model", "converted", "--seq-len", 8)
    assert_same_logits(bundle, load_model(Path("converted"))[0])


def test_the_text_alone():
    config = {**FAMILIES["qwen3_5"], "model_type": "qwen3_5_text"}
    bundle = exported("--model", write_model(Path("text"), config), "--seq-len", 8, *NEAREST)
    assert bundle.architecture.hf_prefix == "model"
    model = mlx_lm_model(FAMILIES["qwen3_5"])
    nn.quantize(model, 64, 4)
    assert_same_logits(bundle, model)
