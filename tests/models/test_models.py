import json
import math
from dataclasses import replace

import mlx.core as mx
import pytest
from mlx_lm.models.rope_utils import initialize_rope

from helpers.models import FAMILIES, arrays_of, mlx_lm_model
from mesp.block_function.rope import fast_rope
from mesp.block_function.rope import rope as rope_of
from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.models.config_json import complete, for_mlx_lm
from mesp.models.families import SEPARATE_MLP
from mesp.models.short_names import KNOWN
from mesp.models.tensor_names import name_here


@pytest.mark.parametrize("name", FAMILIES)
def test_arrays_are_those_of_mlx_lm(name):
    blocks, layers = Architecture.from_config(FAMILIES[name]).blocks, mlx_lm_model(FAMILIES[name])
    for block, layer in zip(blocks, layers.layers, strict=True):
        theirs = arrays_of(layer, block)
        assert {name: array.shape for name, array in theirs.items()} == block.tensors()


@pytest.mark.parametrize(
    ("name", "windows", "layers"),
    [
        ("qwen2", [None], (0, 0)),
        ("smollm3", [None, None], (0, 1)),
        ("mistral", [5], (0, 0)),
        ("gemma2", [5, None], (0, 1)),
        ("gemma3_text", [5, None], (0, 1)),
        ("phi3", [5], (0, 0)),
    ],
)
def test_kinds_of_attention(name, windows, layers):
    arch = Architecture.from_config(FAMILIES[name])
    assert [mixer.sliding_window for mixer in arch.mixers] == windows
    assert arch.layers == layers
    assert [block.mixer for block in arch.blocks] == [arch.mixers[kind] for kind in layers]


def test_defaults_of_the_patterns():
    gemma3 = {k: v for k, v in FAMILIES["gemma3_text"].items() if k != "sliding_window_pattern"}
    arch = Architecture.from_config({**gemma3, "num_hidden_layers": 14})
    assert arch.layers == (0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0)
    smollm3 = {k: v for k, v in FAMILIES["smollm3"].items() if k != "no_rope_layers"}
    arch = Architecture.from_config({**smollm3, "num_hidden_layers": 6})
    assert arch.layers == (0, 0, 0, 1, 0, 0)
    assert arch.mixers[1] == replace(arch.mixers[0], frequencies=())
    assert arch.first(3).mixers == arch.mixers[:1]
    mistral = Architecture.from_config({**FAMILIES["mistral"], "sliding_window": None})
    assert mistral.mixers[0].sliding_window is None


def test_a_window_of_the_whole_sequence_is_none():
    block = Architecture.from_config(FAMILIES["mistral"]).blocks[0]
    assert block.within(5).mixer == replace(block.mixer, sliding_window=None)
    assert block.within(6) == block


def test_numbers_of_gemma():
    gemma2, gemma3 = (Architecture.from_config(FAMILIES[n]) for n in ("gemma2", "gemma3_text"))
    assert gemma2.embedding_scale == gemma3.embedding_scale == 8
    # √1152 is 33.94. For Gemma 3, it is rounded to bfloat16, which gives 34.
    scales = [
        Architecture.from_config({**FAMILIES[name], "hidden_size": 1152}).embedding_scale
        for name in ("gemma2", "gemma3_text")
    ]
    assert scales == [math.sqrt(1152), 34.0]


LLAMA3 = {"factor": 32.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {"type": "longrope", "original_max_position_embeddings": 4096}
LONG |= {"short_factor": [1.0] * 32, "long_factor": [1 + i / 8 for i in range(32)]}


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "default"},
        {"rope_type": "linear", "factor": 8.0},
        LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        YARN,
        YARN | {"beta_fast": 16, "beta_slow": 2, "mscale": 2.0, "mscale_all_dim": 1.0},
        LONG,
        {"rope_type": "proportional"},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
    ],
)
def test_rope_turns_as_in_mlx_lm(scaling):
    config = {**FAMILIES["phi3"], "rope_theta": 5e5, "head_dim": 64, "rope_scaling": scaling}
    config["max_position_embeddings"] = 131072
    config["partial_rotary_factor"] = (scaling or {}).get("partial_rotary_factor", 1.0)
    mixer = Architecture.from_config(config, 8192).mixers[0]
    rope = initialize_rope(64, 5e5, False, complete(config)["rope_scaling"], 131072)
    x = mx.random.normal((1, 2, 40, 64), key=mx.random.key(0))
    expected = rope(mx.array(x))  # some functions of mlx-lm change their arguments
    rows = slice(0, 40)
    for turn in (fast_rope(mixer, mx.fast), rope_of(mixer, rows)):
        error = mx.linalg.norm(turn(x, rows) - expected)
        assert error <= 1e-5 * mx.linalg.norm(expected)
        tile = turn(x[:, :, 30:], slice(30, 40))
        assert mx.linalg.norm(tile - expected[:, :, 30:]) <= 1e-5 * mx.linalg.norm(expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_manifest_keeps_everything(name):
    arch = Architecture.from_config(FAMILIES[name])
    entry = json.loads(json.dumps(arch.to_manifest()))
    assert Architecture.from_manifest(entry) == arch
    assert list(entry) == [
        "model_type", "hidden_size", "vocab_size", "rms_norm_eps", "tie_word_embeddings",
        "hidden_act", "post_norms", "final_logit_softcapping", "embedding_scale", "logits_scaling",
        "mlx_prefix", "hf_prefix", "biases", "mixers", "layers", "mlps", "mlp_layers", "hf_modules",
        "per_layer",
    ]  # fmt: skip
    for mlp in entry["mlps"]:
        experts = ["experts"] if "experts" in mlp else []
        assert list(mlp) == ["modules", "intermediate_size", *experts]
        assert experts or mlp["modules"][-1][1] == ["down"]
    for mixer in entry["mixers"]:
        assert list(mixer)[:2] == ["type", "modules"]
        assert mixer["modules"][-1][1] in (["o"], ["out"])


def test_layers_of_a_hybrid():
    qwen = {k: v for k, v in FAMILIES["qwen3_5"].items() if k != "full_attention_interval"}
    arch = Architecture.from_config({**qwen, "num_hidden_layers": 9})
    assert arch.layers == (0, 0, 0, 1, 0, 0, 0, 1, 0)
    types = ["full_attention", "linear_attention"]
    assert Architecture.from_config({**qwen, "layer_types": types}).layers == (0, 1)
    lfm2 = FAMILIES["lfm2"]
    named = {**lfm2, "layer_types": ["conv", "full_attention"], "full_attn_idxs": None}
    assert Architecture.from_config(named) == Architecture.from_config(lfm2)
    narrow = Architecture.from_config({**lfm2, "block_auto_adjust_ff_dim": False})
    found = [arch.mlps[0].intermediate_size for arch in (Architecture.from_config(lfm2), narrow)]
    assert found == [128, 192]


def test_layers_and_rope_of_lfm3():
    config = FAMILIES["lfm3"]
    arch = Architecture.from_config(config)
    conv, sliding, full = arch.mixers
    assert (conv.kernel_size, sliding.sliding_window, full.sliding_window) == (7, 5, None)
    assert full.frequencies == (*(1e4 ** (-2 * i / 16) for i in range(4)), 0, 0, 0, 0)
    assert sliding.frequencies == tuple(100.0 ** (-2 * i / 16) for i in range(8))
    rope = config["rope_parameters"]
    named = {**rope["full_attention"], "rope_type": "proportional"}
    config = {**config, "rope_parameters": {**rope, "full_attention": named}}
    assert Architecture.from_config(config) == arch
    assert Architecture.from_config(complete(config)) == arch  # a bundle has the completed config
    del named["partial_rotary_factor"]
    whole = Architecture.from_config(
        {**config, "rope_parameters": {**rope, "full_attention": named}}
    )
    assert whole.mixers[2].frequencies == tuple(1e4 ** (-2 * i / 16) for i in range(8))

    keys = ("model_type", "hidden_size", "intermediate_size", "vocab_size", "norm_eps")
    keys += ("num_attention_heads", "num_key_value_heads")
    arch = Architecture.from_config({key: config[key] for key in keys} | {"num_hidden_layers": 8})
    conv, full, sliding = arch.mixers
    assert arch.layers == (0, 0, 1, 0, 2, 0, 1, 0)
    assert (conv.kernel_size, sliding.sliding_window, full.head_dim) == (7, 256, 128)
    assert full.frequencies == (*(1e6 ** (-2 * i / 128) for i in range(32)), *32 * [0])
    assert sliding.frequencies == tuple(1e4 ** (-2 * i / 128) for i in range(64))


def test_gemma4():
    arch = Architecture.from_config(KNOWN["Gemma-4-E2B"][2])
    sliding, full, after_sliding, after_full = arch.mixers
    assert arch.layers[:15] == (0, 0, 0, 0, 1) * 3 and arch.layers[15:] == (2, 2, 2, 2, 3) * 4
    assert (after_sliding.keys_of, after_full.keys_of) == (13, 14) and arch.owners == {13, 14}
    assert [mlp.intermediate_size for mlp in arch.mlps] == [6144, 12288]
    assert arch.mlp_layers == (0,) * 15 + (1,) * 20
    assert (sliding.head_dim, sliding.sliding_window, full.head_dim) == (256, 512, 512)
    assert sliding.frequencies == tuple(1e4 ** (-2 * i / 256) for i in range(128))
    assert full.frequencies == (*(1e6 ** (-2 * i / 512) for i in range(64)), *192 * [0])
    assert {mixer.attention_scale for mixer in arch.mixers} == {1} and arch.norm_offset == 0
    assert arch.embedding_scale == 39.25  # √1536 in bfloat16
    assert [*arch.blocks[15].modules] == [
        "self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        "per_layer_input_gate", "per_layer_projection",
    ]  # fmt: skip
    assert "self_attn.k_norm.weight" not in arch.blocks[15].norms()
    assert arch.per_layer_shapes == {
        "model.embed_tokens_per_layer": (262144, 35 * 256),
        "model.per_layer_model_projection": (35 * 256, 1536),
    }
    wide = Architecture.from_config(KNOWN["Gemma-4-E4B"][2])
    assert wide.owners == {22, 23} and len(wide.mlps) == 1
    unused = ("embed_audio.x", "audio_tower.x")
    unused += ("language_model.layers.0.self_attn.q_proj.input_max",)
    assert all(name_here(f"model.{name}", "gemma4") is None for name in unused)


@pytest.mark.parametrize(
    ("family", "mixer", "damage"),
    [
        ("gemma2", None, {"hidden_size": 0}),
        ("gemma2", None, {"layers": [0, 2]}),
        ("gemma2", None, {"layers": []}),
        ("gemma2", None, {"hidden_act": "relu"}),
        ("gemma2", None, {"mlps": [{"modules": [["g", ["gate"]]], "intermediate_size": 128}]}),
        ("gemma2", None, {"mlps": [{"modules": SEPARATE_MLP, "intermediate_size": 0}]}),
        ("gemma2", None, {"mlps": []}),
        ("gemma2", None, {"mlp_layers": [0]}),
        ("gemma2", None, {"mlp_layers": [0, 1]}),
        ("gemma2", None, {"biases": ["lm_head"]}),
        ("gemma2", None, {"embedding_scale": "1"}),
        ("gemma2", None, {"mixers": []}),
        ("gemma2", None, {"hf_modules": [["gate_up", ["mlp.gate_proj", "mlp.gate_proj"]]]}),
        ("gemma2", None, {"hf_modules": [["gate_up", ["gate", "up"]]]}),
        ("gemma2", None, {"more": 1}),
        ("gemma2", 1, {"type": "mamba"}),
        ("gemma2", 1, {"head_dim": 8}),  # fewer dimensions than RoPE rotates
        ("gemma2", 1, {"num_key_value_heads": 3}),
        ("gemma2", 1, {"qk_norm": 1}),
        ("gemma2", 1, {"modules": [["self_attn.q_proj", ["q"]]]}),
        ("gemma2", 1, {"frequencies": [-1.0]}),
        ("gemma2", 1, {"frequencies": [False]}),
        ("gemma2", 1, {"output_gate": True, "modules": [[each, [each]] for each in "qkvgo"]}),
        ("gemma2", 1, {"attn_logit_softcapping": -1}),
        ("gemma2", 1, {"more": 1}),
        ("qwen3_5", 0, {"num_value_heads": 3}),
        ("qwen3_5", 0, {"key_head_dim": 0}),
        ("qwen3_5", 0, {"modules": [["linear_attn.out_proj", ["out"]]]}),
        ("lfm2", 0, {"kernel_size": 0}),
        ("lfm2", 0, {"kernel_size": True}),
        ("lfm2", 0, {"modules": [["conv.in_proj", ["in", "out", "out"]]]}),
    ],
)
def test_a_damaged_manifest_is_refused(family, mixer, damage):
    entry = Architecture.from_config(FAMILIES[family]).to_manifest()
    damaged = entry if mixer is None else entry["mixers"][mixer]
    damaged |= damage
    with pytest.raises((ValueError, TypeError, KeyError)):
        Architecture.from_manifest(entry)


@pytest.mark.parametrize("keys_of", [-1, 3, 4, 0.0, True])
def test_a_block_takes_keys_of_one_before_that_has_such(keys_of):
    entry = Architecture.from_config(FAMILIES["gemma4"]).to_manifest()
    assert entry["layers"] == (0, 0, 1, 2, 3)
    entry["mixers"][2]["keys_of"] = keys_of
    with pytest.raises(ValueError, match="keys_of"):
        Architecture.from_manifest(entry)


def test_rope_as_transformers_5_writes_it():
    for name in ("qwen2", "llama", "phi3", "gemma3_text"):
        config = dict(FAMILIES[name])
        moved = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
        if scaling := config.pop("rope_scaling", None):
            moved |= scaling | {"rope_type": scaling.get("rope_type") or scaling["type"]}
            moved.pop("type", None)
        if "partial_rotary_factor" in config:
            moved["partial_rotary_factor"] = config.pop("partial_rotary_factor")
        if local := config.pop("rope_local_base_freq", None):
            sliding = {"rope_theta": local, "rope_type": "default"}
            moved = {"full_attention": moved, "sliding_attention": sliding}
        expected = Architecture.from_config(FAMILIES[name])
        assert Architecture.from_config({**config, "rope_parameters": moved}) == expected


YARN_ALONE = {"type": "yarn"}
LINEAR_IN_PART = {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}
OF_ANOTHER_KIND = "its mixture of experts is of another kind"


@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("qwen2", {"model_type": "falcon"}, "'falcon' is not supported; supported are qwen2, "),
        ("qwen2", {"model_type": None}, "'' is not supported"),
        ("qwen2", {"model_type": ["qwen2"]}, "'' is not supported"),
        ("qwen2", {"num_hidden_layers": True}, "num_hidden_layers cannot be used"),
        ("qwen2", {"rms_norm_eps": True}, "rms_norm_eps cannot be used"),
        ("granite", {"residual_multiplier": True}, "residual_multiplier cannot be used"),
        ("llama", {"rope_theta": True}, "rope_theta cannot be used"),
        ("gemma2", {"layer_types": "ab"}, "layer_types cannot be used"),
        ("mistral", {"sliding_window": [8, None]}, "sliding_window cannot be used"),
        ("gemma2", {"sliding_window": None}, "sliding_window to null"),
        ("llama", {"rope_parameters": "full_attention"}, "rope_parameters cannot be used"),
        (
            "llama",
            {"rope_scaling": FAMILIES["llama"]["rope_scaling"] | {"low_freq_factor": -1.0}},
            "low_freq_factor cannot be used",
        ),
        ("mistral", {"rope_scaling": YARN_ALONE, "max_position_embeddings": -1}, "original_m"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "not valid .*experts' sizes"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "not valid .*experts' sizes"),
        ("qwen3_moe", {"model_type": "olmoe"}, "norms q and k over all heads"),
        ("qwen2", {"model_type": "paligemma", "text_config": {}}, "several modalities"),
        ("qwen2", {"model_type": "mixtral", "num_local_experts": 8}, OF_ANOTHER_KIND),
        (
            "mistral3",
            {"text_config": {"model_type": "mistral4"}},
            'text_config\'s model_type to "mistral4"',
        ),
        ("gemma2", {"model_type": "gemma3n", "text_config": {}}, "four streams"),
        ("granitemoehybrid", {"layer_types": ["conv", "attention"]}, 'layer_types to "conv"'),
        ("granite-mamba", {"time_step_limit": [0.001, 100.0]}, "time_step_limit"),
        ("granite-mamba", {"mamba_n_groups": 2}, "mamba_n_groups to 2"),
        ("granite-mamba", {"mamba_d_state": 0}, "not valid .*sizes"),
        ("lfm2_moe", {"layer_types": None}, "lacks 'layer_types'"),
        ("gemma3", {"hidden_size": None}, "hidden_size"),
        (None, {"model_type": "gemma3"}, "lacks 'text_config'"),
        ("gemma4", {"vocab_size_per_layer_input": 64}, "vocab_size_per_layer_input to 64"),
        ("gemma4", {"hidden_size_per_layer_input": 0}, "not valid .*sizes"),
        ("gemma4", {"num_kv_shared_layers": 5}, "which share keys, is of the type"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "sliding_window to null"),
        ("minicpm", {"sparse_config": {"topk": 64}}, "sparse_config"),
        ("qwen3", {"head_dim": 33}, "not valid .*frequencies"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_5", {"layer_types": ["mamba", "full_attention"]}, 'layer_types to "mamba"'),
        ("qwen3_5", {"layer_types": ["conv", "full_attention"]}, 'layer_types to "conv"'),
        ("lfm3", {"use_attention_gate": False}, "use_attention_gate"),
        ("lfm3", {"use_sandwich_norm": False}, "use_sandwich_norm"),
        ("qwen2", {"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e6}}, "ntk"),
        ("qwen2", {"hidden_act": "gelu"}, 'hidden_act to "gelu"'),
        ("gemma2", {"hidden_activation": "relu"}, 'hidden_activation to "relu"'),
        ("llama", {"rope_scaling": LINEAR_IN_PART}, "partial_rotary_factor to 0.5"),
        ("llama", {"rope_traditional": True}, "rope_traditional"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ("phi3", {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "short_factor"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ("smollm3", {"no_rope_layers": [1] * 9}, "no_rope_layers has 9 .*; take an unchanged"),
        ("llama", {"hidden_size": "64"}, "not valid"),
    ],
)
def test_what_is_not_supported_is_named(family, change, named):
    with pytest.raises(MespError, match=named):
        Architecture.from_config({**FAMILIES.get(family, {}), **change})


def test_layers_with_experts():
    lfm2 = Architecture.from_config({**FAMILIES["lfm2_moe"], "use_expert_bias": False})
    assert [bool(block.mlp.experts) for block in lfm2.blocks] == [False, True]
    assert list(lfm2.blocks[1].modules) == [f"self_attn.{n}_proj" for n in ("q", "k", "v", "out")]
    assert lfm2.blocks[1].vectors() == {}
    config = {**FAMILIES["qwen3_moe"], "num_hidden_layers": 6, "mlp_only_layers": [3]}
    qwen3 = Architecture.from_config(config | {"decoder_sparse_step": 2})
    assert [bool(block.mlp.experts) for block in qwen3.blocks] == [
        False, True, False, False, False, True,
    ]  # fmt: skip


def test_granite_4_turns_as_transformers_has_it():
    """Granite 4 has RoPE only if `position_embedding_type` is "rope". transformers 5 renames the
    layer types.
    """
    config = FAMILIES["granitemoehybrid"]
    arch = Architecture.from_config(config)
    assert len(arch.mixers[0].frequencies) == 8
    renamed = {**config, "layer_types": ["full_attention"] * 2}
    assert Architecture.from_config(renamed) == arch
    for kind in (None, "nope"):
        still = Architecture.from_config({**config, "position_embedding_type": kind})
        assert still.mixers[0].frequencies == ()
    mamba = FAMILIES["granite-mamba"]
    renamed = {**mamba, "layer_types": ["linear_attention", "full_attention"]}
    assert Architecture.from_config(renamed) == Architecture.from_config(mamba)
    said = {"time_step_limit": [0.0, math.inf], "mamba_d_head": "auto", "mamba_expand": 2}
    assert Architecture.from_config(mamba | said) == Architecture.from_config(mamba)
    wide = {**config, "intermediate_size": 7, "shared_intermediate_size": 96}
    assert Architecture.from_config(wide).mlps[0].intermediate_size == 96


@pytest.mark.parametrize(
    ("name", "key", "other"),
    [
        ("qwen3_5", "full_attention_interval", "linear_attention"),
        ("gemma3", "sliding_window_pattern", "sliding_attention"),
    ],
)
def test_mlx_lm_is_told_the_period_of_layer_types(name, key, other):
    config = {k: v for k, v in FAMILIES[name].items() if k != key}
    periodic = config | {"layer_types": [other, "full_attention"]}
    assert for_mlx_lm(complete(periodic), 8)[key] == 2
    assert Architecture.from_config(periodic) == Architecture.from_config(FAMILIES[name])
    other_order = config | {"layer_types": ["full_attention", other]}
    assert len(Architecture.from_config(other_order).mixers) == 2
    with pytest.raises(MespError, match="mlx-lm ignores the layer_types and would compute another"):
        for_mlx_lm(complete(other_order), 8)
