"""The mathematics of MeSP in plain MLX: the oracle that every other part is compared with.

Read it top to bottom. Right below each formula is its derivative, the backward pass, in which `dy`
is the gradient of the loss by `y`. First the pieces of a block, then the head with the loss, then
the block, then the three training methods:

- MeSP: `block_backward`, written by hand from the block's input and eight intermediates;
- MeBP: the same loop over blocks, each differentiated by `mx.vjp`;
- MeZO: two forward passes with a seeded perturbation.

Everything is float32, whatever the bundle's dtype; nothing is tiled and nothing is tuned. Sizes: T
tokens, heads (of queries), kv_heads (of keys and values), D = head_dim, V = vocabulary; ∘ is the
elementwise product.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from mesp.bundle import Bundle
from mesp.models import PROJECTIONS, Architecture

INTERMEDIATES = ("attn_in", "q", "k", "v", "attn_out", "x_mid", "gate", "up")

Weights = dict[str, mx.array]


@dataclass
class Model:
    """Frozen weights, by mlx-lm's names (docs/architecture.md lists them).

    `blocks` has one dictionary a block. `embedding` and `head` hold `weight` [V, hidden] packed,
    `scales` and `biases`; `head` also `norm` [hidden], the final RMSNorm. Both hold the embedding's
    matrix in a model that ties them.
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
    """W [out, in] float32 from `name`weight, `name`scales and `name`biases.

    The arrays' shapes tell the bits and the group size.
    """
    packed, scales, biases = (weights[name + part] for part in ("weight", "scales", "biases"))
    return mx.dequantize(
        packed,
        scales.astype(mx.float32),
        biases.astype(mx.float32),
        group_size=in_size // scales.shape[-1],
        bits=packed.shape[-1] * 32 // in_size,
    )


# LoRA parameters: one flat float32 vector a block, with A [in, rank] then B [rank, out] of each
# projection in the order of `PROJECTIONS`.


def lora_rank(flat: mx.array, arch: Architecture) -> int:
    """The rank of a flat LoRA vector, from its length."""
    return flat.size // arch.lora_size(1)


def unpack_lora(
    flat: mx.array, arch: Architecture, rank: int
) -> dict[str, tuple[mx.array, mx.array]]:
    """The matrices A [in, rank] and B [rank, out] of each projection, from the flat vector [P]."""
    matrices, start = {}, 0
    for name, (out_size, in_size) in arch.projections().items():
        middle, end = start + in_size * rank, start + (in_size + out_size) * rank
        matrices[name] = (
            flat[start:middle].reshape(in_size, rank),
            flat[middle:end].reshape(rank, out_size),
        )
        start = end
    return matrices


def pack_lora(matrices: dict[str, tuple[mx.array, mx.array]]) -> mx.array:
    """The flat vector [P] of each projection's A and B (or of their gradients)."""
    return mx.concatenate([m.reshape(-1) for name in PROJECTIONS for m in matrices[name]])


def init_lora(arch: Architecture, rank: int, seed: int) -> list[mx.array]:
    """Initial flat LoRA vectors, one a block: A uniform in ±1/√in, B zero."""
    blocks = []
    for block_key in mx.random.split(mx.random.key(seed), arch.num_hidden_layers):
        keys = mx.random.split(block_key, len(PROJECTIONS))
        matrices = {}
        for key, (name, (out_size, in_size)) in zip(keys, arch.projections().items(), strict=True):
            bound = 1 / math.sqrt(in_size)
            a = mx.random.uniform(-bound, bound, (in_size, rank), key=key)
            matrices[name] = (a, mx.zeros((rank, out_size)))
        blocks.append(pack_lora(matrices))
    return blocks


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


def _rotate(x: mx.array, theta: float, direction: int) -> mx.array:
    T, half = x.shape[-2], x.shape[-1] // 2
    frequency = mx.exp(-mx.arange(half, dtype=mx.float32) * (math.log(theta) / half))
    angle = direction * mx.arange(T, dtype=mx.float32)[:, None] * frequency
    cos, sin = mx.cos(angle), mx.sin(angle)
    first, second = x[..., :half], x[..., half:]
    return mx.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def rope(x: mx.array, theta: float) -> mx.array:
    """y_t = R(t) x_t: dimensions i and i + D/2 turn by the angle t θ^(-2i/D).   x, y [..., T, D]"""
    return _rotate(x, theta, 1)


def rope_backward(dy: mx.array, theta: float) -> mx.array:
    """dx_t = R(t)ᵀ dy_t = R(-t) dy_t: turn back."""
    return _rotate(dy, theta, -1)


def split_heads(x: mx.array, heads: int) -> mx.array:
    """[1, T, heads·D] -> [1, heads, T, D]"""
    return x.reshape(1, x.shape[1], heads, -1).transpose(0, 2, 1, 3)


def merge_heads(x: mx.array) -> mx.array:
    """[1, heads, T, D] -> [1, T, heads·D], the inverse of `split_heads` and so its backward too"""
    return x.transpose(0, 2, 1, 3).reshape(1, x.shape[2], -1)


def _by_group(q: mx.array, kv_heads: int) -> mx.array:
    """[1, heads, T, D] -> [1, kv_heads, group, T, D]: query heads sharing a key and value head."""
    return q.reshape(1, kv_heads, -1, *q.shape[2:])


def _probabilities(q: mx.array, k: mx.array) -> mx.array:
    """P = softmax(q kᵀ / √D), causal.   q [1, kv_heads, group, T, D], k [1, kv_heads, 1, T, D]"""
    T, D = q.shape[-2:]
    scores = (q @ k.swapaxes(-1, -2)) / math.sqrt(D)
    causal = mx.arange(T)[:, None] >= mx.arange(T)
    return mx.softmax(mx.where(causal, scores, -mx.inf), axis=-1)


def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """O = P v, P = softmax(q kᵀ / √D), causal and grouped-query; heads concatenated.

    q [1, heads, T, D], k and v [1, kv_heads, T, D] -> attn_out [1, T, heads·D]
    """
    k, v = k[:, :, None], v[:, :, None]
    P = _probabilities(_by_group(q, k.shape[1]), k)
    return merge_heads((P @ v).reshape(q.shape))


def attention_backward(
    q: mx.array, k: mx.array, v: mx.array, attn_out: mx.array, d_attn_out: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """dq, dk, dv. P was not stored: it is computed again. Shapes as in `attention`.

    dv = Pᵀ dO     dP = dO vᵀ     dS = P ∘ (dP - δ)     dq = dS k / √D     dk = dSᵀ q / √D

    δ = rowsum(P ∘ dP), the softmax's normalization, equals rowsum(O ∘ dO). S is q kᵀ / √D. dk and
    dv sum over the query heads that share them.
    """
    q_shape = q.shape
    heads, kv_heads, D = q.shape[1], k.shape[1], q.shape[3]
    out, d_out = split_heads(attn_out, heads), split_heads(d_attn_out, heads)
    q, out, d_out = (_by_group(heads_array, kv_heads) for heads_array in (q, out, d_out))
    k, v = k[:, :, None], v[:, :, None]
    P = _probabilities(q, k)
    dv = (P.swapaxes(-1, -2) @ d_out).sum(axis=2)
    dP = d_out @ v.swapaxes(-1, -2)
    delta = (out * d_out).sum(axis=-1, keepdims=True)
    dS = P * (dP - delta)
    dq = (dS @ k / math.sqrt(D)).reshape(q_shape)
    dk = (dS.swapaxes(-1, -2) @ q / math.sqrt(D)).sum(axis=2)
    return dq, dk, dv


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """y = gate ∘ sigmoid(gate) ∘ up.   All [..., n]"""
    return gate * mx.sigmoid(gate) * up


def swiglu_backward(gate: mx.array, up: mx.array, dy: mx.array) -> tuple[mx.array, mx.array]:
    """d_gate = dy ∘ up ∘ silu'(gate),   silu'(g) = sigmoid(g) (1 + g (1 - sigmoid(g)))

    d_up = dy ∘ silu(gate)
    """
    sigma = mx.sigmoid(gate)
    silu = gate * sigma
    d_silu = sigma * (1 + gate * (1 - sigma))
    return dy * up * d_silu, dy * silu


# The head and the loss.


def cross_entropy(x: mx.array, targets: mx.array, head: Weights, eps: float) -> mx.array:
    """L = mean_t (logsumexp(z_t) - z_t[target_t]),   z = RMSNorm(x) Wᵀ.

    x [1, T, hidden], the last block's output; targets [T] int -> L [], in nats per token
    """
    z = _logits(x, head, eps)
    z_target = mx.take_along_axis(z, targets[None, :, None], axis=-1)[..., 0]
    return mx.mean(mx.logsumexp(z, axis=-1) - z_target)


def cross_entropy_backward(x: mx.array, targets: mx.array, head: Weights, eps: float) -> mx.array:
    """dz = (softmax(z) - onehot(target)) / T,   d_normed = dz W,   dx = RMSNorm's. W is frozen."""
    z = _logits(x, head, eps)
    onehot = mx.arange(z.shape[-1]) == targets[:, None]
    dz = (mx.softmax(z, axis=-1) - onehot) / targets.size
    d_normed = dz @ dequantize(head, "", x.shape[-1])
    return rms_norm_backward(x, d_normed, head["norm"].astype(mx.float32), eps)


def _logits(x: mx.array, head: Weights, eps: float) -> mx.array:
    normed = rms_norm(x, head["norm"].astype(mx.float32), eps)
    return normed @ dequantize(head, "", x.shape[-1]).T


# A block.


def _block_parts(
    weights: Weights, lora: mx.array, arch: Architecture
) -> tuple[dict[str, Projection], mx.array, mx.array]:
    """The projections by their short names (`q`, …, `down`), and the weights of the two norms."""
    matrices = unpack_lora(lora, arch, lora_rank(lora, arch))
    projections = {}
    for name, (_, in_size) in arch.projections().items():
        bias = weights.get(f"{name}.bias")
        projections[name.split(".")[1].removesuffix("_proj")] = Projection(
            dequantize(weights, f"{name}.", in_size),
            None if bias is None else bias.astype(mx.float32),
            *matrices[name],
        )
    return (
        projections,
        weights["input_layernorm.weight"].astype(mx.float32),
        weights["post_attention_layernorm.weight"].astype(mx.float32),
    )


def block_forward(
    x: mx.array, lora: mx.array, scale: float, weights: Weights, arch: Architecture
) -> list[mx.array]:
    """[y, attn_in, q, k, v, attn_out, x_mid, gate, up], shapes as in docs/architecture.md.

    x_mid = x + o_proj(attention(RMSNorm(x)))        y = x_mid + down_proj(swiglu(RMSNorm(x_mid)))
    """
    p, attn_norm, mlp_norm = _block_parts(weights, lora, arch)
    eps, theta = arch.rms_norm_eps, arch.rope_theta
    heads, kv_heads = arch.num_attention_heads, arch.num_key_value_heads

    attn_in = rms_norm(x, attn_norm, eps)
    q = rope(split_heads(linear(attn_in, p["q"], scale), heads), theta)
    k = rope(split_heads(linear(attn_in, p["k"], scale), kv_heads), theta)
    v = split_heads(linear(attn_in, p["v"], scale), kv_heads)
    attn_out = attention(q, k, v)
    x_mid = x + linear(attn_out, p["o"], scale)

    mlp_in = rms_norm(x_mid, mlp_norm, eps)
    gate = linear(mlp_in, p["gate"], scale)
    up = linear(mlp_in, p["up"], scale)
    y = x_mid + linear(swiglu(gate, up), p["down"], scale)
    return [y, attn_in, q, k, v, attn_out, x_mid, gate, up]


def block_backward(
    x: mx.array,
    intermediates: list[mx.array],
    dy: mx.array,
    lora: mx.array,
    scale: float,
    weights: Weights,
    arch: Architecture,
) -> tuple[mx.array, mx.array]:
    """dx [1, T, hidden] and the gradient [P] by the flat LoRA vector.

    From x and the eight intermediates of `block_forward`, last formula first.
    """
    p, attn_norm, mlp_norm = _block_parts(weights, lora, arch)
    eps, theta = arch.rms_norm_eps, arch.rope_theta
    attn_in, q, k, v, attn_out, x_mid, gate, up = intermediates
    grad = {}

    # y = x_mid + down(swiglu(gate(mlp_in), up(mlp_in)))
    d_act, *grad["mlp.down_proj"] = linear_backward(swiglu(gate, up), dy, p["down"], scale)
    d_gate, d_up = swiglu_backward(gate, up, d_act)
    mlp_in = rms_norm(x_mid, mlp_norm, eps)
    d_in_gate, *grad["mlp.gate_proj"] = linear_backward(mlp_in, d_gate, p["gate"], scale)
    d_in_up, *grad["mlp.up_proj"] = linear_backward(mlp_in, d_up, p["up"], scale)
    d_x_mid = dy + rms_norm_backward(x_mid, d_in_gate + d_in_up, mlp_norm, eps)

    # x_mid = x + o(attention(rope(q(attn_in)), rope(k(attn_in)), v(attn_in)))
    d_attn_out, *grad["self_attn.o_proj"] = linear_backward(attn_out, d_x_mid, p["o"], scale)
    dq, dk, dv = attention_backward(q, k, v, attn_out, d_attn_out)
    dq, dk, dv = (merge_heads(d) for d in (rope_backward(dq, theta), rope_backward(dk, theta), dv))
    d_in_q, *grad["self_attn.q_proj"] = linear_backward(attn_in, dq, p["q"], scale)
    d_in_k, *grad["self_attn.k_proj"] = linear_backward(attn_in, dk, p["k"], scale)
    d_in_v, *grad["self_attn.v_proj"] = linear_backward(attn_in, dv, p["v"], scale)
    dx = d_x_mid + rms_norm_backward(x, d_in_q + d_in_k + d_in_v, attn_norm, eps)
    return dx, pack_lora(grad)


# The model, and the three methods.


def forward(model: Model, lora: list[mx.array], tokens: mx.array, scale: float) -> list[mx.array]:
    """The input of each block and the output of the last, [1, T, hidden] each.   tokens [T] int"""
    rows = {name: model.embedding[name][tokens] for name in ("weight", "scales", "biases")}
    hidden = [dequantize(rows, "", model.arch.hidden_size)[None]]
    for block_lora, weights in zip(lora, model.blocks, strict=True):
        hidden.append(block_forward(hidden[-1], block_lora, scale, weights, model.arch)[0])
    return hidden


def loss(model: Model, lora: list[mx.array], window: mx.array, scale: float) -> mx.array:
    """Cross-entropy [] of a window of T + 1 tokens: T inputs and, shifted by one, T targets."""
    y = forward(model, lora, window[:-1], scale)[-1]
    return cross_entropy(y, window[1:], model.head, model.arch.rms_norm_eps)


BlockGradient = Callable[
    [mx.array, mx.array, mx.array, float, Weights, Architecture], tuple[mx.array, mx.array]
]


def mesp_block_gradient(
    x: mx.array,
    dy: mx.array,
    lora: mx.array,
    scale: float,
    weights: Weights,
    arch: Architecture,
) -> tuple[mx.array, mx.array]:
    """MeSP: dx and the flat LoRA gradient of a block by hand. Recomputes the intermediates."""
    _, *intermediates = block_forward(x, lora, scale, weights, arch)
    return block_backward(x, intermediates, dy, lora, scale, weights, arch)


def mebp_block_gradient(
    x: mx.array,
    dy: mx.array,
    lora: mx.array,
    scale: float,
    weights: Weights,
    arch: Architecture,
) -> tuple[mx.array, mx.array]:
    """MeBP: the same by automatic differentiation."""

    def output(x: mx.array, lora: mx.array) -> mx.array:
        return block_forward(x, lora, scale, weights, arch)[0]

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
) -> Gradients:
    """Forward keeping only block inputs, then backward from the last block.   window [T + 1] int"""
    arch, targets = model.arch, window[1:]
    x = forward(model, lora, window[:-1], scale)
    mean_loss = cross_entropy(x[-1], targets, model.head, arch.rms_norm_eps)
    dx = [cross_entropy_backward(x[-1], targets, model.head, arch.rms_norm_eps)]
    d_lora = []
    for i in reversed(range(len(lora))):
        d_input, d_block = block_gradient(x[i], dx[0], lora[i], scale, model.blocks[i], arch)
        dx.insert(0, d_input)
        d_lora.insert(0, d_block)
    return Gradients(mean_loss, x, dx, d_lora)


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
    step: int, seed: int, examples: Sequence[Sequence[int]], seq_len: int
) -> tuple[int, int, int]:
    """The example (start, length, prompt) of the split's `examples` that `step` (from 0) takes,

    its length at most `seq_len` + 1, in the order of `step_window` over those that then have a
    target left. It is tokens[start : start + length]; the loss is the mean over the predictions of
    its tokens max(prompt, 1) to length - 1.
    """
    cut = [(start, min(length, seq_len + 1), prompt) for start, length, prompt in examples]
    usable = [each for each in cut if max(each[2], 1) < each[1]]
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
