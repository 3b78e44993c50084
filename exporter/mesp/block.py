"""The forward pass of a block as the trainer runs it; exported as ``block.T.mlxfn``.

    f(x, lora, scale, weights) -> [y, attn_in, q, k, v, attn_out, x_mid, gate, up]

MLX is lazy: evaluating only ``y`` computes, and holds, only what ``y`` needs. To keep that small
the work is cut into tiles, each made to wait for the one before by `mx.depends`; otherwise MLX
would be free to unpack every tile's weights first. On the CPU a tile's weights are dequantized and
multiplied, as `quantized_matmul` is some 50 times slower there. On the GPU `quantized_matmul` and
the fused attention make no large arrays, and only the MLP is cut.

The twin for MeBP, ``block.plain.T.mlxfn``, is the same in plain, differentiable operations, uncut.

Arithmetic between the nine arrays is float32 (the GPU's fused primitives accumulate in it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import mlx.core as mx

from mesp.bundle import Layout, Quantization
from mesp.models import Architecture

# Outputs of a projection computed at a time. Smaller tiles take less memory but make a larger
# graph, which MLX keeps in memory.
WIDTH = 256
# Query rows in a tile of attention. Few, because a tile reads no key after its last row.
ATTENTION_ROWS = 32

BlockFunction = Callable[[mx.array, mx.array, mx.array, mx.array], list[mx.array]]


def block_function(
    arch: Architecture, quantization: Quantization, layout: Layout, device: str, plain: bool = False
) -> BlockFunction:
    """The block function for `device` ("cpu" or "gpu"), or its plain twin.

    It takes x [1, T, hidden], lora [P] float32, scale [] float32 and weights [layout.words] uint32;
    T, the LoRA rank and the dtype (x's) are read off the arguments. docs/architecture.md has the
    outputs' shapes.
    """

    def function(x, lora, scale, weights):
        arrays = layout.unpack(weights)
        p = _projections(arch, quantization, device, arrays, lora, scale)

        def norm(name: str, x: mx.array) -> mx.array:
            function = rms_norm if plain else mx.fast.rms_norm
            return function(x, arrays[name + ".weight"], arch.rms_norm_eps)

        def rotate(x: mx.array) -> mx.array:
            if plain:
                return rope(x, arch.rope_theta)
            options = {"traditional": False, "base": arch.rope_theta, "scale": 1.0, "offset": 0}
            return mx.fast.rope(x, arch.head_dim, **options)

        def heads(x: mx.array) -> mx.array:  # [1, T, n·head_dim] -> [1, n, T, head_dim]
            return x.reshape(1, x.shape[1], -1, arch.head_dim).swapaxes(1, 2)

        apply = Projection.__call__ if plain or device == "gpu" else Projection.by_rows
        attend = plain_attention if plain else fused_attention if device == "gpu" else attention
        mlp = plain_mlp if plain else tiled_mlp

        attn_in = norm("input_layernorm", x)
        q = rotate(heads(apply(p["q_proj"], attn_in))).astype(x.dtype)
        k = rotate(heads(apply(p["k_proj"].after(q), attn_in))).astype(x.dtype)
        v = heads(apply(p["v_proj"].after(k), attn_in)).astype(x.dtype)
        attn_out = attend(q, k, v).astype(x.dtype)
        x_mid = apply(p["o_proj"].after(attn_out), attn_out, x).astype(x.dtype)

        mlp_in = norm("post_attention_layernorm", x_mid)
        y, gate, up = mlp(x_mid, mlp_in, p["gate_proj"], p["up_proj"], p["down_proj"])
        return [a.astype(x.dtype) for a in (y, attn_in, q, k, v, attn_out, x_mid, gate, up)]

    return function


def export_block(
    path: str,
    function: BlockFunction,
    arch: Architecture,
    layout: Layout,
    dtype: mx.Dtype,
    device: str,
    seq_lens: list[int],
    ranks: list[int],
) -> None:
    """Writes `function` to `path` (``….mlxfn``) with a trace for each sequence length and rank.

    Raises RuntimeError where the file cannot be written.
    """
    with mx.stream(getattr(mx, device)), mx.exporter(path, function) as trace:
        weights = mx.zeros(layout.words, mx.uint32)  # only the shape is read
        for rank in ranks:
            lora = mx.zeros(arch.lora_size(rank))
            for seq_len in seq_lens:
                trace(mx.zeros((1, seq_len, arch.hidden_size), dtype), lora, mx.array(1.0), weights)


def tiles(size: int, largest: int, multiple: int = 1) -> Iterator[slice]:
    """Cuts range(size) into slices of about one length: at most `largest`, and a `multiple`."""
    largest = max(largest // multiple, 1) * multiple
    length = math.ceil(size / math.ceil(size / largest) / multiple) * multiple
    for start in range(0, size, length):
        yield slice(start, min(start + length, size))


@dataclass(frozen=True)
class Projection:
    """y = x Wᵀ + bias + scale · (x A) B; W [out, in] is quantized."""

    weight: mx.array
    scales: mx.array
    biases: mx.array
    bias: mx.array | None
    a: mx.array  # [in, rank]
    b: mx.array  # [rank, out]
    scale: mx.array
    quantization: Quantization
    device: str

    def __call__(self, x: mx.array, plus: mx.array | None = None) -> mx.array:
        """y, or y + plus where there is no bias: x [1, T, in] -> float32 [1, T, out]"""
        plus = self.bias if plus is None else plus
        total = mx.array(0.0) if plus is None else plus.astype(mx.float32)
        wide = x.astype(mx.float32)
        packed = (self.weight, self.scales, self.biases)
        if self.device == "gpu":
            x = x.astype(self.scales.dtype)
            total += mx.quantized_matmul(x, *packed, **asdict(self.quantization))
        else:
            total = mx.addmm(total, wide, dequantize(*packed, self.quantization.bits).T)
        return mx.addmm(total, self.scale * (wide @ self.a), self.b)

    def by_rows(self, x: mx.array, plus: mx.array | None = None) -> mx.array:
        """The same, unpacking few rows of W at a time."""
        parts: list[mx.array] = []
        for rows in tiles(self.b.shape[1], WIDTH):
            tile = self.outputs(rows).after(*parts[-1:])
            parts.append(tile(x, None if plus is None else plus[..., rows]))
        return mx.concatenate(parts, axis=-1)

    def outputs(self, rows: slice) -> Projection:
        """The projection to some of the outputs."""
        return replace(
            self,
            weight=self.weight[rows],
            scales=self.scales[rows],
            biases=self.biases[rows],
            bias=None if self.bias is None else self.bias[rows],
            b=self.b[:, rows],
        )

    def inputs(self, columns: slice) -> Projection:
        """The projection from some of the inputs (whole groups), for a projection without bias.

        Over all of the inputs, what these give adds up to what the whole projection gives.
        """
        bits, group = self.quantization.bits, self.quantization.group_size
        words = slice(columns.start * bits // 32, columns.stop * bits // 32)
        groups = slice(columns.start // group, columns.stop // group)
        return replace(
            self,
            weight=self.weight[:, words],
            scales=self.scales[:, groups],
            biases=self.biases[:, groups],
            a=self.a[columns],
        )

    def after(self, *done: mx.array) -> Projection:
        """The same projection, not to be computed before `done` is."""
        return replace(self, weight=mx.depends([self.weight], [*done])[0]) if done else self


def _projections(arch, quantization, device, arrays, lora, scale) -> dict[str, Projection]:
    """The block's projections as views of `arrays` and the flat `lora`."""
    projections, start = {}, 0
    sizes = arch.projections()
    rank = lora.size // sum(map(sum, sizes.values()))
    for name, (out, inp) in sizes.items():
        middle, stop = start + inp * rank, start + (inp + out) * rank
        projections[name.split(".")[1]] = Projection(
            *(arrays[f"{name}.{part}"] for part in ("weight", "scales", "biases")),
            bias=arrays.get(f"{name}.bias"),
            a=lora[start:middle].reshape(inp, rank),
            b=lora[middle:stop].reshape(rank, out),
            scale=scale,
            quantization=quantization,
            device=device,
        )
        start = stop
    return projections


def dequantize(weight: mx.array, scales: mx.array, biases: mx.array, bits: int) -> mx.array:
    """W [out, in] float32 from its packed words.

    As `mx.dequantize`, except that it takes half the memory and a third of the graph's nodes on
    the CPU, and does not round to bfloat16 where the scales are that.
    """
    shifts = mx.arange(0, 32, bits, dtype=mx.uint32)
    codes = (weight[..., None] >> shifts) & (2**bits - 1)
    scales, biases = (a.astype(mx.float32)[..., None] for a in (scales, biases))
    return (codes.reshape(*scales.shape[:2], -1) * scales + biases).flatten(1)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """`mx.fast.rms_norm` in plain operations: computed in float32, x's dtype."""
    wide = x.astype(mx.float32)
    wide = wide * mx.rsqrt(mx.mean(mx.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


def rope(x: mx.array, theta: float) -> mx.array:
    """`mx.fast.rope` in plain operations, of x float32 [1, heads, T, head_dim]."""
    half = x.shape[-1] // 2
    frequency = mx.exp(mx.arange(half, dtype=mx.float32) * (-math.log(theta) / half))
    angle = mx.arange(x.shape[-2], dtype=mx.float32)[:, None] * frequency
    cos, sin = mx.cos(angle), mx.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return mx.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """Causal grouped-query attention, by tiles of query rows over the keys that they see.

    q [1, heads, T, head_dim], k and v [1, kv_heads, T, head_dim] -> float32 [1, T, heads·head_dim]
    """
    _, heads, length, head_dim = q.shape
    kv_heads = k.shape[1]
    k, v = k.astype(mx.float32)[0], v.astype(mx.float32)[0]
    parts = []
    for rows in tiles(length, ATTENTION_ROWS):
        tile = q[0, :, rows]
        if parts:
            tile = mx.depends(tile, parts[-1])
        # The query heads that share a key head are rows of one matrix.
        tile = tile.astype(mx.float32).reshape(kv_heads, -1, head_dim) * head_dim**-0.5
        scores = tile @ k[:, : rows.stop].swapaxes(1, 2)
        scores = scores.reshape(heads, -1, rows.stop)
        visible = mx.arange(rows.start, rows.stop)[:, None] >= mx.arange(rows.stop)
        weights = mx.softmax(mx.where(visible, scores, -mx.inf), axis=-1)
        out = weights.reshape(kv_heads, -1, rows.stop) @ v[:, : rows.stop]
        parts.append(out.reshape(heads, -1, head_dim).swapaxes(0, 1).flatten(1)[None])
    return mx.concatenate(parts, axis=1)


def fused_attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """`attention` by the GPU's fused primitive, in q's dtype."""
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask="causal")
    return out.swapaxes(1, 2).flatten(2)


def plain_attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    """`attention` without tiles."""
    _, heads, length, head_dim = q.shape
    q, k, v = (a.astype(mx.float32) for a in (q, k, v))
    q = q.reshape(1, k.shape[1], -1, length, head_dim) * head_dim**-0.5
    visible = mx.arange(length)[:, None] >= mx.arange(length)
    scores = mx.where(visible, q @ k[:, :, None].swapaxes(-1, -2), -mx.inf)
    out = mx.softmax(scores, axis=-1) @ v[:, :, None]
    return out.reshape(1, heads, length, head_dim).swapaxes(1, 2).flatten(2)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate * mx.sigmoid(gate) * up


def tiled_mlp(
    x_mid: mx.array, x: mx.array, gate: Projection, up: Projection, down: Projection
) -> list[mx.array]:
    """[x_mid + down(swiglu(gate(x), up(x))), gate(x), up(x)], float32, of x [1, T, hidden].

    By tiles of the intermediate dimension: each weight is unpacked once however long the sequence.
    """
    y, gates, ups = x_mid.astype(mx.float32), [], []
    for tile in tiles(down.a.shape[0], WIDTH, down.quantization.group_size):
        gates.append(gate.outputs(tile).after(y)(x))
        ups.append(up.outputs(tile).after(gates[-1])(x))
        y = down.inputs(tile).after(ups[-1])(swiglu(gates[-1], ups[-1]), plus=y)
    return [y, mx.concatenate(gates, axis=-1), mx.concatenate(ups, axis=-1)]


def plain_mlp(
    x_mid: mx.array, x: mx.array, gate: Projection, up: Projection, down: Projection
) -> list[mx.array]:
    """`tiled_mlp` without tiles."""
    gates, ups = gate(x), up(x)
    return [down(swiglu(gates, ups), plus=x_mid), gates, ups]
