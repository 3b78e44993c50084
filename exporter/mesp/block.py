"""The forward pass of a block as the trainer runs it; exported as ``block.T.mlxfn``.

    f(x, lora, scale, weights) -> [y, attn_in, q, k, v, attn_out, x_mid, gate, up]

and with post norms two more, ``o_out`` and ``mlp_out``, which those take.

MLX is lazy: evaluating only ``y`` computes, and holds, only what ``y`` needs. To keep that small
the work is cut into tiles, each made to wait for the one before by `mx.depends`; otherwise MLX
would be free to unpack every tile's weights first. On the CPU a tile's weights are dequantized and
multiplied, as `quantized_matmul` is some 50 times slower there. On the GPU `quantized_matmul` and
the fused attention make no large arrays, and only the MLP is cut, and attention where the fused
one is not (it lacks the soft cap, and heads of other sizes than `FUSED_HEADS`).

The twin for MeBP, ``block.plain.T.mlxfn``, is the same in plain, differentiable operations, uncut.

Arithmetic between these arrays is float32 (the GPU's fused primitives accumulate in it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial, reduce

import mlx.core as mx

from mesp.bundle import Layout, Quantization
from mesp.models.architecture import Architecture
from mesp.models.attention_kinds import Attention

# Outputs of a projection computed at a time. Smaller tiles take less memory but make a larger
# graph, which MLX keeps in memory.
WIDTH = 256
# Query rows in a tile of attention. Few, because a tile reads no key after its last row.
ATTENTION_ROWS = 32
# The head_dim that MLX's fused attention has a kernel for on Metal; for others it holds all scores,
# heads·T·T of them, rounded to the dtype.
FUSED_HEADS = (64, 80, 128)

BlockFunction = Callable[[mx.array, mx.array, mx.array, mx.array], list[mx.array]]


def block_function(
    arch: Architecture, kind: Attention, layout: Layout, device: str, plain: bool = False
) -> BlockFunction:
    """The block function for `device` ("cpu" or "gpu"), or its plain twin.

    It takes x [1, T, hidden], lora [P] float32, scale [] float32 and weights [layout.words] uint32;
    T, the LoRA rank and the dtype (x's) are read off the arguments. docs/architecture.md has the
    outputs' shapes.
    """
    act = ACTIVATIONS[arch.hidden_act]
    fused = device == "gpu" and arch.head_dim in FUSED_HEADS and not arch.attn_logit_softcapping
    attend = partial(
        fused_attention if fused else attention,
        scale=arch.attention_scale,
        cap=arch.attn_logit_softcapping,
    )
    if plain:
        attend = partial(plain_attention, **attend.keywords)
    apply = Projection.__call__ if plain or device == "gpu" else Projection.by_rows
    mlp = plain_mlp if plain else tiled_mlp

    def function(x, lora, scale, weights):
        dtype = x.dtype
        arrays = layout.unpack(weights)
        p = _projections(arch, layout, arrays, lora, scale, device, dtype)
        window = kind.within(x.shape[1]).sliding_window

        def norm(name: str, x: mx.array) -> mx.array:
            function = rms_norm if plain else mx.fast.rms_norm
            return function(x, arrays[name + ".weight"], arch.rms_norm_eps)

        def heads(x: mx.array) -> mx.array:  # [1, T, n·head_dim] -> [1, n, T, head_dim]
            return x.reshape(1, x.shape[1], -1, arch.head_dim).swapaxes(1, 2).astype(dtype)

        everywhere = slice(0, x.shape[1])
        turn = fast_rope(kind) if device == "gpu" and not plain else rope(kind, everywhere)

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
        attn_out = attend(q, place("k", k), v, partial(place, "q"), window=window).astype(dtype)
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
    biases: mx.array | None
    bias: mx.array | None
    a: mx.array  # [in, rank]
    b: mx.array  # [rank, out]
    scale: mx.array
    quantization: Quantization
    device: str
    dtype: mx.Dtype  # of what the GPU multiplies

    def __call__(self, x: mx.array, plus: mx.array | None = None) -> mx.array:
        """y, or y + plus: x [1, T, in] -> float32 [1, T, out]"""
        total = self.start(plus)
        total = mx.array(0.0) if total is None else total
        wide = x.astype(mx.float32)
        packed = (self.weight, self.scales, self.biases)
        if self.device == "gpu":
            x = x.astype(self.dtype)
            total += mx.quantized_matmul(x, *packed, **asdict(self.quantization))
        else:
            total = mx.addmm(total, wide, dequantize(*packed, self.quantization).T)
        return mx.addmm(total, self.scale * (wide @ self.a), self.b)

    def start(self, plus: mx.array | None) -> mx.array | None:
        """What the products are added to: bias + plus, of which both may be missing."""
        terms = [a.astype(mx.float32) for a in (plus, self.bias) if a is not None]
        return reduce(mx.add, terms) if terms else None

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
            biases=None if self.biases is None else self.biases[rows],
            bias=None if self.bias is None else self.bias[rows],
            b=self.b[:, rows],
        )

    def inputs(self, columns: slice) -> Projection:
        """The projection from some of the inputs (whole groups), without the bias.

        Over all of the inputs, what these give adds up to what the whole projection gives.
        """
        bits, group = self.quantization.bits, self.quantization.group_size
        words = slice(columns.start * bits // 32, columns.stop * bits // 32)
        groups = slice(columns.start // group, columns.stop // group)
        return replace(
            self,
            weight=self.weight[:, words],
            scales=self.scales[:, groups],
            biases=None if self.biases is None else self.biases[:, groups],
            bias=None,
            a=self.a[columns],
        )

    def after(self, *done: mx.array) -> Projection:
        """The same projection, not to be computed before `done` is."""
        return replace(self, weight=mx.depends([self.weight], [*done])[0]) if done else self


def _projections(arch, layout, arrays, lora, scale, device, dtype) -> dict[str, Projection]:
    """The block's seven projections as views of `arrays` and the flat `lora`."""
    modules, start = {}, 0
    sizes = arch.sizes()
    rank = lora.size // arch.lora_size(1)
    for name, (out, inp) in sizes.items():
        middle, stop = start + inp * rank, start + (inp + out) * rank
        modules[name] = Projection(
            *(arrays.get(f"{name}.{part}") for part in ("weight", "scales", "biases", "bias")),
            a=lora[start:middle].reshape(inp, rank),
            b=lora[middle:stop].reshape(rank, out),
            scale=scale,
            quantization=Quantization.of(layout, f"{name}.", inp),
            device=device,
            dtype=dtype,
        )
        start = stop
    places = arch.projections()
    return {name: modules[module].outputs(rows) for name, (module, rows, _) in places.items()}


def dequantize(
    weight: mx.array, scales: mx.array, biases: mx.array | None, quantization: Quantization
) -> mx.array:
    """W [out, in] float32 from its packed words.

    As `mx.dequantize`, except that on the CPU it takes less memory and fewer nodes of the graph,
    does not round to bfloat16 where the scales are that, and can be exported in every mode.
    """
    codes = unpack(weight, quantization.bits)
    by_group = partial(mx.reshape, shape=(*scales.shape, -1))
    if biases is not None:
        scales, biases = (a.astype(mx.float32)[..., None] for a in (scales, biases))
        return (by_group(codes) * scales + biases).flatten(1)
    values = e2m1(codes) if quantization.bits == 4 else E4M3[codes]
    if quantization.mode == "nvfp4":
        factors = E4M3[scales]
    else:  # E8M0, an exponent
        factors = mx.power(2.0, scales.astype(mx.float32) - 127)
    return (by_group(values) * factors[..., None]).flatten(1)


def unpack(words: mx.array, bits: int) -> mx.array:
    """The codes in packed words, lowest bits first: uint32 [out, n] -> [out, …], n·32/bits a row"""
    length = 32
    if 32 % bits:  # codes cross words: take as few bytes as hold whole codes for a word
        length = math.lcm(8, bits)
        dtype = mx.uint32 if length <= 32 else mx.uint64
        pieces = words.view(mx.uint8).reshape(words.shape[0], -1, length // 8).astype(dtype)
        words = (pieces << mx.arange(0, length, 8, dtype=dtype)).sum(axis=-1)
    shifts = mx.arange(0, length, bits, dtype=words.dtype)
    return (words[..., None] >> shifts) & (2**bits - 1)


def e2m1(codes: mx.array) -> mx.array:
    """float32 from floating-point numbers of 4 bits: ±0, ½, 1, 1½, 2, 3, 4, 6.

    Twice these are the nibbles of one integer. A gather takes some three times as long on the CPU,
    and multiplying the codes' bits as a float32 depends on subnormal numbers.
    """
    halves = (mx.array(0xC8643210, mx.uint32) >> ((codes & 7) << 2)) & 15
    return halves.astype(mx.float32) * (0.5 - (codes >> 3).astype(mx.float32))


def _e4m3() -> mx.array:
    """float32 [256]: the floating-point numbers of 8 bits (4 of exponent, 3 of mantissa) by code.

    `mx.from_fp8` cannot be exported.
    """
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        magnitude = (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
        values.append(-magnitude if code & 128 else magnitude)
    return mx.array(values)


E4M3 = _e4m3()


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """`mx.fast.rms_norm` in plain operations: computed in float32, x's dtype."""
    wide = x.astype(mx.float32)
    wide = wide * mx.rsqrt(mx.mean(mx.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight


Turn = Callable[[mx.array, slice], mx.array]  # of rows of [1, heads, T, head_dim] by their angles


def fast_rope(kind: Attention) -> Turn:
    """RoPE of the first dimensions in float32, by the fused primitive; the rest stays."""
    if not kind.frequencies:
        return lambda x, rows: x
    size, periods = 2 * len(kind.frequencies), mx.array([1 / f for f in kind.frequencies])
    options = {"traditional": False, "base": None, "scale": 1.0, "freqs": periods}

    def turn(x: mx.array, rows: slice) -> mx.array:
        if kind.rope_scale != 1:
            x = mx.concatenate([x[..., :size] * kind.rope_scale, x[..., size:]], axis=-1)
        return mx.fast.rope(x, size, offset=rows.start, **options)

    return turn


def rope(kind: Attention, everywhere: slice) -> Turn:
    """`fast_rope` in plain operations, which compute the angles once."""
    half = len(kind.frequencies)
    if not half:
        return lambda x, rows: x
    frequencies = mx.reciprocal(mx.array([1 / f for f in kind.frequencies]))
    angle = mx.arange(everywhere.stop, dtype=mx.float32)[:, None] * frequencies
    cos, sin = kind.rope_scale * mx.cos(angle), kind.rope_scale * mx.sin(angle)

    def turn(x: mx.array, rows: slice) -> mx.array:
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        c, s = cos[rows], sin[rows]
        return mx.concatenate([a * c - b * s, a * s + b * c, rest], axis=-1)

    return turn


def soft_cap(scores: mx.array, cap: float | None) -> mx.array:
    return scores if cap is None else cap * mx.tanh(scores / cap)


def visible(rows: slice, keys: slice, window: int | None) -> mx.array:
    """Which of the keys each query row sees: bool [rows, keys]"""
    row, key = mx.arange(rows.start, rows.stop)[:, None], mx.arange(keys.start, keys.stop)
    seen = row >= key
    reaches_back = window is not None and keys.stop - keys.start > window
    return seen & (row < key + window) if reaches_back else seen


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    place: Turn,
    *,
    scale: float,
    cap: float | None,
    window: int | None,
) -> mx.array:
    """Causal grouped-query attention, by tiles of query rows over the keys that they see.

    `k` has been through QK-norm and RoPE; `place` takes each tile of `q` through them.

    q [1, heads, T, head_dim], k and v [1, kv_heads, T, head_dim] -> float32 [1, T, heads·head_dim]
    """
    _, heads, length, head_dim = q.shape
    kv_heads = k.shape[1]
    k, v = k.astype(mx.float32)[0], v.astype(mx.float32)[0]
    parts = []
    for rows in tiles(length, ATTENTION_ROWS):
        keys = slice(max(rows.start - (window or length) + 1, 0), rows.stop)
        tile = q[:, :, rows]
        if parts:
            tile = mx.depends(tile, parts[-1])
        # The query heads that share a key head are rows of one matrix.
        tile = place(tile, rows).reshape(kv_heads, -1, head_dim) * scale
        scores = soft_cap(tile @ k[:, keys].swapaxes(1, 2), cap)
        scores = scores.reshape(heads, rows.stop - rows.start, -1)
        weights = mx.softmax(mx.where(visible(rows, keys, window), scores, -mx.inf), axis=-1)
        out = weights.reshape(kv_heads, -1, weights.shape[-1]) @ v[:, keys]
        parts.append(out.reshape(heads, -1, head_dim).swapaxes(0, 1).flatten(1)[None])
    return mx.concatenate(parts, axis=1)


def fused_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    place: Turn,
    *,
    scale: float,
    cap: None,
    window: int | None,
) -> mx.array:
    """`attention` by the GPU's fused primitive, in v's dtype."""
    everything = slice(0, q.shape[2])
    mask = "causal" if window is None else visible(everything, everything, window)
    q, k = place(q, everything).astype(v.dtype), k.astype(v.dtype)
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    return out.swapaxes(1, 2).flatten(2)


def plain_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    place: Turn,
    *,
    scale: float,
    cap: float | None,
    window: int | None,
) -> mx.array:
    """`attention` without tiles."""
    _, heads, length, head_dim = q.shape
    everything = slice(0, length)
    q, k, v = place(q, everything), k.astype(mx.float32), v.astype(mx.float32)
    q = q.reshape(1, k.shape[1], -1, length, head_dim) * scale
    scores = soft_cap(q @ k[:, :, None].swapaxes(-1, -2), cap)
    scores = mx.where(visible(everything, everything, window), scores, -mx.inf)
    out = mx.softmax(scores, axis=-1) @ v[:, :, None]
    return out.reshape(1, heads, length, head_dim).swapaxes(1, 2).flatten(2)


def silu(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)


def gelu(x: mx.array) -> mx.array:
    """The approximation by tanh, `nn.gelu_approx`."""
    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS = {"silu": silu, "gelu": gelu}


def tiled_mlp(
    x: mx.array, gate: Projection, up: Projection, down: Projection,
    act: Callable[[mx.array], mx.array], plus: mx.array | None,
) -> list[mx.array]:  # fmt: skip
    """[plus + down(act(gate(x)) ∘ up(x)), gate(x), up(x)], float32, of x [1, T, hidden].

    By tiles of the intermediate dimension: each weight is unpacked once however long the sequence.
    """
    y, done, gates, ups = down.start(plus), x, [], []
    for tile in tiles(down.a.shape[0], WIDTH, down.quantization.group_size):
        gates.append(gate.outputs(tile).after(done)(x))
        ups.append(up.outputs(tile).after(gates[-1])(x))
        y = done = down.inputs(tile).after(ups[-1])(act(gates[-1]) * ups[-1], plus=y)
    return [y, mx.concatenate(gates, axis=-1), mx.concatenate(ups, axis=-1)]


def plain_mlp(
    x: mx.array, gate: Projection, up: Projection, down: Projection,
    act: Callable[[mx.array], mx.array], plus: mx.array | None,
) -> list[mx.array]:  # fmt: skip
    """`tiled_mlp` without tiles."""
    gates, ups = gate(x), up(x)
    return [down(act(gates) * ups, plus), gates, ups]
