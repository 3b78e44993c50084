"""The mathematics of MeSP in plain MLX: the oracle that every other part is compared with.

Read it top to bottom. Right below each formula is its derivative, the backward pass, in which `dy`
is the gradient of the loss by `y`. First the pieces of a block, then the head with the loss, then
the block, then the three training methods:

- MeSP: `block_backward`, written by hand from the block's input and its intermediates;
- MeBP: the same loop over blocks, each differentiated by `mx.vjp`;
- MeZO: two forward passes with a seeded perturbation.

Everything is float32, whatever the bundle's dtype; nothing is tiled and nothing is tuned. What a
family of models lacks (QK-norm, a soft cap, …) its formula leaves out. Sizes: T tokens, heads (of
queries), kv_heads (of keys and values), D = head_dim, V = vocabulary; ∘ is the elementwise product.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mesp.bundle.reader import Bundle
from mesp.models.architecture import Architecture, Block
from mesp.models.mixers import AttentionMixer
from mesp.quantization.modes import Quantization

INTERMEDIATES = ("mixer_in", "m1", "m2", "m3", "mixed", "x_mid", "gate", "up")
POST_NORMED = ("o_out", "mlp_out")  # more intermediates of a block with post norms

Weights = dict[str, mx.array]


@dataclass
class Model:
    """Frozen weights, by mlx-lm's names (docs/architecture.md lists them).

    `blocks` has one dictionary a block. `embedding` and `head` hold `weight` [V, hidden] packed,
    `scales` and, unless the quantization has none, `biases`; `head` also `norm` [hidden], the final
    RMSNorm. Both hold the embedding's matrix in a model that ties them.
    """

    arch: Architecture
    blocks: list[Weights]
    embedding: Weights
    head: Weights

    @classmethod
    def of(cls, bundle: Bundle) -> "Model":
        """All weights of a bundle, read into memory."""
        arch = bundle.architecture
        blocks = [bundle.block(i) for i in range(arch.num_hidden_layers)]
        return cls(arch, blocks, bundle.embedding(), bundle.head())


def dequantize(weights: Weights, name: str, in_size: int) -> mx.array:
    """W [out, in] float32 from `name`weight, `name`scales and, where there are, `name`biases.

    The arrays' shapes tell the quantization.
    """
    quantization = Quantization.of(weights, name, in_size)
    packed, scales, *biases = (weights[name + part] for part in quantization.parts)
    if biases:
        scales, biases = scales.astype(mx.float32), [biases[0].astype(mx.float32)]
    return mx.dequantize(
        packed,
        scales,
        *biases,
        group_size=quantization.group_size,
        bits=quantization.bits,
        mode=quantization.mode,
        dtype=mx.float32,
    )


# LoRA parameters: one flat float32 vector a block, with A [in, rank] then B [rank, out] of each
# module in the order of `Block.modules`. The projections of a fused module share its A, and
# each has its columns of B.

Matrices = dict[str, tuple[mx.array, mx.array]]


def unpack_lora(flat: mx.array, block: Block) -> Matrices:
    """The matrices A [in, rank] and B [rank, out] of each module, from the flat vector [P]."""
    matrices, start = {}, 0
    rank = flat.size // block.lora_size(1)
    for name, (out_size, in_size) in block.sizes().items():
        middle, end = start + in_size * rank, start + (in_size + out_size) * rank
        matrices[name] = (
            flat[start:middle].reshape(in_size, rank),
            flat[middle:end].reshape(rank, out_size),
        )
        start = end
    return matrices


def pack_lora(matrices: Matrices, block: Block) -> mx.array:
    """The flat vector [P] of each module's A and B (or of their gradients)."""
    return mx.concatenate([m.reshape(-1) for name in block.modules for m in matrices[name]])


def init_lora(arch: Architecture, rank: int, seed: int) -> list[mx.array]:
    """Initial flat LoRA vectors, one a block: A uniform in ±1/√in, B zero."""
    vectors = []
    block_keys = mx.random.split(mx.random.key(seed), arch.num_hidden_layers)
    for block, block_key in zip(arch.blocks, block_keys, strict=True):
        keys = mx.random.split(block_key, len(block.modules))
        matrices = {}
        for key, (name, (out_size, in_size)) in zip(keys, block.sizes().items(), strict=True):
            bound = 1 / math.sqrt(in_size)
            a = mx.random.uniform(-bound, bound, (in_size, rank), key=key)
            matrices[name] = (a, mx.zeros((rank, out_size)))
        vectors.append(pack_lora(matrices, block))
    return vectors


# The pieces of a block.


class Projection(NamedTuple):
    """Frozen W [out, in] and bias [out] or None; trained A [in, rank] and B [rank, out]."""

    W: mx.array
    bias: mx.array | None
    A: mx.array
    B: mx.array


def linear(x: mx.array, p: Projection, scale: float) -> mx.array:
    """y = x Wᵀ + bias + s (x A) B.   x [..., in] -> y [..., out]"""
    y = x @ p.W.T + scale * ((x @ p.A) @ p.B)
    return y if p.bias is None else y + p.bias


def linear_backward(
    x: mx.array, dy: mx.array, p: Projection, scale: float
) -> tuple[mx.array, mx.array, mx.array]:
    """dx, dA and dB. W and bias are frozen. h = x A was not stored: it is computed again.

    dh = s dy Bᵀ        dB = s hᵀ dy        dA = xᵀ dh        dx = dy W + dh Aᵀ
    """
    h = x @ p.A
    dh = scale * (dy @ p.B.T)
    dB = scale * (_rows(h).T @ _rows(dy))
    dA = _rows(x).T @ _rows(dh)
    dx_base = dy @ p.W
    dx_lora = dh @ p.A.T
    return dx_base + dx_lora, dA, dB


def _rows(x: mx.array) -> mx.array:
    """[..., n] -> [tokens, n]: a gradient of a matrix sums over all tokens."""
    return x.reshape(-1, x.shape[-1])


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """y = x r ∘ w,   r = 1 / √(mean(x²) + ε).   x [..., n], w [n] -> y [..., n]"""
    r = mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * r * weight


def rms_norm_backward(x: mx.array, dy: mx.array, weight: mx.array, eps: float) -> mx.array:
    """dx = r g - x r³ mean(g ∘ x),   g = dy ∘ w. The second term comes through r. w is frozen."""
    r = mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps)
    g = dy * weight
    dx_direct = r * g
    dx_through_r = -x * r**3 * mx.mean(g * x, axis=-1, keepdims=True)
    return dx_direct + dx_through_r


def _turn(x: mx.array, mixer: AttentionMixer, direction: int) -> mx.array:
    half = len(mixer.frequencies)
    if half == 0:
        return x
    angle = (
        direction * mx.arange(x.shape[-2], dtype=mx.float32)[:, None] * mx.array(mixer.frequencies)
    )
    cos, sin = mixer.rope_scale * mx.cos(angle), mixer.rope_scale * mx.sin(angle)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return mx.concatenate([first * cos - second * sin, first * sin + second * cos, rest], axis=-1)


def rope(x: mx.array, mixer: AttentionMixer) -> mx.array:
    """y_t = m R(t) x_t: dimensions i and i + n turn by the angle t f_i, i < n.   x, y [..., T, D]

    f are the mixer's n frequencies and m its scale. Dimensions from 2n on stay.
    """
    return _turn(x, mixer, 1)


def rope_backward(dy: mx.array, mixer: AttentionMixer) -> mx.array:
    """dx_t = m R(t)ᵀ dy_t = m R(-t) dy_t: turn back."""
    return _turn(dy, mixer, -1)


def split_heads(x: mx.array, heads: int) -> mx.array:
    """[1, T, heads·D] -> [1, heads, T, D]"""
    return x.reshape(1, x.shape[1], heads, -1).transpose(0, 2, 1, 3)


def merge_heads(x: mx.array) -> mx.array:
    """[1, heads, T, D] -> [1, T, heads·D], the inverse of `split_heads` and so its backward too"""
    return x.transpose(0, 2, 1, 3).reshape(1, x.shape[2], -1)


def _by_group(q: mx.array, kv_heads: int) -> mx.array:
    """[1, heads, T, D] -> [1, kv_heads, group, T, D]: query heads sharing a key and value head."""
    return q.reshape(1, kv_heads, -1, *q.shape[2:])


def soft_cap(x: mx.array, cap: float | None) -> mx.array:
    """y = c tanh(x / c), or x where there is no cap."""
    return x if cap is None else cap * mx.tanh(x / cap)


def soft_cap_backward(y: mx.array, dy: mx.array, cap: float | None) -> mx.array:
    """dx = dy ∘ (1 - (y / c)²)"""
    return dy if cap is None else dy * (1 - (y / cap) ** 2)


def _scores(q: mx.array, k: mx.array, mixer: AttentionMixer) -> tuple[mx.array, mx.array]:
    """S = cap(a q kᵀ) and P = softmax(S) over the keys s that t sees: t - window < s ≤ t.

    q [1, kv_heads, group, T, D], k [1, kv_heads, 1, T, D]; a is the attention scale.
    """
    t = mx.arange(q.shape[-2])[:, None]
    s = mx.arange(q.shape[-2])
    seen = s <= t
    if mixer.sliding_window is not None:
        seen = seen & (s > t - mixer.sliding_window)
    S = soft_cap(mixer.attention_scale * (q @ k.swapaxes(-1, -2)), mixer.attn_logit_softcapping)
    return S, mx.softmax(mx.where(seen, S, -mx.inf), axis=-1)


def attention(q: mx.array, k: mx.array, v: mx.array, mixer: AttentionMixer) -> mx.array:
    """O = P v, P = softmax(cap(a q kᵀ)), causal and grouped-query; heads concatenated.

    q [1, heads, T, D], k and v [1, kv_heads, T, D] -> attn_out [1, T, heads·D]
    """
    k, v = k[:, :, None], v[:, :, None]
    _, P = _scores(_by_group(q, k.shape[1]), k, mixer)
    return merge_heads((P @ v).reshape(q.shape))


def attention_backward(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    attn_out: mx.array,
    d_attn_out: mx.array,
    mixer: AttentionMixer,
) -> tuple[mx.array, mx.array, mx.array]:
    """dq, dk, dv. S and P were not stored: they are computed again. Shapes as in `attention`.

    dv = Pᵀ dO     dP = dO vᵀ     dS = P ∘ (dP - δ)     dZ = cap'(S) ∘ dS, Z = a q kᵀ

    dq = a dZ k     dk = a dZᵀ q

    δ = rowsum(P ∘ dP), the softmax's normalization, equals rowsum(O ∘ dO). dk and dv sum over the
    query heads that share them.
    """
    q_shape = q.shape
    heads, kv_heads = q.shape[1], k.shape[1]
    out, d_out = split_heads(attn_out, heads), split_heads(d_attn_out, heads)
    q, out, d_out = (_by_group(heads_array, kv_heads) for heads_array in (q, out, d_out))
    k, v = k[:, :, None], v[:, :, None]
    S, P = _scores(q, k, mixer)
    dv = (P.swapaxes(-1, -2) @ d_out).sum(axis=2)
    dP = d_out @ v.swapaxes(-1, -2)
    delta = (out * d_out).sum(axis=-1, keepdims=True)
    dS = P * (dP - delta)
    dZ = soft_cap_backward(S, dS, mixer.attn_logit_softcapping)
    dq = (mixer.attention_scale * (dZ @ k)).reshape(q_shape)
    dk = (mixer.attention_scale * (dZ.swapaxes(-1, -2) @ q)).sum(axis=2)
    return dq, dk, dv


def silu(x: mx.array) -> mx.array:
    """y = x sigmoid(x)"""
    return x * mx.sigmoid(x)


def silu_derivative(x: mx.array) -> mx.array:
    """sigmoid(x) (1 + x (1 - sigmoid(x)))"""
    sigma = mx.sigmoid(x)
    return sigma * (1 + x * (1 - sigma))


def gelu(x: mx.array) -> mx.array:
    """y = ½ x (1 + tanh u),   u = √(2/π) (x + 0.044715 x³)"""
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + mx.tanh(u))


def gelu_derivative(x: mx.array) -> mx.array:
    """½ (1 + tanh u) + ½ x (1 - tanh² u) u',   u' = √(2/π) (1 + 3 · 0.044715 x²)"""
    tanh = mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    du = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * du


ACTIVATIONS = {"silu": (silu, silu_derivative), "gelu": (gelu, gelu_derivative)}


def gated(gate: mx.array, up: mx.array, hidden_act: str) -> mx.array:
    """y = act(gate) ∘ up.   All [..., n]"""
    act, _ = ACTIVATIONS[hidden_act]
    return act(gate) * up


def gated_backward(
    gate: mx.array, up: mx.array, dy: mx.array, hidden_act: str
) -> tuple[mx.array, mx.array]:
    """d_gate = dy ∘ up ∘ act'(gate)        d_up = dy ∘ act(gate)"""
    act, derivative = ACTIVATIONS[hidden_act]
    return dy * up * derivative(gate), dy * act(gate)


# The head and the loss.


def cross_entropy(
    x: mx.array,
    targets: mx.array,
    head: Weights,
    arch: Architecture,
    weights: mx.array | None = None,
) -> mx.array:
    """L = Σ_t w_t (logsumexp(z_t) - z_t[target_t]),   z = cap(RMSNorm(x) Wᵀ).

    x [1, T, hidden], the last block's output; targets [T] int; the weights w [T] are 1 / T each
    where there are none -> L [], in nats, or then nats per token
    """
    z = _logits(x, head, arch)
    z_target = mx.take_along_axis(z, targets[None, :, None], axis=-1)[..., 0]
    losses = mx.logsumexp(z, axis=-1) - z_target
    return mx.mean(losses) if weights is None else mx.sum(weights * losses)


def cross_entropy_backward(
    x: mx.array,
    targets: mx.array,
    head: Weights,
    arch: Architecture,
    weights: mx.array | None = None,
) -> mx.array:
    """dz = w ∘ cap'(z) ∘ (softmax(z) - onehot(target)),   d_normed = dz W,   dx = RMSNorm's.

    w_t = 1 / T where there are no weights. W is frozen.
    """
    z = _logits(x, head, arch)
    onehot = mx.arange(z.shape[-1]) == targets[:, None]
    dz = mx.softmax(z, axis=-1) - onehot
    dz = dz / targets.size if weights is None else weights[:, None] * dz
    d_normed = soft_cap_backward(z, dz, arch.final_logit_softcapping) @ _matrix(head, x)
    return rms_norm_backward(x, d_normed, head["norm"].astype(mx.float32), arch.rms_norm_eps)


def _logits(x: mx.array, head: Weights, arch: Architecture) -> mx.array:
    normed = rms_norm(x, head["norm"].astype(mx.float32), arch.rms_norm_eps)
    return soft_cap(normed @ _matrix(head, x).T, arch.final_logit_softcapping)


def _matrix(head: Weights, x: mx.array) -> mx.array:
    return dequantize(head, "", x.shape[-1])


# A block.


class Parts(NamedTuple):
    """What a block's formulas take: the projections by their short names, vectors by theirs."""

    p: dict[str, Projection]
    vector: Weights
    eps: float

    @classmethod
    def of(cls, weights: Weights, lora: mx.array, block: Block) -> "Parts":
        """A projection of a fused module takes its rows of W and bias, and its columns of B."""
        matrices = unpack_lora(lora, block)
        projections = {}
        for name, (module, rows, (_, in_size)) in block.projections().items():
            bias = weights.get(f"{module}.bias")
            A, B = matrices[module]
            projections[name] = Projection(
                dequantize(weights, f"{module}.", in_size)[rows],
                None if bias is None else bias.astype(mx.float32)[rows],
                A,
                B[:, rows],
            )
        vectors = {name: weights[name].astype(mx.float32) for name in block.norms()}
        return cls(projections, vectors, block.arch.rms_norm_eps)


def fuse(gradients: Matrices, block: Block) -> Matrices:
    """The gradients by A and B of each module, from those of its projections.

    Its outputs lie side by side, so dB does; they share A, so dA adds up.
    """
    fused = {}
    for module, names in block.modules.items():
        dA, dB = zip(*(gradients[name] for name in names), strict=True)
        fused[module] = (sum(dA[1:], dA[0]), mx.concatenate(dB, axis=1))
    return fused


# Attention in a block: q, k and v of the block's normed input, and what o takes.

Stored = Callable[[mx.array], mx.array]


def place(x: mx.array, weight: mx.array | None, eps: float, mixer: AttentionMixer) -> mx.array:
    """y = RoPE(QKNorm(x)), what attention takes of q and k.   x, y [1, heads, T, D]"""
    if weight is not None:
        x = rms_norm(x, weight, eps)
    return rope(x, mixer)


def place_backward(
    x: mx.array, dy: mx.array, weight: mx.array | None, eps: float, mixer: AttentionMixer
) -> mx.array:
    """dx, through RoPE and then QK-norm, where there is one"""
    dy = rope_backward(dy, mixer)
    return dy if weight is None else rms_norm_backward(x, dy, weight, eps)


def mix_by_attention(
    x: mx.array, scale: float, parts: Parts, mixer: AttentionMixer, stored: Stored
) -> list[mx.array]:
    """[q, k, v, attn_out] of x [1, T, hidden]

    attn_out = attention(place(q(x)), place(k(x)), v(x))
    """
    p, vector, eps = parts
    heads, kv_heads = mixer.num_attention_heads, mixer.num_key_value_heads
    q = stored(split_heads(linear(x, p["q"], scale), heads))
    k = stored(split_heads(linear(x, p["k"], scale), kv_heads))
    v = stored(split_heads(linear(x, p["v"], scale), kv_heads))
    placed_q = place(q, vector.get("self_attn.q_norm.weight"), eps, mixer)
    placed_k = place(k, vector.get("self_attn.k_norm.weight"), eps, mixer)
    return [q, k, v, stored(attention(placed_q, placed_k, v, mixer))]


def mix_by_attention_backward(
    x: mx.array,
    mixed: list[mx.array],
    d_attn_out: mx.array,
    scale: float,
    parts: Parts,
    mixer: AttentionMixer,
) -> tuple[mx.array, Matrices]:
    """dx, and dA and dB of q, k and v.   mixed is what `mix_by_attention` gives"""
    p, vector, eps = parts
    q, k, v, attn_out = mixed
    q_norm, k_norm = (vector.get(f"self_attn.{name}_norm.weight") for name in "qk")
    placed_q, placed_k = place(q, q_norm, eps, mixer), place(k, k_norm, eps, mixer)
    dq, dk, dv = attention_backward(placed_q, placed_k, v, attn_out, d_attn_out, mixer)
    dq = place_backward(q, dq, q_norm, eps, mixer)
    dk = place_backward(k, dk, k_norm, eps, mixer)
    dx, grad = mx.zeros_like(x), {}
    for name, dy in {"q": dq, "k": dk, "v": dv}.items():
        d_in, *grad[name] = linear_backward(x, merge_heads(dy), p[name], scale)
        dx = dx + d_in
    return dx, grad


def block_forward(
    x: mx.array,
    lora: mx.array,
    scale: float,
    weights: Weights,
    block: Block,
    stored: Stored = lambda x: x,
) -> list[mx.array]:
    """[y, mixer_in, m1, m2, m3, mixed, x_mid, gate, up], shapes as in docs/architecture.md.

    x_mid = x + o(mix(RMSNorm(x)))        y = x_mid + down(act(gate) ∘ up)

    With post norms (o and down are normed before they are added) also o_out and mlp_out, which
    those take. `stored` is what becomes of an array in memory, such as rounding; gate and up are
    made again where they are needed.
    """
    parts, arch, mixer = Parts.of(weights, lora, block), block.arch, block.mixer
    p, vector, eps = parts

    mixer_in = stored(rms_norm(x, vector["input_layernorm.weight"], eps))
    *m, mixed = mix_by_attention(mixer_in, scale, parts, mixer, stored)
    o_out = linear(mixed, p[mixer.out], scale)
    if arch.post_norms:
        o_out = stored(o_out)
        x_mid = stored(x + rms_norm(o_out, vector["post_attention_layernorm.weight"], eps))
    else:
        x_mid = stored(x + o_out)

    mlp_in = rms_norm(x_mid, vector[f"{arch.mlp_norm}.weight"], eps)
    gate = linear(mlp_in, p["gate"], scale)
    up = linear(mlp_in, p["up"], scale)
    mlp_out = linear(gated(gate, up, arch.hidden_act), p["down"], scale)
    if not arch.post_norms:
        return [stored(x_mid + mlp_out), mixer_in, *m, mixed, x_mid, gate, up]
    mlp_out = stored(mlp_out)
    y = stored(x_mid + rms_norm(mlp_out, vector["post_feedforward_layernorm.weight"], eps))
    return [y, mixer_in, *m, mixed, x_mid, gate, up, o_out, mlp_out]


def block_backward(
    x: mx.array,
    intermediates: list[mx.array],
    dy: mx.array,
    lora: mx.array,
    scale: float,
    weights: Weights,
    block: Block,
) -> tuple[mx.array, mx.array]:
    """dx [1, T, hidden] and the gradient [P] by the flat LoRA vector.

    From x and the intermediates of `block_forward`, last formula first.
    """
    parts, arch, mixer = Parts.of(weights, lora, block), block.arch, block.mixer
    p, vector, eps = parts
    mixer_in, *m, mixed, x_mid, gate, up = intermediates[: len(INTERMEDIATES)]
    grad = {}

    # y = x_mid + down(act(gate(mlp_in)) ∘ up(mlp_in))
    d_mlp_out = dy
    if arch.post_norms:
        o_out, mlp_out = intermediates[len(INTERMEDIATES) :]
        weight = vector["post_feedforward_layernorm.weight"]
        d_mlp_out = rms_norm_backward(mlp_out, dy, weight, eps)
    gated_up = gated(gate, up, arch.hidden_act)
    d_gated, *grad["down"] = linear_backward(gated_up, d_mlp_out, p["down"], scale)
    d_gate, d_up = gated_backward(gate, up, d_gated, arch.hidden_act)
    mlp_norm = vector[f"{arch.mlp_norm}.weight"]
    mlp_in = rms_norm(x_mid, mlp_norm, eps)
    d_in_gate, *grad["gate"] = linear_backward(mlp_in, d_gate, p["gate"], scale)
    d_in_up, *grad["up"] = linear_backward(mlp_in, d_up, p["up"], scale)
    d_x_mid = dy + rms_norm_backward(x_mid, d_in_gate + d_in_up, mlp_norm, eps)

    # x_mid = x + o(mix(mixer_in))
    d_o_out = d_x_mid
    if arch.post_norms:
        d_o_out = rms_norm_backward(o_out, d_x_mid, vector["post_attention_layernorm.weight"], eps)
    d_mixed, *grad[mixer.out] = linear_backward(mixed, d_o_out, p[mixer.out], scale)
    d_mixer_in, of_mixer = mix_by_attention_backward(
        mixer_in, [*m, mixed], d_mixed, scale, parts, mixer
    )
    grad |= of_mixer
    dx = d_x_mid + rms_norm_backward(x, d_mixer_in, vector["input_layernorm.weight"], eps)
    return dx, pack_lora(fuse(grad, block), block)


# The model, and the three methods.


def forward(model: Model, lora: list[mx.array], tokens: mx.array, scale: float) -> list[mx.array]:
    """The input of each block and the output of the last, [1, T, hidden] each.   tokens [T] int"""
    arch = model.arch
    rows = {name: array[tokens] for name, array in model.embedding.items() if name != "norm"}
    hidden = [arch.embedding_scale * dequantize(rows, "", arch.hidden_size)[None]]
    for block_lora, weights, block in zip(lora, model.blocks, arch.blocks, strict=True):
        hidden.append(block_forward(hidden[-1], block_lora, scale, weights, block)[0])
    return hidden


def loss(
    model: Model,
    lora: list[mx.array],
    window: mx.array,
    scale: float,
    weights: mx.array | None = None,
) -> mx.array:
    """Cross-entropy [] of a window of T + 1 tokens: T inputs and, shifted by one, T targets.

    The targets' weights are as `cross_entropy` has them.
    """
    y = forward(model, lora, window[:-1], scale)[-1]
    return cross_entropy(y, window[1:], model.head, model.arch, weights)


BlockGradient = Callable[
    [mx.array, mx.array, mx.array, float, Weights, Block], tuple[mx.array, mx.array]
]


def mesp_block_gradient(
    x: mx.array,
    dy: mx.array,
    lora: mx.array,
    scale: float,
    weights: Weights,
    block: Block,
) -> tuple[mx.array, mx.array]:
    """MeSP: dx and the flat LoRA gradient of a block by hand. Recomputes the intermediates."""
    _, *intermediates = block_forward(x, lora, scale, weights, block)
    return block_backward(x, intermediates, dy, lora, scale, weights, block)


def mebp_block_gradient(
    x: mx.array,
    dy: mx.array,
    lora: mx.array,
    scale: float,
    weights: Weights,
    block: Block,
) -> tuple[mx.array, mx.array]:
    """MeBP: the same by automatic differentiation."""

    def output(x: mx.array, lora: mx.array) -> mx.array:
        return block_forward(x, lora, scale, weights, block)[0]

    _, (dx, d_lora) = mx.vjp(output, [x, lora], [dy])
    return dx, d_lora


class Gradients(NamedTuple):
    """Of one window: the loss, what `forward` gives, and the loss's gradients."""

    loss: mx.array  # []
    x: list[mx.array]  # each block's input and the last one's output, [1, T, hidden]
    dx: list[mx.array]  # by each of those
    lora: list[mx.array]  # by each block's flat LoRA vector, [P]


def gradients(
    model: Model,
    lora: list[mx.array],
    window: mx.array,
    scale: float,
    block_gradient: BlockGradient = mesp_block_gradient,
    weights: mx.array | None = None,
) -> Gradients:
    """Forward keeping only block inputs, then backward from the last block.   window [T + 1] int

    The targets' weights are as `cross_entropy` has them.
    """
    arch, targets = model.arch, window[1:]
    x = forward(model, lora, window[:-1], scale)
    window_loss = cross_entropy(x[-1], targets, model.head, arch, weights)
    dx = [cross_entropy_backward(x[-1], targets, model.head, arch, weights)]
    d_lora = []
    for i in reversed(range(len(lora))):
        block = (lora[i], scale, model.blocks[i], arch.blocks[i])
        d_input, d_block = block_gradient(x[i], dx[0], *block)
        dx.insert(0, d_input)
        d_lora.insert(0, d_block)
    return Gradients(window_loss, x, dx, d_lora)


def _sgd_step(
    model: Model,
    lora: list[mx.array],
    window: mx.array,
    scale: float,
    learning_rate: float,
    block_gradient: BlockGradient,
) -> float:
    g = gradients(model, lora, window, scale, block_gradient)
    for i, d_lora in enumerate(g.lora):
        lora[i] = lora[i] - learning_rate * d_lora
    mx.eval(g.loss, lora)
    return g.loss.item()


def mesp_step(
    model: Model, lora: list[mx.array], window: mx.array, scale: float, learning_rate: float
) -> float:
    """One MeSP step with SGD. Updates `lora` in place; the loss before the update."""
    return _sgd_step(model, lora, window, scale, learning_rate, mesp_block_gradient)


def mebp_step(
    model: Model, lora: list[mx.array], window: mx.array, scale: float, learning_rate: float
) -> float:
    """One MeBP step with SGD. Updates `lora` in place; the loss before the update."""
    return _sgd_step(model, lora, window, scale, learning_rate, mebp_block_gradient)


def mezo_noise(lora: list[mx.array], seed: int, step: int) -> list[mx.array]:
    """z: standard normal, one flat vector a block, the same for the same seed and step."""
    keys = mx.random.split(mx.random.key(seed + 1 + step), len(lora))
    return [mx.random.normal(w.shape, key=key) for w, key in zip(lora, keys, strict=True)]


def mezo_step(
    model: Model,
    lora: list[mx.array],
    window: mx.array,
    scale: float,
    learning_rate: float,
    *,
    seed: int,
    step: int,
    epsilon: float = 1e-3,
) -> float:
    """One MeZO step with SGD. Updates `lora` in place; returns (L₊ + L₋) / 2, the loss up to O(ε²).

    L± = L(lora ± ε z)        g = (L₊ - L₋) / 2ε ≈ z · ∇L        lora -= lr g z
    """
    z = mezo_noise(lora, seed, step)

    def loss_at(move: float) -> float:
        moved = [w + move * noise for w, noise in zip(lora, z, strict=True)]
        return loss(model, moved, window, scale).item()

    loss_plus, loss_minus = loss_at(epsilon), loss_at(-epsilon)
    g = (loss_plus - loss_minus) / (2 * epsilon)
    for i, noise in enumerate(z):
        lora[i] = lora[i] - learning_rate * g * noise
    mx.eval(lora)
    return (loss_plus + loss_minus) / 2


# Preferences, as TRL 1.9.0 has them.


class Answer(NamedTuple):
    """What an objective knows of an answer of n tokens: log π(y) and log π₀(y) of the answer y,

    sums over its targets, in nats. π₀ is the model as it was when the run began.
    """

    logp: float
    reference: float
    tokens: int

    @property
    def ratio(self) -> float:
        """log(π(y) / π₀(y))"""
        return self.logp - self.reference


class Preference(NamedTuple):
    """A pair's loss, and its derivatives by the two answers' -log π: each is the weight of all of

    its answer's targets in the gradient.
    """

    loss: float
    chosen: float
    rejected: float


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _softplus(x: float) -> float:
    """-log sigmoid(-x)"""
    return max(x, 0) + math.log1p(math.exp(-abs(x)))


def dpo(chosen: Answer, rejected: Answer, beta: float) -> Preference:
    """L = -log sigmoid(m),   m = β (ratio of the chosen - ratio of the rejected)"""
    margin = beta * (chosen.ratio - rejected.ratio)
    weight = beta * _sigmoid(-margin)
    return Preference(_softplus(-margin), weight, -weight)


def ipo(chosen: Answer, rejected: Answer, beta: float) -> Preference:
    """L = (h - 1 / 2β)²,   h = the difference of the ratios a token"""
    difference = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens - 1 / (2 * beta)
    slope = 2 * difference
    return Preference(difference**2, -slope / chosen.tokens, slope / rejected.tokens)


def simpo(chosen: Answer, rejected: Answer, beta: float, gamma: float) -> Preference:
    """L = -log sigmoid(m),   m = β (difference of log π a token) - gamma"""
    margin = beta * (chosen.logp / chosen.tokens - rejected.logp / rejected.tokens) - gamma
    weight = beta * _sigmoid(-margin)
    return Preference(_softplus(-margin), weight / chosen.tokens, -weight / rejected.tokens)


def orpo(chosen: Answer, rejected: Answer, beta: float) -> Preference:
    """L = -β log sigmoid(log odds of the chosen - log odds of the rejected),   odds = p / (1 - p),

    p = exp(log π a token). To it comes the chosen's mean loss over all of its targets, those of the
    prompt too.
    """
    means = [answer.logp / answer.tokens for answer in (chosen, rejected)]
    odds = [mean - math.log(-math.expm1(mean)) for mean in means]
    slope = beta * _sigmoid(odds[1] - odds[0])
    # d odds / d mean = 1 / (1 - p)
    weights = [slope / -math.expm1(mean) for mean in means]
    return Preference(
        beta * _softplus(odds[1] - odds[0]),
        weights[0] / chosen.tokens,
        -weights[1] / rejected.tokens,
    )


def kto(
    answers: Sequence[Answer],
    labels: Sequence[bool],
    mismatched: Sequence[Answer],
    beta: float,
    desirable: float = 1.0,
    undesirable: float = 1.0,
) -> tuple[float, list[float]]:
    """The mean loss of a batch, and the weight of each answer's targets.

    L = w (1 - sigmoid(± β (ratio - k))), + and the weight `desirable` for good answers, - and
    `undesirable` for bad ones; k = max(0, the mean ratio of `mismatched`), each prompt's with the
    answer before it in the batch, and no function of the parameters.
    """
    kl = max(0.0, sum(each.ratio for each in mismatched) / len(mismatched))
    total, weights = 0.0, []
    for answer, good in zip(answers, labels, strict=True):
        sign, factor = (1, desirable) if good else (-1, undesirable)
        value = _sigmoid(sign * beta * (answer.ratio - kl))
        total += factor * (1 - value) / len(answers)
        weights.append(sign * factor * beta * value * (1 - value) / len(answers))
    return total, weights


# AdamW with its moments in 8 bits, as in bitsandbytes (Dettmers et al., arXiv:2110.02861).

MOMENT_BLOCK = 256  # numbers that share a scale


class Quantized(NamedTuple):
    """P numbers in 8 bits: what each code stands for, times its block's scale."""

    codes: mx.array  # uint8 [P]
    scales: mx.array  # float32 [⌈P / MOMENT_BLOCK⌉]


def dynamic_map(signed: bool) -> mx.array:
    """What each of 256 codes stands for, ascending, float32 [256].

    0, 1, and of each power of ten from 10⁻⁶ to 1 the middles of equal parts of its upper nine
    tenths, twice as many as of the last: 1 to 64 and their negatives, or, not signed, 2 to 128.
    """
    numbers = [0.0, 1.0]
    for power in range(7):
        parts = (1 if signed else 2) * 2**power
        for part in range(parts):
            number = 10.0 ** (power - 6) * (0.1 + 0.9 * (part + 0.5) / parts)
            numbers += [number, -number] if signed else [number]
    return mx.array(sorted(numbers))


def quantize(x: mx.array, signed: bool) -> Quantized:
    """Each of x [P] as the nearest fraction of its block's largest absolute value.

    Of two that are equally near the lower: the code is the number of middles between neighbours of
    the map that are below.
    """
    numbers = dynamic_map(signed)
    middles = (numbers[:-1] + numbers[1:]) / 2
    blocks = mx.pad(x, (0, -x.size % MOMENT_BLOCK)).reshape(-1, MOMENT_BLOCK)
    scales = mx.abs(blocks).max(axis=1)
    fractions = blocks / mx.where(scales > 0, scales, 1)[:, None]
    codes = (fractions[..., None] > middles).sum(axis=-1)
    return Quantized(codes.reshape(-1)[: x.size].astype(mx.uint8), scales)


def dequantize_moment(moment: Quantized, signed: bool) -> mx.array:
    """float32 [P]"""
    scales = mx.repeat(moment.scales, MOMENT_BLOCK)[: moment.codes.size]
    return dynamic_map(signed)[moment.codes] * scales


def adamw8bit(
    w: mx.array,
    g: mx.array,
    m: Quantized,
    v: Quantized,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[mx.array, Quantized, Quantized]:
    """w [P], m and v after a step with the gradient g [P]: `mlx.optimizers.AdamW`'s.

    w moves by m and v as they are before they are rounded.
    """
    new_m = betas[0] * dequantize_moment(m, signed=True) + (1 - betas[0]) * g
    new_v = betas[1] * dequantize_moment(v, signed=False) + (1 - betas[1]) * mx.square(g)
    step = learning_rate * new_m / (mx.sqrt(new_v) + epsilon)
    new_w = w * (1 - learning_rate * weight_decay) - step
    return new_w, quantize(new_m, signed=True), quantize(new_v, signed=False)


# Training.


def step_window(step: int, seed: int, windows: int) -> int:
    """The window that `step` (from 0) trains on. Each is visited once an epoch, in scattered order:

    the stride is the smallest integer ≥ 0.618 · windows that is coprime to windows.
    """
    stride = -(-618 * windows // 1000) if windows > 1 else 1
    while math.gcd(stride, windows) != 1:
        stride += 1
    return (step * stride + seed) % windows


def step_example(
    step: int, seed: int, examples: Sequence[Sequence[int]], mask: Sequence[int], seq_len: int
) -> tuple[int, int]:
    """The example (start, length) of the split's `examples` that `step` (from 0) takes,

    its length at most `seq_len` + 1, in the order of `step_window` over those that then have a
    target left. It is tokens[start : start + length]; the loss is the mean over the predictions of
    its tokens after the first for which `mask`, beside the tokens, is not 0.
    """
    cut = [(start, min(length, seq_len + 1)) for start, length in examples]
    usable = [(start, length) for start, length in cut if any(mask[start + 1 : start + length])]
    return usable[step_window(step, seed, len(usable))]


def _window(tokens: mx.array, index: int, seq_len: int) -> mx.array:
    return tokens[index * seq_len : (index + 1) * seq_len + 1]


def train(
    model: Model,
    lora: list[mx.array],
    tokens: mx.array,
    method: str,
    steps: int,
    *,
    seq_len: int,
    scale: float,
    learning_rate: float,
    seed: int = 0,
    epsilon: float = 1e-3,
) -> list[float]:
    """Trains `lora` in place on the stream `tokens` [N] int; the loss of each step.

    `method` is `mesp`, `mebp` or `mezo`.
    """
    windows = (tokens.size - 1) // seq_len
    losses = []
    for step in range(steps):
        window = _window(tokens, step_window(step, seed, windows), seq_len)
        settings = (model, lora, window, scale, learning_rate)
        if method == "mesp":
            losses.append(mesp_step(*settings))
        elif method == "mebp":
            losses.append(mebp_step(*settings))
        elif method == "mezo":
            losses.append(mezo_step(*settings, seed=seed, step=step, epsilon=epsilon))
        else:
            raise ValueError(f"unknown method: {method}")
    return losses


def evaluate(
    model: Model,
    lora: list[mx.array],
    tokens: mx.array,
    *,
    seq_len: int,
    scale: float,
    val_batches: int,
) -> float:
    """Mean loss, in nats per token, of the first `val_batches` windows of `tokens` [N] int."""
    windows = min(val_batches, (tokens.size - 1) // seq_len)
    losses = [loss(model, lora, _window(tokens, i, seq_len), scale).item() for i in range(windows)]
    return sum(losses) / windows
