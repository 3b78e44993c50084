from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import Any


def _config(
    model_type: str, hidden: int, layers: int, intermediate: int, heads: int, kv_heads: int,
    **others: Any,
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers,
        "intermediate_size": intermediate, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, **others,
    }  # fmt: skip


_qwen25 = partial(
    _config, "qwen2", vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1e6,
    tie_word_embeddings=True, hidden_act="silu",
)  # fmt: skip
_qwen3 = partial(
    _config, "qwen3", head_dim=128, vocab_size=151936, max_position_embeddings=40960,
    rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=True, hidden_act="silu",
)  # fmt: skip
_llama32 = partial(
    _config, "llama", vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5,
    rope_theta=5e5, tie_word_embeddings=True, hidden_act="silu",
    rope_scaling={
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
)  # fmt: skip
_llama31 = partial(
    _llama32, tie_word_embeddings=False,
    rope_scaling={**_llama32.keywords["rope_scaling"], "factor": 8.0},
)  # fmt: skip
_smollm2 = partial(
    _config, "llama", vocab_size=49152, max_position_embeddings=8192, rms_norm_eps=1e-5,
    rope_scaling=None, tie_word_embeddings=True, hidden_act="silu",
)  # fmt: skip
_smollm3 = partial(
    _config, "smollm3", vocab_size=128256, max_position_embeddings=65536, rms_norm_eps=1e-6,
    rope_theta=5e6, rope_scaling=None, no_rope_layers=[1, 1, 1, 0] * 9, use_sliding_window=False,
    sliding_window=None, tie_word_embeddings=True, hidden_act="silu",
)  # fmt: skip
_gemma3 = partial(
    _config, "gemma3_text", head_dim=256, vocab_size=262144, max_position_embeddings=32768,
    rms_norm_eps=1e-6, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None,
    sliding_window=512, query_pre_attn_scalar=256, attn_logit_softcapping=None,
    final_logit_softcapping=None, hidden_activation="gelu_pytorch_tanh",
)  # fmt: skip
_gemma2 = partial(
    _config, "gemma2", head_dim=256, vocab_size=256000, max_position_embeddings=8192,
    rms_norm_eps=1e-6, rope_theta=1e4, sliding_window=4096, query_pre_attn_scalar=256,
    attn_logit_softcapping=50.0, final_logit_softcapping=30.0, hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
)  # fmt: skip
_phi3 = partial(
    _config, "phi3", rms_norm_eps=1e-5, rope_theta=1e4, original_max_position_embeddings=4096,
    hidden_act="silu",
)  # fmt: skip
_granite = partial(
    _config, "granite", vocab_size=49159, max_position_embeddings=131072, rms_norm_eps=1e-5,
    rope_theta=1e7, rope_scaling=None, embedding_multiplier=12.0, residual_multiplier=0.22,
    attention_bias=False, mlp_bias=False, tie_word_embeddings=True, hidden_act="silu",
)  # fmt: skip


def _granite4h(
    hidden: int, layers: int, intermediate: int, attention: tuple[int, ...], **others: float
) -> dict[str, Any]:
    types = ["attention" if i in attention else "mamba" for i in range(layers)]
    experts = {"num_local_experts": 0, "num_experts_per_tok": 0}
    return _config(
        "granitemoehybrid", hidden, layers, intermediate, 12, 4, layer_types=types,
        position_embedding_type="nope", rope_theta=1e4, vocab_size=100352, rms_norm_eps=1e-5,
        max_position_embeddings=32768, embedding_multiplier=12.0, attention_bias=False,
        mamba_n_heads=48, mamba_d_head=hidden // 24, mamba_d_state=128, mamba_n_groups=1,
        mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True, mamba_proj_bias=False,
        tie_word_embeddings=True, hidden_act="silu",
        **{"shared_intermediate_size": intermediate, **experts, **others},
    )  # fmt: skip


_mistral = partial(
    _config, "mistral", vocab_size=32768, max_position_embeddings=32768, rms_norm_eps=1e-5,
    rope_theta=1e6, sliding_window=None, tie_word_embeddings=False, hidden_act="silu",
)  # fmt: skip


def _ministral3(*sizes: int, is_tied: bool) -> dict[str, Any]:
    text = _config(
        "ministral3", *sizes, head_dim=128, vocab_size=131072, max_position_embeddings=262144,
        rms_norm_eps=1e-5, sliding_window=None, hidden_act="silu",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0,
            "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    )  # fmt: skip
    return {"model_type": "mistral3", "text_config": text, "tie_word_embeddings": is_tied}


_qwen35 = partial(
    _config, "qwen3_5", head_dim=256, vocab_size=248320, max_position_embeddings=262144,
    rms_norm_eps=1e-6, rope_theta=1e7, partial_rotary_factor=0.25, full_attention_interval=4,
    linear_num_key_heads=16, linear_key_head_dim=128, linear_value_head_dim=128,
    linear_conv_kernel_dim=4, tie_word_embeddings=True, hidden_act="silu",
)  # fmt: skip

_QWEN3_MOE = {
    **_qwen3(2048, 48, 6144, 32, 4, tie_word_embeddings=False),
    "model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [],
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}  # fmt: skip
_QWEN35_MOE = {
    **_qwen35(2048, 40, 0, 16, 2, linear_num_value_heads=32),
    "model_type": "qwen3_5_moe", "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}  # fmt: skip


def _lfm2_moe(vocab_size: int, rope_theta: float) -> dict[str, Any]:
    attention = (2, 6, 10, 14, 18, 21)
    types = ["full_attention" if i in attention else "conv" for i in range(24)]
    return _config(
        "lfm2_moe", 2048, 24, 7168, 32, 8, vocab_size=vocab_size, max_position_embeddings=128000,
        norm_eps=1e-5, conv_bias=False, conv_L_cache=3, rope_theta=rope_theta, layer_types=types,
        num_dense_layers=2, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=1792,
        norm_topk_prob=True, use_expert_bias=True, routed_scaling_factor=1.0,
        tie_word_embeddings=True,
    )  # fmt: skip


def _lfm2(hidden: int, block_ff_dim: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "lfm2", "hidden_size": hidden, "block_dim": hidden, "num_hidden_layers": 16,
        "block_ff_dim": block_ff_dim, "block_auto_adjust_ff_dim": True, "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0, "num_attention_heads": heads, "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3, "conv_bias": False,
        "vocab_size": 65536, "max_position_embeddings": 128000, "norm_eps": 1e-5,
        "rope_theta": 1e6, "tie_embedding": True,
    }  # fmt: skip


_LFM3 = _config(
    "lfm3", 2048, 24, 7680, 16, 4, head_dim=128, conv_L_cache=7,
    layer_types=["conv", "conv", "full_attention", "conv"]
    + ["sliding_attention", "conv", "full_attention", "conv"] * 5,
    conv_bias=False, sliding_window=256, vocab_size=128000, norm_eps=1e-5,
    max_position_embeddings=128000, tie_word_embeddings=True,
    rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            "rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5,
        },
    },
)  # fmt: skip


def _gemma4(
    hidden: int, layers: int, kv_heads: int, intermediate: int, pattern: int, shared: int,
    is_wide: bool,
) -> dict[str, Any]:  # fmt: skip
    kinds = ["sliding_attention"] * (pattern - 1) + ["full_attention"]
    text = _config(
        "gemma4_text", hidden, layers, intermediate, 8, kv_heads, head_dim=256, global_head_dim=512,
        layer_types=[kinds[i % pattern] for i in range(layers)], sliding_window=512,
        num_kv_shared_layers=shared, use_double_wide_mlp=is_wide,
        hidden_size_per_layer_input=256, vocab_size_per_layer_input=262144, vocab_size=262144,
        max_position_embeddings=131072, rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh",
        final_logit_softcapping=30.0, tie_word_embeddings=True,
        rope_parameters={
            "full_attention": {
                "rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )  # fmt: skip
    return {"model_type": "gemma4", "text_config": text}


_PHI4_LONG_FACTOR = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649,
    2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845,
    5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158,
    11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105,
    25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71,
    32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip
_PHI4_ROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": _PHI4_LONG_FACTOR}


def _named(*repos: str) -> dict[str, str]:
    return {repo.split("/")[1]: repo for repo in repos}


def _tuned(repo: str, suffix: str = "-Instruct", name: str | None = None) -> dict[str, str]:
    name = name or repo.split("/")[1]
    return {name: repo, name + suffix: repo + suffix}


# Qwen2.5 models of 7B and more have another vocabulary size than smaller ones, and a separate head.
_UNTIED = {"vocab_size": 152064, "tie_word_embeddings": False}

# (short names and ids on the Hugging Face Hub, licence, config.json that these models share)
_MODELS = (
    (_tuned("Qwen/Qwen2.5-0.5B"), "apache-2.0", _qwen25(896, 24, 4864, 14, 2)),
    (_tuned("Qwen/Qwen2.5-1.5B"), "apache-2.0", _qwen25(1536, 28, 8960, 12, 2)),
    (_tuned("Qwen/Qwen2.5-3B"), "qwen-research", _qwen25(2048, 36, 11008, 16, 2)),
    (_tuned("Qwen/Qwen2.5-7B"), "apache-2.0", _qwen25(3584, 28, 18944, 28, 4, **_UNTIED)),
    (_tuned("Qwen/Qwen2.5-14B"), "apache-2.0", _qwen25(5120, 48, 13824, 40, 8, **_UNTIED)),
    (_tuned("Qwen/Qwen2.5-32B"), "apache-2.0", _qwen25(5120, 64, 27648, 40, 8, **_UNTIED)),
    (_named("Qwen/Qwen3-0.6B"), "apache-2.0", _qwen3(1024, 28, 3072, 16, 8)),
    (_named("Qwen/Qwen3-1.7B"), "apache-2.0", _qwen3(2048, 28, 6144, 16, 8)),
    (_named("Qwen/Qwen3-4B"), "apache-2.0", _qwen3(2560, 36, 9728, 32, 8)),
    (_named("Qwen/Qwen3-8B"), "apache-2.0",
     _qwen3(4096, 36, 12288, 32, 8, tie_word_embeddings=False)),
    (_named("Qwen/Qwen3-14B"), "apache-2.0",
     _qwen3(5120, 40, 17408, 40, 8, tie_word_embeddings=False)),
    (_tuned("Qwen/Qwen3-30B-A3B", "-Base"), "apache-2.0", _QWEN3_MOE),
    (_tuned("Qwen/Qwen3.5-0.8B", "-Base"), "apache-2.0",
     _qwen35(1024, 24, 3584, 8, 2, linear_num_value_heads=16)),
    (_tuned("Qwen/Qwen3.5-2B", "-Base"), "apache-2.0",
     _qwen35(2048, 24, 6144, 8, 2, linear_num_value_heads=16)),
    (_tuned("Qwen/Qwen3.5-4B", "-Base"), "apache-2.0",
     _qwen35(2560, 32, 9216, 16, 4, linear_num_value_heads=32)),
    (_tuned("Qwen/Qwen3.5-35B-A3B", "-Base"), "apache-2.0", _QWEN35_MOE),
    (_named("LiquidAI/LFM2-350M", "LiquidAI/LFM2.5-350M"), "lfm1.0", _lfm2(1024, 6656, 16)),
    (_named("LiquidAI/LFM2-700M"), "lfm1.0", _lfm2(1536, 10240, 24)),
    (_named("LiquidAI/LFM2-1.2B") | {"LFM2.5-1.2B": "LiquidAI/LFM2.5-1.2B-Base"}
     | _named("LiquidAI/LFM2.5-1.2B-Instruct"), "lfm1.0", _lfm2(2048, 12288, 32)),
    (_named("LiquidAI/LFM2-8B-A1B"), "lfm1.0", _lfm2_moe(65536, 1e6)),
    (_tuned("LiquidAI/LFM2.5-8B-A1B", "-Base"), "lfm1.0", _lfm2_moe(128000, 5e6)),
    (_named("LiquidAI/LFM3-1.7B-Base", "LiquidAI/LFM3-1.7B"), "lfm1.0", _LFM3),
    (_tuned("meta-llama/Llama-3.2-1B"), "llama3.2", _llama32(2048, 16, 8192, 32, 8, head_dim=64)),
    (_tuned("meta-llama/Llama-3.2-3B"), "llama3.2", _llama32(3072, 28, 8192, 24, 8, head_dim=128)),
    (_tuned("meta-llama/Llama-3.1-8B"), "llama3.1", _llama31(4096, 32, 14336, 32, 8)),
    (_tuned("HuggingFaceTB/SmolLM2-135M"), "apache-2.0",
     _smollm2(576, 30, 1536, 9, 3, rope_theta=1e5)),
    (_tuned("HuggingFaceTB/SmolLM2-360M"), "apache-2.0",
     _smollm2(960, 32, 2560, 15, 5, rope_theta=1e5)),
    (_tuned("HuggingFaceTB/SmolLM2-1.7B"), "apache-2.0",
     _smollm2(2048, 24, 8192, 32, 32, rope_theta=1.3e5)),
    (_named("HuggingFaceTB/SmolLM3-3B"), "apache-2.0", _smollm3(2048, 36, 11008, 16, 4)),
    (_tuned("google/gemma-3-270m", "-it", "Gemma-3-270m"), "gemma",
     _gemma3(640, 18, 2048, 4, 1,
             layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3)),
    ({"Gemma-3-1B": "google/gemma-3-1b-pt", "Gemma-3-1B-it": "google/gemma-3-1b-it"}, "gemma",
     _gemma3(1152, 26, 6912, 4, 1, sliding_window_pattern=6)),
    ({"Gemma-3-4B": "google/gemma-3-4b-pt", "Gemma-3-4B-it": "google/gemma-3-4b-it"}, "gemma",
     {"model_type": "gemma3", "text_config": _gemma3(
         2560, 34, 10240, 8, 4, vocab_size=262208, max_position_embeddings=131072,
         sliding_window=1024, rope_scaling={"rope_type": "linear", "factor": 8.0})}),
    (_tuned("google/gemma-4-E2B", "-it", "Gemma-4-E2B"), "apache-2.0",
     _gemma4(1536, 35, 1, 6144, 5, 20, True)),
    (_tuned("google/gemma-4-E4B", "-it", "Gemma-4-E4B"), "apache-2.0",
     _gemma4(2560, 42, 2, 10240, 6, 18, False)),
    (_tuned("google/gemma-2-2b", "-it", "Gemma-2-2B"), "gemma", _gemma2(2304, 26, 9216, 8, 4)),
    (_tuned("google/gemma-2-9b", "-it", "Gemma-2-9B"), "gemma", _gemma2(3584, 42, 14336, 16, 8)),
    ({"Granite-3.3-2B": "ibm-granite/granite-3.3-2b-base",
      "Granite-3.3-2B-Instruct": "ibm-granite/granite-3.3-2b-instruct"}, "apache-2.0",
     _granite(2048, 40, 8192, 32, 8, attention_multiplier=0.015625, logits_scaling=8.0)),
    ({"Granite-3.3-8B": "ibm-granite/granite-3.3-8b-base",
      "Granite-3.3-8B-Instruct": "ibm-granite/granite-3.3-8b-instruct"}, "apache-2.0",
     _granite(4096, 40, 12800, 32, 8, attention_multiplier=0.0078125, logits_scaling=16.0)),
    ({"Granite-4.0-H-350M-Base": "ibm-granite/granite-4.0-h-350m-base",
      "Granite-4.0-H-350M": "ibm-granite/granite-4.0-h-350m"}, "apache-2.0",
     _granite4h(768, 32, 2048, (10, 13, 17, 27), attention_multiplier=0.015625,
                residual_multiplier=0.246, logits_scaling=3.0)),
    ({"Granite-4.0-H-1B-Base": "ibm-granite/granite-4.0-h-1b-base",
      "Granite-4.0-H-1B": "ibm-granite/granite-4.0-h-1b"}, "apache-2.0",
     _granite4h(1536, 40, 4096, (5, 15, 25, 35), attention_multiplier=0.0078125,
                residual_multiplier=0.22, logits_scaling=6.0)),
    ({"Granite-4.0-H-Tiny-Base": "ibm-granite/granite-4.0-h-tiny-base",
      "Granite-4.0-H-Tiny": "ibm-granite/granite-4.0-h-tiny"}, "apache-2.0",
     _granite4h(1536, 40, 512, (5, 15, 25, 35), shared_intermediate_size=1024,
                num_local_experts=64, num_experts_per_tok=6, attention_multiplier=0.0078125,
                residual_multiplier=0.22, logits_scaling=6.0)),
    (_named("microsoft/Phi-3-mini-4k-instruct"), "mit",
     _phi3(3072, 32, 8192, 32, 32, vocab_size=32064, max_position_embeddings=4096,
           rope_scaling=None, sliding_window=2047, tie_word_embeddings=False)),
    (_named("microsoft/Phi-4-mini-instruct"), "mit",
     _phi3(3072, 32, 8192, 24, 8, vocab_size=200064, max_position_embeddings=131072,
           rope_scaling=_PHI4_ROPE, partial_rotary_factor=0.75, sliding_window=262144,
           tie_word_embeddings=True)),
    ({"Phi-4": "microsoft/phi-4"}, "mit",
     _phi3(5120, 40, 17920, 40, 10, vocab_size=100352, max_position_embeddings=16384,
           rope_theta=250000, rope_scaling=None, sliding_window=None, tie_word_embeddings=False)),
    ({"Ministral-3-3B": "mistralai/Ministral-3-3B-Base-2512",
      "Ministral-3-3B-Instruct": "mistralai/Ministral-3-3B-Instruct-2512-BF16"}, "apache-2.0",
     _ministral3(3072, 26, 9216, 32, 8, is_tied=True)),
    ({"Ministral-3-8B": "mistralai/Ministral-3-8B-Base-2512",
      "Ministral-3-8B-Instruct": "mistralai/Ministral-3-8B-Instruct-2512-BF16"}, "apache-2.0",
     _ministral3(4096, 34, 14336, 32, 8, is_tied=False)),
    (_named("mistralai/Mistral-7B-v0.3", "mistralai/Mistral-7B-Instruct-v0.3"), "apache-2.0",
     _mistral(4096, 32, 14336, 32, 8)),
)  # fmt: skip

# Short name -> (id on the Hub, licence, config.json). Models of one geometry are adjacent and share
# one config.json object.
KNOWN: dict[str, tuple[str, str, dict[str, Any]]] = {
    name: (repo, license, config)
    for repos, license, config in _MODELS
    for name, repo in repos.items()
}


def geometries() -> list[list[str]]:
    return [list(names) for _, names in groupby(KNOWN, key=lambda name: id(KNOWN[name][2]))]
