"""Compares logits with transformers for random tiny models, which may also be refused.

`MESP_MODEL_CASES` is the number of cases for each family, and `MESP_CONFIG_CHANGES` the largest
number of changes of a class's configuration.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import class_defaults
from helpers import configurations
from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.models.config_json import check_lengths
from mesp.models.quantization_formats import Quantization
from mesp.quantization.choose import Quantizations
from mesp.source_model.forward_pass import SourceModel
from mesp.source_model.quantization_loss import compute_head_inputs
from mesp.source_model.safetensors import SafetensorsWeights

torch = pytest.importorskip("torch", reason="`make test-slow` installs torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

pytestmark = pytest.mark.transformers
CASES = int(os.environ.get("MESP_MODEL_CASES", "20"))
CHANGES = int(os.environ.get("MESP_CONFIG_CHANGES", "400"))
LENGTH = 24
TOLERANCE = 1e-4

_FACTORS = [1 + i / 8 for i in range(64)]
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3 |= {"original_max_position_embeddings": 16}
_ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    _LLAMA3,
    {"rope_type": "longrope"},
    *[{"rope_type": "yarn", "factor": 4.0}] * 3,
]
_ROPE_KEYS: dict[str, dict[str, list[Any]]] = {
    "yarn": {
        "original_max_position_embeddings": [16, 64],
        "attention_factor": [1.0, 0.7],
        "truncate": [False, True],
        "beta_fast": [4.0],
        "beta_slow": [2],
        "mscale": [0.5, 1.0],
        "mscale_all_dim": [0.8],
        "attn_factor": [2.0],
    },
    "longrope": {
        "original_max_position_embeddings": [16, 64],
        "factor": [2.0],
        "attention_factor": [1.3],
    },
    "linear": {"truncate": [False]},
    "default": {"factor": [2.0], "mrope_section": [[2, 3, 3]]},
}
_VALUES: dict[str, list[Any]] = {
    "num_attention_heads": [2, 4],
    "num_key_value_heads": [1, 2, None],
    "head_dim": [16, 32, None],
    "intermediate_size": [48, 96],
    "num_hidden_layers": [1, 2, 3, 4],
    "hidden_act": ["silu", "gelu"],
    "hidden_activation": ["gelu_pytorch_tanh", "silu"],
    "sliding_window": [None, 5],
    "max_window_layers": [0, 1, 3],
    "query_pre_attn_scalar": [16, 24],
    "attn_logit_softcapping": [None, 2.0],
    "final_logit_softcapping": [None, 2.0],
    "partial_rotary_factor": [0.5, 1.0],
    "rope_theta": [100.0, 1e5],
    "rope_local_base_freq": [50.0],
    "no_rope_layer_interval": [2, 3],
    "conv_L_cache": [3, 4],
    "block_multiple_of": [16, 64],
    "block_ff_dim": [96, 160],
    "block_ffn_dim_multiplier": [1.0, 1.5],
    "num_experts": [4, 6],
    "num_local_experts": [0, 4, 6],
    "num_experts_per_tok": [1, 2],
    "moe_intermediate_size": [16, 48],
    "shared_expert_intermediate_size": [16, 48],
    "shared_intermediate_size": [48, 96],
    "decoder_sparse_step": [1, 2],
    "mlp_only_layers": [[], [0]],
    "num_dense_layers": [0, 1],
    "position_embedding_type": [None, "rope", "nope"],
    "mamba_n_heads": [8],
    "mamba_d_head": [16],
    "mamba_n_groups": [1, 2],
    "mamba_d_state": [8, 16],
    "mamba_d_conv": [2, 4],
    "time_step_limit": [(0.0, float("inf")), (0.01, 0.5)],
    "linear_num_key_heads": [1, 2],
    "linear_num_value_heads": [2, 4],
    "linear_key_head_dim": [8, 16],
    "linear_value_head_dim": [8, 16],
    "linear_conv_kernel_dim": [2, 4],
    "num_kv_shared_layers": [0, 1],
    "global_head_dim": [16, 32],
    "hidden_size_per_layer_input": [16],
    "original_max_position_embeddings": [8, 16, 64],
    "max_position_embeddings": [64, 256],
    "full_attn_idxs": [[0], [1]],
}
_KEPT = frozenset(
    ("vocab_size", "hidden_size", "rope_parameters", "layer_types", "model_type", "pad_token_id",
     "bos_token_id", "eos_token_id", "vocab_size_per_layer_input", "mamba_expand",
     "mamba_chunk_size", "no_rope_layers", "num_global_key_value_heads", "text_config",
     "vision_config", "audio_config", "per_layer_config", "num_labels", "id2label", "dtype",
     "return_dict", "output_attentions", "output_hidden_states", "use_cache", "is_decoder")
)  # fmt: skip
_SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DELTA = {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 16}
_GRANITE4 = {
    "num_local_experts": 0, "num_experts_per_tok": 2, "shared_intermediate_size": 96,
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
    "layer_types": ["mamba", "attention"],
}  # fmt: skip
_GEMMA4 = {
    "head_dim": 16, "global_head_dim": 32, "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 0, "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, "norm_topk_prob": True, **_EXPERTS},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], **_DELTA},
    "qwen3_5_moe_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 32, **_DELTA, **_EXPERTS,
    },
    "llama": {},
    "smollm3": {},
    "granite": {},
    "granitemoehybrid": _GRANITE4,
    "mistral": {"sliding_window": None},
    "ministral3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5},
    "gemma4_text": _GEMMA4,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **_EXPERTS},
    "phi3": {},
}  # fmt: skip
_SIGHT = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 14}
_QWEN = {**_SIGHT, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
_SIGLIP = {**_SIGHT, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 28}
_SIGLIP2 = {**_SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 4}
_VISION = {
    "qwen3_5": {**_QWEN, "spatial_merge_size": 1, "num_position_embeddings": 16},
    "gemma3": _SIGLIP,
    "mistral3": {**_SIGLIP, "head_dim": 16},
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": {**_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    "smolvlm": _SIGLIP,
    "idefics3": _SIGLIP,
    "lfm2_vl": _SIGLIP2,
}
_TEXTS = {
    "qwen3_5": "qwen3_5_text", "gemma3": "gemma3_text", "mistral3": "mistral",
    "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "smolvlm": "llama", "idefics3": "llama",
    "lfm2_vl": "lfm2",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    family: str
    keys: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)
    edits: tuple[str, ...] = ()


def no_head(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors.pop("lm_head.weight", None)


def embedding_of(tensors: dict[str, Any]) -> str:
    return next(name for name in tensors if name.endswith("embed_tokens.weight"))


def other_head(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors[embedding_of(tensors)].flip(0).contiguous()


def same_head(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors[embedding_of(tensors)].clone()


def head_alone(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors.pop(embedding_of(tensors))


def unknown_key(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    config["what_is_this"] = 2


def other_tensor(config: dict[str, Any], tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.what_is_this.weight"] = torch.ones(())


EDITS = {
    each.__name__: each
    for each in (no_head, other_head, same_head, head_alone, unknown_key, other_tensor)
}


def draw(family: str, seed: int) -> Case:
    rng = random.Random(f"{family} {seed}")
    text = _TEXTS.get(family, family)
    options = {f.name: getattr(f, "default", None) for f in fields(CONFIG_MAPPING[text])}
    keys: dict[str, Any] = {}
    names = sorted(
        options.keys() - _KEPT | ({"partial_rotary_factor"} if text != "phi3" else set())
    )
    for name in rng.sample(names, min(len(names), rng.choice([0, 1, 2, 3, 5]))):
        default = options.get(name)
        if name in _VALUES:
            keys[name] = rng.choice(_VALUES[name])
        elif isinstance(default, bool):
            keys[name] = not default
        elif isinstance(default, float):
            keys[name] = default * rng.choice([0.5, 2.0]) or 0.1
    rope: dict[str, Any] = {}
    if rng.random() < 0.5 and not family.startswith(("gemma3", "gemma4")):
        rope = dict(rng.choice(_ROPES))
        more = _ROPE_KEYS.get(rope["rope_type"], {})
        for name in rng.sample(sorted(more), min(len(more), rng.choice([0, 0, 1, 2]))):
            rope[name] = rng.choice(more[name])
    edits = [rng.choice(sorted(EDITS))] if rng.random() < 0.4 else []
    edits += [f"without {rng.choice(names)}"] if rng.random() < 0.3 else []
    others = sorted(_VALUES.keys() - options.keys())
    edits += [f"with {rng.choice(others)}"] if rng.random() < 0.2 else []
    return Case(family, keys, rope, tuple(edits))


def configuration(case: Case) -> Any:
    text = _TEXTS.get(case.family, case.family)
    keys = {**_SIZES, **BASES[text], **case.keys}
    layers = keys["num_hidden_layers"]
    if kinds := keys.get("layer_types"):
        keys["layer_types"] = (kinds * layers)[:layers]
    if case.rope:
        rope = case.rope | {"rope_theta": keys.get("rope_theta", 1e4)}
        if rope["rope_type"] == "longrope":
            size = keys.get("head_dim") or keys["hidden_size"] // keys["num_attention_heads"]
            pairs = int(size * keys.get("partial_rotary_factor", 1.0)) // 2
            rope["short_factor"] = _FACTORS[:pairs]
            rope["long_factor"] = [2 * each for each in _FACTORS[:pairs]]
        keys["rope_parameters"] = rope
    if case.family in _VISION:
        tie = keys.pop("tie_word_embeddings", False)
        if case.family in ("mistral3", "smolvlm", "idefics3", "lfm2_vl"):
            keys["model_type"] = text
        if case.family == "qwen2_5_vl" and not case.rope:
            keys["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3]}
        config = CONFIG_MAPPING[case.family](
            text_config=keys, vision_config={**_VISION[case.family]}, tie_word_embeddings=tie
        )
        for each in ("image_token_id", "video_token_id", "vision_start_token_id",
                     "vision_end_token_id", "image_token_index"):  # fmt: skip
            if hasattr(config, each):
                setattr(config, each, 96)
        return config
    return CONFIG_MAPPING[case.family](**keys)


def randomize(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            values = torch.randn(tensor.shape, generator=generator)
            if name.endswith("A_log"):
                values = values.abs() * 0.5
            elif "norm" in name or name.endswith((".D", "layer_scalar")):
                values = 0.2 * values + (0 if tensor.abs().max() == 0 else 1)
            elif tensor.ndim >= 2:
                values = values * tensor.shape[-1] ** -0.5
            tensor.copy_(values)
        for name, tensor in model.named_buffers():
            if name.endswith(("expert_bias", "layer_scalar")):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    model.tie_weights()


def auto_of(is_multimodal: bool) -> Any:
    several = transformers.AutoModelForImageTextToText
    return several if is_multimodal else transformers.AutoModelForCausalLM


def save(case: Case, folder: Path) -> None:
    config = configuration(case)
    model = auto_of(case.family in _VISION).from_config(config, dtype=torch.float32)
    randomize(model, 0)
    model.save_pretrained(folder)
    file = folder / "config.json"
    written = json.loads(file.read_text())
    tensors = load_file(folder / "model.safetensors")
    for edit in case.edits:
        if edit in EDITS:
            EDITS[edit](written, tensors)
        elif edit.startswith("with "):
            key = edit.removeprefix("with ")
            written.get("text_config", written).setdefault(key, _VALUES[key][-1])
        else:
            written.get("text_config", written).pop(edit.removeprefix("without "), None)
    file.write_text(json.dumps(written))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def theirs(family: str, folder: Path, tokens: list[int]) -> np.ndarray | None:
    text = (folder / "config.json").read_text()
    auto, config = auto_of('"text_config"' in text), json.loads(text)
    its = CONFIG_MAPPING[family].from_dict(config)
    with torch.device("meta"):
        size = sum(each.numel() for each in auto.from_config(its).parameters())
    if size > 1 << 22:  # the files' tensors have fewer numbers
        return None
    try:
        model, info = auto.from_pretrained(
            folder, config=its, dtype=torch.float32, output_loading_info=True
        )
    except RuntimeError as error:
        if "size mismatch" in str(error) or "ignore_mismatched_sizes" in str(error):
            return None
        raise
    if info["missing_keys"] or info["mismatched_keys"]:
        return None
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([tokens])).logits[0].float().numpy()


def ours(folder: Path, tokens: list[int]) -> np.ndarray:
    config = json.loads((folder / "config.json").read_text())
    arch = Architecture.from_config(config, len(tokens))
    check_lengths(config, [len(tokens)])
    weights = SafetensorsWeights(folder, arch)
    model = SourceModel(weights, weights.arch, Quantizations(Quantization()))
    (x,) = compute_head_inputs(model, [tokens])
    return np.array(model.logits(x, slice(0, arch.vocab_size)))


TOKENS = [int(each) for each in np.random.default_rng(0).integers(1, 90, LENGTH)]


def outcome(case: Case, folder: Path) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    return compared(case.family, folder, lambda: save(case, folder))


def compared(family: str, folder: Path, write: Callable[[], None] = lambda: None) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write()
            expected = theirs(family, folder, TOKENS)
    except Exception as error:  # transformers raises various errors for an invalid config
        return f"not a model: {type(error).__name__} {error!s:.100}"
    if expected is not None and not np.isfinite(expected).all():
        return "not a model: its logits are not finite"
    try:
        found = ours(folder, TOKENS)
    except MespError as error:
        return f"refused: {error}"
    if expected is None:
        return "wrong: transformers lacks weights, and nothing is said here"
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    return "equal" if error <= TOLERANCE else f"wrong: by {error:.2g}"


@pytest.fixture(scope="module", autouse=True)
def silent() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.mark.parametrize("family", [*BASES, *_VISION])
def test_logits_are_those_of_transformers(family: str, tmp_path: Path):
    assert outcome(Case(family), tmp_path / "model") == "equal"
    cases = [draw(family, seed) for seed in range(CASES)]
    found = [(outcome(case, tmp_path / "model"), case) for case in cases]
    print(f"\n{family}: {dict(Counter(said.partition(':')[0] for said, _ in found))}")
    assert not [each for each in found if each[0].startswith("wrong")]


TABLE = configurations.read_table()


def test_the_classes_are_those_of_the_installed_transformers():
    assert class_defaults.FILE.read_text() == class_defaults.write_table(
        class_defaults.make_table()
    )


@pytest.mark.parametrize("name", TABLE)
def test_a_configuration_is_read_as_transformers_reads_it(name: str, tmp_path: Path):
    base = TABLE[name]["config"]
    family = base["model_type"]
    config = CONFIG_MAPPING[family].from_dict(deepcopy(base))
    model = auto_of("text_config" in base).from_config(config, dtype=torch.float32)
    randomize(model, 0)
    model.save_pretrained(tmp_path)
    found = []
    for change in configurations.changes(name, base)[:CHANGES]:
        if family == "lfm3" and "rope" in str(change):
            continue  # Liquid AI's own code computes another default RoPE than transformers
        (tmp_path / "config.json").write_text(json.dumps(configurations.changed(base, change)))
        found.append((compared(family, tmp_path), change))
    print(f"\n{name}: {dict(Counter(said.partition(':')[0] for said, _ in found))}")
    assert not [each for each in found if each[0].startswith("wrong")]
    models = [change for said, change in found if not said.startswith("not a model")]
    assert not [change for change in models if [change, "not a model"] in TABLE[name]["answers"]]
