from __future__ import annotations

import math
from functools import partial

import mlx.core as mx

from mesp.models.quantization_formats import Quantization


def dequantize(
    weight: mx.array, scales: mx.array, biases: mx.array | None, quantization: Quantization
) -> mx.array:
    """Returns W [out, in] in float32 from its packed words.

    Unlike `mx.dequantize`, this function can be exported in every quantization mode, and does not
    round to the scales' dtype.
    """
    codes = unpack(weight, quantization.bits)
    by_group = partial(mx.reshape, shape=(*scales.shape, -1))
    if biases is not None:
        scales, biases = (a.astype(mx.float32)[..., None] for a in (scales, biases))
        return (by_group(codes) * scales + biases).flatten(1)
    values = e2m1(codes) if quantization.bits == 4 else E4M3[codes]
    if quantization.mode == "nvfp4":
        factors = E4M3[scales]
    else:
        factors = mx.power(2.0, scales.astype(mx.float32) - 127)
    return (by_group(values) * factors[..., None]).flatten(1)


def unpack(words: mx.array, bits: int) -> mx.array:
    """Unpacks codes from uint32 words [out, n], lowest bits first.

    Returns [out, units, codes in a unit]. A unit is a word or, if `bits` does not divide 32, the
    fewest whole bytes that hold whole codes.
    """
    length = 32
    if 32 % bits:
        length = math.lcm(8, bits)
        dtype = mx.uint32 if length <= 32 else mx.uint64
        pieces = words.view(mx.uint8).reshape(words.shape[0], -1, length // 8).astype(dtype)
        words = (pieces << mx.arange(0, length, 8, dtype=dtype)).sum(axis=-1)
    shifts = mx.arange(0, length, bits, dtype=words.dtype)
    return (words[..., None] >> shifts) & (2**bits - 1)


def pack(codes: mx.array, bits: int) -> mx.array:
    length = math.lcm(8, bits) if 32 % bits else 32
    dtype = mx.uint32 if length <= 32 else mx.uint64
    shifts = mx.arange(0, length, bits, dtype=dtype)
    words = (codes.reshape(len(codes), -1, length // bits).astype(dtype) << shifts).sum(axis=-1)
    pieces = words[..., None].view(mx.uint8)[..., : length // 8]
    return pieces.flatten(1).view(mx.uint32)


def e2m1(codes: mx.array) -> mx.array:
    """Returns the float32 values of 4-bit floating-point codes: ±0, ½, 1, 1½, 2, 3, 4, 6.

    The nibbles of 0xC8643210 are twice the absolute values. A gather takes about three times as
    long on the CPU.
    """
    halves = (mx.array(0xC8643210, mx.uint32) >> ((codes & 7) << 2)) & 15
    return halves.astype(mx.float32) * (0.5 - (codes >> 3).astype(mx.float32))


def _e4m3() -> mx.array:
    """Returns the float32 values [256] of all FP8 codes (E4M3: 4 exponent bits, 3 mantissa bits).

    `mx.from_fp8` cannot be exported. The NaN codes, 0x7F and 0xFF, are ±480 here, as in MLX 0.32.2.
    """
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        magnitude = (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
        values.append(-magnitude if code & 128 else magnitude)
    return mx.array(values)


E4M3 = _e4m3()
