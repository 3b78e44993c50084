import json
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from helpers.adapters import write_adapters
from helpers.commands import call
from helpers.models import FAMILIES, write_model

torch = pytest.importorskip("torch", reason="`make test-slow` installs torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.transformers
# transformers has no code for MiniCPM, and mlx-lm has none for LFM3.
READ = sorted(FAMILIES.keys() - {"minicpm", "lfm3"})
VL = {
    "qwen2_5_vl": FAMILIES["qwen2"]
    | {"model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]}},
    "qwen3_vl": FAMILIES["qwen3"]
    | {
        "model_type": "qwen3_vl",
        "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]},
    },
    "smolvlm": FAMILIES["llama"] | {"model_type": "smolvlm"},
    "lfm2_vl": FAMILIES["lfm2"] | {"model_type": "lfm2_vl"},
}


@pytest.mark.parametrize("family", [*READ, *VL])
def test_transformers_reads_what_mlx_lm_reads(family: str, tmp_path: Path):
    transformers.utils.logging.set_verbosity_error()
    config = {**FAMILIES, **VL}[family] | {"pad_token_id": 0}
    config = {key: value for key, value in config.items() if value is not None}
    model = write_model(tmp_path / "model", config)
    bundle, out = tmp_path / "bundle.mesp", tmp_path / "fused"
    size = ("--seq-len", 8, "--rank", 4, "--group-size", 32)
    call("export", "--model", model, "--out", bundle, *size)
    adapters = write_adapters(tmp_path / "adapters", bundle)
    options = ("--bits", "bfloat16", "--val-batches", 0)
    call("fuse", bundle, "--adapters", adapters, "--out", out, *options)

    auto = transformers.AutoModelForCausalLM
    # The default attention of transformers does not apply Gemma 2's soft caps.
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    theirs, info = auto.from_pretrained(out, output_loading_info=True, **options)
    assert not any(info.values()), info
    name = json.loads((out / "config.json").read_text())["architectures"]
    assert name == [type(theirs).__name__]
    tokens = [3, 1, 4, 1, 5]
    with torch.no_grad():
        found = theirs.eval()(input_ids=torch.tensor([tokens])).logits[0].numpy()
    ours, _ = mlx_lm.load(str(out))
    ours.set_dtype(mx.float32)
    expected = np.array(ours(mx.array([tokens]))[0])
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    # For Qwen3.5, mlx-lm adds 1 to the norms' weights in bfloat16, which rounds them.
    assert error <= (2e-2 if family.startswith("qwen3_5") else 1e-4)
