"""The fused primitives of `mx.fast` for Metal, which any machine can trace.

On a CPU, `mx.fast` traces plain operations instead. An imported function keeps its primitives. So
each function here imports a file with one primitive.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import mlx.core as mx

from mesp.block_function import mlxfn
from mesp.block_function.check import has_attention


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    return _trace("RMSNorm", (eps,), [x, weight], x.shape)


def rope(
    x: mx.array, dims: int, *, traditional: bool, base: None, scale: float, offset: int,
    freqs: mx.array,
) -> mx.array:  # fmt: skip
    """Returns `mx.fast.rope` with `freqs` in place of a base. `freqs` has float32 periods [dims
    / 2]."""
    # MLX ignores the base, 1.0, because it gets periods.
    state = (dims, traditional, 1.0, scale, True)
    return _trace("RoPE", state, [x, mx.array(offset, mx.int32), freqs], x.shape)


def scaled_dot_product_attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: str | mx.array
) -> mx.array:
    """The mask is a bool array or "causal".

    If Metal has no attention kernel for the sizes, plain operations are traced.
    """
    _, heads, length, head_dim = q.shape
    if not has_attention(heads, k.shape[1], length, head_dim):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)
    causal = isinstance(mask, str)
    masks = [] if causal else [mx.broadcast_to(mask, (*q.shape[:3], k.shape[2]))]
    state = (scale, causal, False, False, False)
    return _trace("ScaledDotProductAttention", state, [q, k, v, *masks], q.shape)


def _trace(name: str, state: tuple, inputs: list[mx.array], shape: tuple[int, ...]) -> mx.array:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "function.mlxfn")
        path.write_bytes(mlxfn.one_primitive(name, state, inputs, shape, inputs[0].dtype))
        return mx.import_function(str(path))(*inputs)[0]
