"""The forward pass of a block as the trainer runs it; exported as ``block.T.mlxfn``.

    f(x, lora, scale, weights) -> [y, attn_in, q, k, v, attn_out, x_mid, gate, up]

and with post norms two more, ``o_out`` and ``mlp_out``, which those take.

MLX is lazy: evaluating only ``y`` computes, and holds, only what ``y`` needs. To keep that small
the work is cut into tiles, each made to wait for the one before by `mx.depends`; otherwise MLX
would be free to unpack every tile's weights first. On the CPU a tile's weights are dequantized and
multiplied, as `quantized_matmul` is some 50 times slower there. On the GPU `quantized_matmul` and
the fused attention make no large arrays, and only the MLP is cut, by tokens, and attention where
the fused one is not (it lacks the soft cap, and heads of other sizes than `FUSED_HEADS`).

The twin for MeBP, ``block.plain.T.mlxfn``, is the same in plain, differentiable operations, uncut.

Arithmetic between these arrays is float32 (the GPU's fused primitives accumulate in it).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import mlx.core as mx

from mesp.block_function.attention import Scoring, attention, fused_attention, plain_attention
from mesp.block_function.mlp import ACTIVATIONS, mlp_by_tokens, plain_mlp, tiled_mlp
from mesp.block_function.projection import Projection, projections
from mesp.block_function.rope import fast_rope, rope
from mesp.bundle.layout import Layout
from mesp.models.architecture import Architecture
from mesp.models.attention_kinds import Attention

# The head_dim that MLX's fused attention has a kernel for on Metal; for others it holds all scores,
# heads·T·T of them, rounded to the dtype.
FUSED_HEADS = (64, 80, 128)

BlockFunction = Callable[[mx.array, mx.array, mx.array, mx.array], list[mx.array]]


def block_function(
    arch: Architecture, kind: Attention, layout: Layout, device: str, plain: bool = False,
    fast: ModuleType = mx.fast,
) -> BlockFunction:  # fmt: skip
    """The block function for `device` ("cpu" or "gpu"), or its plain twin.

    It takes x [1, T, hidden], lora [P] float32, scale [] float32 and weights [layout.words] uint32;
    T, the LoRA rank and the dtype (x's) are read off the arguments. docs/architecture.md has the
    outputs' shapes. The fused primitives are those of `fast`: `mx.fast`, which has plain operations
    in their place on a CPU, or `mesp.block_function.fused`, which can only be traced there.
    """
    act = ACTIVATIONS[arch.hidden_act]
    fused = device == "gpu" and arch.head_dim in FUSED_HEADS and not arch.attn_logit_softcapping
    attend = partial(fused_attention, fast) if fused else attention
    attend = plain_attention if plain else attend
    apply = Projection.__call__ if plain or device == "gpu" else Projection.by_rows
    mlp = plain_mlp if plain else mlp_by_tokens if device == "gpu" else tiled_mlp

    def function(x, lora, scale, weights):
        dtype = x.dtype
        arrays = layout.unpack(weights)
        p = projections(arch, layout, arrays, lora, scale, device, dtype)
        window = kind.within(x.shape[1]).sliding_window
        scoring = Scoring(arch.attention_scale, arch.attn_logit_softcapping, window)

        def norm(name: str, x: mx.array) -> mx.array:
            function = rms_norm if plain else fast.rms_norm
            return function(x, arrays[name + ".weight"], arch.rms_norm_eps)

        def heads(x: mx.array) -> mx.array:  # [1, T, n·head_dim] -> [1, n, T, head_dim]
            return x.reshape(1, x.shape[1], -1, arch.head_dim).swapaxes(1, 2).astype(dtype)

        everywhere = slice(0, x.shape[1])
        turn = fast_rope(kind, fast) if device == "gpu" and not plain else rope(kind, everywhere)

        def place(name: str, x: mx.array, rows: slice = everywhere) -> mx.array:
            """What attention takes of some rows of q or k."""
            x = x.astype(mx.float32)
            return turn(norm(f"self_attn.{name}_norm", x) if arch.qk_norm else x, rows)

        def after(done: mx.array, name: str) -> Projection:  # the twin's order is MLX's
            return p[name] if plain else p[name].after(done)

        attn_in = norm("input_layernorm", x)
        q = heads(apply(p["q"], attn_in))
        k = heads(apply(after(q, "k"), attn_in))
        v = heads(apply(after(k, "v"), attn_in))
        attn_out = attend(q, place("k", k), v, partial(place, "q"), scoring).astype(dtype)
        o = after(attn_out, "o")
        if arch.post_norms:
            o_out = apply(o, attn_out).astype(dtype)
            x_mid = x + norm("post_attention_layernorm", o_out.astype(mx.float32))
        else:
            x_mid = apply(o, attn_out, x)
        x_mid = x_mid.astype(dtype)

        mlp_in = norm(arch.mlp_norm, x_mid)
        plus = None if arch.post_norms else x_mid
        y, gate, up = mlp(mlp_in, p["gate"], p["up"], p["down"], act, plus)
        outputs = [attn_in, q, k, v, attn_out, x_mid, gate, up]
        if arch.post_norms:
            mlp_out = y.astype(dtype)
            y = x_mid + norm("post_feedforward_layernorm", mlp_out.astype(mx.float32))
            outputs += [o_out, mlp_out]
        return [a.astype(dtype) for a in (y, *outputs)]

    return function


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """`mx.fast.rms_norm` in plain operations: computed in float32, x's dtype."""
    wide = x.astype(mx.float32)
    wide = wide * mx.rsqrt(mx.mean(mx.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight
