from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import (
    BaseModelArgs,
    create_attention_mask,
    create_ssm_mask,
    scaled_dot_product_attention,
)
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache
from mlx_lm.models.lfm2 import MLP, ShortConv
from mlx_lm.models.rope_utils import ProportionalRoPE


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_types: list[str]
    conv_L_cache: int
    sliding_window: int
    norm_eps: float
    conv_bias: bool = False
    rope_parameters: dict[str, dict[str, Any]] | None = None
    rope_theta: float = 0.0
    rope_local_base_freq: float = 0.0
    partial_rotary_factor: float = 0.0

    def __post_init__(self):
        if self.rope_parameters:
            full = self.rope_parameters["full_attention"]
            self.rope_theta = full["rope_theta"]
            self.partial_rotary_factor = full["partial_rotary_factor"]
            self.rope_local_base_freq = self.rope_parameters["sliding_attention"]["rope_theta"]


class Attention(nn.Module):
    def __init__(self, args: ModelArgs, slides: bool):
        super().__init__()
        dim, size = args.hidden_size, args.head_dim
        self.n_heads, self.n_kv_heads = args.num_attention_heads, args.num_key_value_heads
        self.scale = size**-0.5
        self.q_proj = nn.Linear(dim, self.n_heads * size, bias=False)
        self.k_proj = nn.Linear(dim, self.n_kv_heads * size, bias=False)
        self.v_proj = nn.Linear(dim, self.n_kv_heads * size, bias=False)
        self.g_proj = nn.Linear(dim, self.n_heads, bias=False)
        self.o_proj = nn.Linear(self.n_heads * size, dim, bias=False)
        self.q_norm = nn.RMSNorm(size, eps=args.norm_eps)
        self.k_norm = nn.RMSNorm(size, eps=args.norm_eps)
        if slides:
            self.rope = nn.RoPE(size, base=args.rope_local_base_freq)
        else:
            rotated = int(size * args.partial_rotary_factor)
            self.rope = ProportionalRoPE(size, rotated, base=args.rope_theta)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        B, L, _ = x.shape
        q = self.q_norm(self.q_proj(x).reshape(B, L, self.n_heads, -1)).swapaxes(1, 2)
        k = self.k_norm(self.k_proj(x).reshape(B, L, self.n_kv_heads, -1)).swapaxes(1, 2)
        v = self.v_proj(x).reshape(B, L, self.n_kv_heads, -1).swapaxes(1, 2)
        offset = cache.offset if cache is not None else 0
        q, k = self.rope(q, offset=offset), self.rope(k, offset=offset)
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        out = scaled_dot_product_attention(q, k, v, cache=cache, mask=mask, scale=self.scale)
        out = out.swapaxes(1, 2) * mx.sigmoid(self.g_proj(x))[..., None]
        return self.o_proj(out.reshape(B, L, -1))


class DecoderLayer(nn.Module):
    def __init__(self, args: ModelArgs, kind: str):
        super().__init__()
        self.kind = kind
        if kind == "conv":
            self.conv = ShortConv(args, 0)
        else:
            self.self_attn = Attention(args, kind == "sliding_attention")
        self.feed_forward = MLP(args.hidden_size, args.intermediate_size, 1, False, None)
        for name in ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"):
            setattr(self, name, nn.RMSNorm(args.hidden_size, eps=args.norm_eps))

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        mixer = self.conv if self.kind == "conv" else self.self_attn
        h = x + self.post_operator_norm(mixer(self.operator_norm(x), mask=mask, cache=cache))
        return h + self.post_ffn_norm(self.feed_forward(self.ffn_norm(h)))


class Lfm3Model(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.window = args.sliding_window
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, kind) for kind in args.layer_types]
        self.embedding_norm = nn.RMSNorm(args.hidden_size, eps=args.norm_eps)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        h = self.embed_tokens(inputs)
        for layer, each in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            if layer.kind == "conv":
                mask = create_ssm_mask(h, each)
            else:
                window = self.window if layer.kind == "sliding_attention" else None
                mask = create_attention_mask(h, each, window_size=window)
            h = layer(h, mask, cache=each)
        return self.embedding_norm(h)


class Model(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args, self.model_type = args, args.model_type
        self.model = Lfm3Model(args)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        return self.model.embed_tokens.as_linear(self.model(inputs, cache))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        found = {}
        for name, array in weights.items():
            if name.endswith("conv.conv.weight") and array.shape[-1] > array.shape[1]:
                array = array.swapaxes(1, 2)
            found[name.replace("self_attn.gate_proj", "self_attn.g_proj")] = array
        return found

    @property
    def layers(self) -> list[DecoderLayer]:
        return self.model.layers

    def make_cache(self) -> list:
        window = self.args.sliding_window
        caches = {"conv": lambda: ArraysCache(size=1), "full_attention": KVCache}
        caches["sliding_attention"] = lambda: RotatingKVCache(max_size=window)
        return [caches[layer.kind]() for layer in self.layers]
