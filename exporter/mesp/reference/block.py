from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx

from mesp.models.architecture import Block
from mesp.models.mixers import AttentionMixer, GatedDeltaNet, Mamba2Mixer, ShortConvolution
from mesp.reference.attention import (
    Shared,
    keys_and_values,
    mix_by_attention,
    mix_by_attention_backward,
    output_of_attention,
)
from mesp.reference.dropout import Masks
from mesp.reference.experts import (
    Mixture,
    mix_by_experts,
    mix_by_experts_backward,
    weigh_mlp,
    weigh_mlp_backward,
)
from mesp.reference.gated_delta_net import (
    mix_by_gated_delta_net,
    mix_by_gated_delta_net_backward,
    output_of_gated_delta_net,
)
from mesp.reference.mamba2 import mix_by_mamba2, mix_by_mamba2_backward, output_of_mamba2
from mesp.reference.model import Parts, Stored, Weights, experts_lora, fuse, pack_lora
from mesp.reference.per_layer import add_per_layer, add_per_layer_backward
from mesp.reference.pieces import (
    gated,
    gated_backward,
    linear,
    linear_backward,
    linears_backward,
    rms_norm,
    rms_norm_backward,
)
from mesp.reference.short_convolution import (
    mix_by_short_convolution,
    mix_by_short_convolution_backward,
    output_of_short_convolution,
)

# For each mixer, the names of its intermediates, and three functions: the intermediates, the output
# projection's input, which follows from them, and the backward pass of both.
MIXERS = {
    AttentionMixer: (
        ("q", "k", "v", "attn_out"),
        mix_by_attention,
        output_of_attention,
        mix_by_attention_backward,
    ),
    GatedDeltaNet: (
        ("qkv", "z", "ba", "o"),
        mix_by_gated_delta_net,
        output_of_gated_delta_net,
        mix_by_gated_delta_net_backward,
    ),
    ShortConvolution: (
        ("b", "c", "u", "conv_out"),
        mix_by_short_convolution,
        output_of_short_convolution,
        mix_by_short_convolution_backward,
    ),
    Mamba2Mixer: (
        ("z", "xBC", "dt", "o"),
        mix_by_mamba2,
        output_of_mamba2,
        mix_by_mamba2_backward,
    ),
}


def intermediate_names(block: Block) -> tuple[str, ...]:
    of_mixer, *_ = MIXERS[type(block.mixer)]
    post_normed = ("mixer_out", "mlp_out") if block.arch.post_norms else ()
    return ("mixer_in", *of_mixer, "x_mid", "gate", "up", *post_normed)


def records(starts: Sequence[int], T: int) -> list[slice]:
    """Returns the slice of each record in a sequence of T tokens."""
    return [slice(*ends) for ends in pairwise([*starts, T])]


def rows(arrays: Sequence[mx.array], record: slice) -> list[mx.array]:
    return [array[..., record, :] for array in arrays]


def joined(of_records: Sequence[Sequence[mx.array]]) -> list[mx.array]:
    return [mx.concatenate(arrays, axis=-2) for arrays in zip(*of_records, strict=True)]


def mixture_of(
    weights: Weights, lora: mx.array, block: Block, scale: float, masks: Masks | None
) -> Mixture:
    matrices = experts_lora(lora, block)
    return Mixture(block.mlp.experts, block.arch.hidden_act, weights, matrices, scale, masks)


def block_forward(
    x: mx.array,
    lora: mx.array,
    scale: float,
    weights: Weights,
    block: Block,
    stored: Stored = lambda x: x,
    starts: Sequence[int] = (0,),
    per_layer: mx.array | None = None,
    shared: Shared | None = None,
    masks: Masks | None = None,
) -> list[mx.array]:
    """Returns y and the block's intermediates, which `intermediate_names` lists.

        x_mid = x + out(mix(RMSNorm(x)))
        y = x_mid + w down(act(gate) ∘ up) + experts

    w is the factor of `weigh_mlp`, or 1 if the block has no `mlp_gate`. With post-norms, the
    outputs of the mixer and the MLP are normed before they are added. In a block whose MLP has only
    experts, gate and up are empty. With `per_layer`, `add_per_layer` is applied to y.

    - `starts`: the first positions of the records of a packed sequence. The mixer runs on each
      record separately.
    - `per_layer`: p of `add_per_layer`, or None.
    - `shared`: the keys and values of another block, for a block that computes none.
    - `masks`: the masks of `Dropout.masks`, or None without dropout.
    - `stored`: a function that is applied to y and the intermediates, except gate and up.
    """
    parts = Parts.of(weights, lora, block, scale, masks, stored)
    (p, vector, eps, *_), arch = parts, block.arch

    mixer_in = stored(rms_norm(x, vector["input_layernorm.weight"], eps))
    _, mix, output, _ = MIXERS[type(block.mixer)]
    of_mixer = joined(
        [
            mix(
                mixer_in[:, record],
                parts.of_record(record),
                *([rows(shared, record)] if shared else []),
            )
            for record in records(starts, x.shape[1])
        ]
    )
    mixer_out = linear(output(of_mixer, parts), p[block.mixer.out])
    if arch.post_norms:
        mixer_out = stored(mixer_out)
        x_mid = stored(x + rms_norm(mixer_out, vector["post_attention_layernorm.weight"], eps))
    else:
        x_mid = stored(x + mixer_out)

    mlp_in = rms_norm(x_mid, vector[f"{arch.mlp_norm}.weight"], eps)
    if block.mlp.modules:
        gate, up = linear(mlp_in, p["gate"]), linear(mlp_in, p["up"])
        mlp_out = linear(gated(gate, up, arch.hidden_act), p["down"])
        mlp_out = weigh_mlp(mlp_in, mlp_out, weights, block.mlp)
    else:
        gate = up = mx.zeros((*mlp_in.shape[:2], 0))
        mlp_out = mx.zeros(mlp_in.shape)
    if block.mlp.experts:
        mixture = mixture_of(weights, lora, block, scale, masks)
        mlp_out = mlp_out + mix_by_experts(mlp_in, mixture)
    if not arch.post_norms:
        return [stored(x_mid + mlp_out), mixer_in, *of_mixer, x_mid, gate, up]
    mlp_out = stored(mlp_out)
    y = x_mid + rms_norm(mlp_out, vector["post_feedforward_layernorm.weight"], eps)
    if per_layer is not None:
        y = add_per_layer(y, per_layer, parts, arch.hidden_act)
    return [stored(y), mixer_in, *of_mixer, x_mid, gate, up, mixer_out, mlp_out]


def shared_keys_and_values(
    intermediates: list[mx.array],
    lora: mx.array,
    weights: Weights,
    block: Block,
    starts: Sequence[int] = (0,),
) -> Shared:
    """Returns a block's k̂ and v̂ [1, kv_heads, T, D], from the block's intermediates."""
    parts, keys = Parts.of(weights, lora, block), intermediates[2:4]
    return tuple(
        joined(
            [
                keys_and_values(*rows(keys, record), parts)
                for record in records(starts, keys[0].shape[2])
            ]
        )
    )


def block_backward(
    x: mx.array,
    intermediates: list[mx.array],
    dy: mx.array,
    lora: mx.array,
    scale: float,
    weights: Weights,
    block: Block,
    starts: Sequence[int] = (0,),
    per_layer: mx.array | None = None,
    d_shared: Shared | None = None,
    masks: Masks | None = None,
) -> tuple[mx.array, mx.array, Shared | None]:
    """Returns dx [1, T, hidden], the gradient [P] of the flat LoRA vector, and the gradient of
    `shared`.

    `d_shared` is the gradient of the block's keys and values, summed over all other blocks that use
    them.
    """
    parts, arch = Parts.of(weights, lora, block, scale, masks), block.arch
    p, vector, eps, mixer, _ = parts
    mixer_in, *of_mixer, x_mid, gate, up = intermediates[:8]
    grad, of_experts = {}, {}

    # y = x_mid + w(mlp_in) down(act(gate(mlp_in)) ∘ up(mlp_in)) + experts(mlp_in)
    d_mlp_out = dy
    if arch.post_norms:
        mixer_out, mlp_out = intermediates[8:]
        weight = vector["post_feedforward_layernorm.weight"]
        if per_layer is not None:
            h = x_mid + rms_norm(mlp_out, weight, eps)
            dy, grad = add_per_layer_backward(h, per_layer, dy, parts, arch.hidden_act)
        d_mlp_out = rms_norm_backward(mlp_out, dy, weight, eps)
    mlp_norm = vector[f"{arch.mlp_norm}.weight"]
    mlp_in = rms_norm(x_mid, mlp_norm, eps)
    d_mlp_in = mx.zeros(mlp_in.shape)
    if block.mlp.modules:
        gated_up = gated(gate, up, arch.hidden_act)
        down = linear(gated_up, p["down"])
        d_down, d_mlp_in = weigh_mlp_backward(mlp_in, down, d_mlp_out, weights, block.mlp)
        d_gated, *grad["down"] = linear_backward(gated_up, d_down, p["down"])
        d_gate, d_up = gated_backward(gate, up, d_gated, arch.hidden_act)
        d_in, of_inputs = linears_backward(mlp_in, {"gate": d_gate, "up": d_up}, p)
        grad, d_mlp_in = grad | of_inputs, d_mlp_in + d_in
    if block.mlp.experts:
        mixture = mixture_of(weights, lora, block, scale, masks)
        d_by_experts, of_experts = mix_by_experts_backward(mlp_in, d_mlp_out, mixture)
        d_mlp_in = d_mlp_in + d_by_experts
    d_x_mid = dy + rms_norm_backward(x_mid, d_mlp_in, mlp_norm, eps)

    # x_mid = x + o(mix(mixer_in))
    d_mixer_out = d_x_mid
    if arch.post_norms:
        weight = vector["post_attention_layernorm.weight"]
        d_mixer_out = rms_norm_backward(mixer_out, d_x_mid, weight, eps)
    _, _, output, mix_backward = MIXERS[type(mixer)]
    out_in = output(of_mixer, parts)
    d_out_in, *grad[mixer.out] = linear_backward(out_in, d_mixer_out, p[mixer.out])
    d_mixer_in, by_shared = [], []
    for record in records(starts, x.shape[1]):
        its_in, *its, its_dy = rows((mixer_in, *of_mixer, d_out_in), record)
        given = [rows(d_shared, record)] if d_shared else []
        d_in, matrices, *by_its = mix_backward(its_in, its, its_dy, parts.of_record(record), *given)
        d_mixer_in.append(d_in)
        by_shared += [each for each in by_its if each]
        for name, d_matrices in matrices.items():
            sums = grad.get(name, [0] * len(d_matrices))
            grad[name] = [a + b for a, b in zip(sums, d_matrices, strict=True)]
    d_mixer_in = mx.concatenate(d_mixer_in, axis=1)
    dx = d_x_mid + rms_norm_backward(x, d_mixer_in, vector["input_layernorm.weight"], eps)
    by_keys = tuple(joined(by_shared)) if by_shared else None
    return dx, pack_lora(fuse(grad, block) | of_experts, block), by_keys
