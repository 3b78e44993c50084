"""Dequantizes packed weights to float32, in operations that can be exported in every mode."""

from __future__ import annotations

import math
from functools import partial

import mlx.core as mx

from mesp.models.quantization_formats import Quantization


def dequantize(
    weight: mx.array, scales: mx.array, biases: mx.array | None, quantization: Quantization
) -> mx.array:
    """Returns W [out, in], float32, from its packed words.

    Unlike `mx.dequantize`, this function can be exported in every mode, and does not round to
    bfloat16 if the scales are bfloat16. On the CPU this function also takes less memory and makes
    fewer nodes in the graph.
    """
    codes = unpack(weight, quantization.bits)
    by_group = partial(mx.reshape, shape=(*scales.shape, -1))
    if biases is not None:
        scales, biases = (a.astype(mx.float32)[..., None] for a in (scales, biases))
        return (by_group(codes) * scales + biases).flatten(1)
    values = e2m1(codes) if quantization.bits == 4 else E4M3[codes]
    if quantization.mode == "nvfp4":
        factors = E4M3[scales]
    else:  # E8M0: an exponent
        factors = mx.power(2.0, scales.astype(mx.float32) - 127)
    return (by_group(values) * factors[..., None]).flatten(1)


def unpack(words: mx.array, bits: int) -> mx.array:
    """Returns the codes in packed words, lowest bits first: uint32 [out, n] as [out, n·32/bits]."""
    length = 32
    # Some codes lie in two words, so this reads units of the fewest bytes that hold whole codes.
    if 32 % bits:
        length = math.lcm(8, bits)
        dtype = mx.uint32 if length <= 32 else mx.uint64
        pieces = words.view(mx.uint8).reshape(words.shape[0], -1, length // 8).astype(dtype)
        words = (pieces << mx.arange(0, length, 8, dtype=dtype)).sum(axis=-1)
    shifts = mx.arange(0, length, bits, dtype=words.dtype)
    return (words[..., None] >> shifts) & (2**bits - 1)


def pack(codes: mx.array, bits: int) -> mx.array:
    """Returns codes in packed words, the inverse of `unpack`."""
    length = math.lcm(8, bits) if 32 % bits else 32
    dtype = mx.uint32 if length <= 32 else mx.uint64
    shifts = mx.arange(0, length, bits, dtype=dtype)
    words = (codes.reshape(len(codes), -1, length // bits).astype(dtype) << shifts).sum(axis=-1)
    pieces = words[..., None].view(mx.uint8)[..., : length // 8]
    return pieces.flatten(1).view(mx.uint32)


def e2m1(codes: mx.array) -> mx.array:
    """Returns the float32 values of 4-bit floating-point numbers: ±0, ½, 1, 1½, 2, 3, 4, 6.

    The nibbles of the integer 0xC8643210 are twice the absolute values. Looking the values up by a
    gather would take about three times as long on the CPU. Reading the codes' bits as a float32 and
    multiplying it would depend on subnormal numbers.
    """
    halves = (mx.array(0xC8643210, mx.uint32) >> ((codes & 7) << 2)) & 15
    return halves.astype(mx.float32) * (0.5 - (codes >> 3).astype(mx.float32))


def _e4m3() -> mx.array:
    """Returns the values of 8-bit floating-point numbers by code (4 bits of exponent, 3 of
    mantissa).

    float32 [256]. `mx.from_fp8` cannot be exported. The codes of NaN, 0x7F and 0xFF, are ±480 here,
    as in MLX 0.32.2; no quantizer writes these codes.
    """
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        magnitude = (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
        values.append(-magnitude if code & 128 else magnitude)
    return mx.array(values)


E4M3 = _e4m3()
