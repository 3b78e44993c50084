"""Our adapters in the real PEFT, and its in our engine. `make test-peft` gets what it needs."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

REASON = "PyTorch and PEFT are large: `make test-peft` installs them"
torch = pytest.importorskip("torch", reason=REASON)
peft = pytest.importorskip("peft", reason=REASON)

from transformers import Qwen2ForCausalLM

from mesp.bundle import Bundle
from test_generate import adapters, bundle, ours

PROMPT = [5, 6, 7]


@pytest.fixture
def base(bundle: Path, tmp_path: Path) -> Qwen2ForCausalLM:
    """The bundle's weights, dequantized, as Hugging Face's model."""
    opened, folder = Bundle(bundle), tmp_path / "base"
    folder.mkdir()
    config = json.loads((bundle / "config.json").read_text())
    del config["quantization"]
    (folder / "config.json").write_text(json.dumps(config))
    parts = {"model.embed_tokens.": opened.embedding()}
    for index in range(opened.architecture.num_hidden_layers):
        parts[f"model.layers.{index}."] = opened.block(index)
    weights = {"model.norm.weight": opened.head()["norm"]}
    for prefix, arrays in parts.items():
        for name, array in arrays.items():
            stem = name.removesuffix("weight")
            if f"{stem}scales" in arrays and name.endswith("weight"):
                packed = (array, arrays[f"{stem}scales"], arrays[f"{stem}biases"])
                weights[prefix + name] = mx.dequantize(*packed, group_size=64, bits=4)
            elif not name.endswith(("scales", "biases")):
                weights[prefix + name] = array
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    return Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)


def theirs(model: torch.nn.Module, count: int) -> list[int]:
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        text = model.eval().generate(
            input_ids=ids, max_new_tokens=count, do_sample=False, eos_token_id=None
        )
    return text[0, len(PROMPT) :].tolist()


def test_peft_writes_the_same_text_with_our_adapters(
    bundle: Path,
    adapters: Path,
    base: Qwen2ForCausalLM,
):
    model = peft.PeftModel.from_pretrained(base, adapters / "peft")
    tokens = ours(bundle, PROMPT, 200, adapters=adapters / "peft")
    assert tokens == theirs(model, 200)
    assert tokens != ours(bundle, PROMPT, 200)


@pytest.mark.parametrize("rslora", [False, True])
def test_we_write_the_same_text_with_pefts_adapters(
    bundle: Path,
    base: Qwen2ForCausalLM,
    tmp_path: Path,
    rslora: bool,
):
    config = peft.LoraConfig(
        r=4,
        lora_alpha=20,
        use_rslora=rslora,
        target_modules=["q_proj", "up_proj"],
        layers_to_transform=[0, 3],
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "adapters")
    tokens = ours(bundle, PROMPT, 100, adapters=tmp_path / "adapters")
    assert tokens == theirs(model, 100)
    assert tokens != ours(bundle, PROMPT, 100)
