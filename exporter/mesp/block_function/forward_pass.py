"""The forward pass of a block; exported as ``block.T.mlxfn``.

    f(x, lora, scale, weights) -> [y, mixer_in, q, k, v, attn_out, x_mid, gate, up]

With post norms there are two more outputs, ``mixer_out`` and ``mlp_out``, which are the inputs of
the post norms. Mixers other than attention return four other arrays in place of q, k, v and
attn_out.

A block of a model with per-layer embeddings has one more input, ``per_layer``. An attention block
that shares another block's keys and values takes them as two more inputs, and returns them as k and
v.

The function for packed records takes one more array, ``starts``: the position at which each token's
record begins. For a token, attention sees no key before that position, a convolution takes the
inputs before that position as zeros, and a recurrent mixer begins there with a state of zeros.

The function for a GPU has fused primitives, `quantized_matmul` and tiles, and computes in bfloat16.

The plain function, ``block.plain.T.mlxfn``, consists of differentiable operations, which every
processor has, and computes in float32. Weights are dequantized before they are multiplied, because
`quantized_matmul` is about 50 times slower on a CPU.

Results between the outputs are float32, except that a norm multiplies by its weight in the dtype of
its input, and that `quantized_matmul` rounds its product to the dtype of `x`.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import mlx.core as mx

from mesp.block_function.attention import mix_by_attention
from mesp.block_function.convolution import mix_by_short_convolution
from mesp.block_function.experts import mix_by_experts
from mesp.block_function.gated_delta_net import mix_by_gated_delta_net
from mesp.block_function.mamba2 import mix_by_mamba2
from mesp.block_function.mlp import ACTIVATIONS, mlp_by_tokens, plain_mlp
from mesp.block_function.parts import Parts
from mesp.block_function.projection import projections
from mesp.models.architecture import Block
from mesp.models.layout import Layout
from mesp.models.mixers import AttentionMixer, GatedDeltaNet, Mamba2Mixer, ShortConvolution

BlockFunction = Callable[..., list[mx.array]]

MIX = {
    AttentionMixer: mix_by_attention,
    GatedDeltaNet: mix_by_gated_delta_net,
    ShortConvolution: mix_by_short_convolution,
    Mamba2Mixer: mix_by_mamba2,
}


def block_function(block: Block, layout: Layout, fast: ModuleType | None = None) -> BlockFunction:
    """Returns the block function with the fused primitives of `fast`.

    The function takes x [1, T, hidden], the flat LoRA matrices as float32, scale [] float32,
    weights [layout.words] uint32, the inputs whose shapes `Block.given_shapes` returns and, for
    packed records, starts [T] int32.
    """

    def function(x, lora, scale, weights, *more):
        arrays, more = layout.unpack(weights), list(more)
        p = projections(block, layout, arrays, lora, scale, x.dtype if fast else None)
        per_layer = more.pop(0) if block.arch.per_layer else None
        shared = (more.pop(0), more.pop(0)) if block.keys_of is not None else None
        starts = more.pop(0) if more else None
        eps = block.arch.rms_norm_eps
        parts = Parts(p, arrays, eps, x.dtype, fast, starts, per_layer, shared)
        return forward(block, parts, x)

    return function


def forward(block: Block, parts: Parts, x: mx.array) -> list[mx.array]:
    arch, mixer, p, norm, dtype = block.arch, block.mixer, parts.p, parts.norm, parts.dtype
    mix, act = MIX[type(mixer)], ACTIVATIONS[arch.hidden_act]
    mlp = plain_mlp if parts.plain else mlp_by_tokens

    mixer_in = norm("input_layernorm", x)
    of_mixer, out_in = mix(mixer, parts, mixer_in)
    result = of_mixer[-1]
    if arch.post_norms:
        mixer_out = parts.project(mixer.out, out_in, result).astype(dtype)
        x_mid = x + norm("post_attention_layernorm", mixer_out.astype(mx.float32))
    else:
        x_mid = parts.project(mixer.out, out_in, result, plus=x)
    x_mid = x_mid.astype(dtype)

    mlp_in = norm(arch.mlp_norm, x_mid)
    plus = None if arch.post_norms else x_mid
    experts = block.mlp.experts
    if experts:
        mixture = mix_by_experts(experts, parts, mlp_in, act)
        plus = mixture if plus is None else plus + mixture
    if experts and experts.mlp_gate:
        out, gate, up = mlp(mlp_in, p["gate"], p["up"], p["down"], act, None)
        y = plus + mx.sigmoid(p[experts.mlp_gate](mlp_in)) * out
    elif block.mlp.modules:
        y, gate, up = mlp(mlp_in, p["gate"], p["up"], p["down"], act, plus)
    else:
        assert plus is not None
        y, gate, up = plus, *([mx.zeros((*x.shape[:2], 0))] * 2)
    outputs = [mixer_in, *of_mixer, x_mid, gate, up]
    if arch.post_norms:
        mlp_out = y.astype(dtype)
        y = x_mid + norm("post_feedforward_layernorm", mlp_out.astype(mx.float32))
        outputs += [mixer_out, mlp_out]
    if parts.per_layer is not None:
        gate = act(parts.project("ple_gate", y)) * parts.per_layer.astype(mx.float32)
        out = parts.project("ple_out", gate)
        y = (y + norm("post_per_layer_input_norm", out)) * parts.vector("layer_scalar")
    return [a.astype(dtype) for a in (y, *outputs)]
