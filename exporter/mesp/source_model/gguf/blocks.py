"""Decodes the blocks of weights in a GGUF file.

A row consists of blocks of 32 to 256 weights. ggml-common.h and ggml-quants.c of
https://github.com/ggml-org/ggml define the types. https://github.com/PrismML-Eng/llama.cpp defines
the types whose names begin with P.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np

from mesp.models.quantization_formats import Quantization

Arrays = tuple[np.ndarray, ...]  # codes, scales and perhaps biases

# Types with groups of 16 weights that no format of MLX represents. Their weights are quantized
# again, to `WIDE`.
REQUANTIZED = ("Q6_K", "Q2_K")
UNQUANTIZED = ("F32", "F16", "BF16")
WIDE = Quantization(8, 32)


def _half(fields: np.ndarray) -> np.ndarray:
    """Converts float16 bytes [..., 2] to float32 [...]."""
    return np.ascontiguousarray(fields).view("<f2")[..., 0].astype(np.float32)


def _nibbles(fields: np.ndarray) -> np.ndarray:
    """Splits bytes [..., n] into codes [..., 2 n]: the low halves of all bytes, then the high
    halves."""
    return np.concatenate([fields & 15, fields >> 4], axis=-1)


def _fifth_bits(fields: np.ndarray) -> np.ndarray:
    """Splits 4 bytes [..., 4] into 32 bits, each as a code of 0 or 16."""
    return np.unpackbits(fields, axis=-1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> Arrays:
    scale = _half(blocks[..., :2])
    return _nibbles(blocks[..., 2:]), scale, -8 * scale


def _q4_1(blocks: np.ndarray) -> Arrays:
    return _nibbles(blocks[..., 4:]), _half(blocks[..., :2]), _half(blocks[..., 2:4])


def _q5_0(blocks: np.ndarray) -> Arrays:
    scale = _half(blocks[..., :2])
    return _fifth_bits(blocks[..., 2:6]) | _nibbles(blocks[..., 6:]), scale, -16 * scale


def _q5_1(blocks: np.ndarray) -> Arrays:
    codes = _fifth_bits(blocks[..., 4:8]) | _nibbles(blocks[..., 8:])
    return codes, _half(blocks[..., :2]), _half(blocks[..., 2:4])


def _q8_0(blocks: np.ndarray) -> Arrays:
    scale = _half(blocks[..., :2])
    return blocks[..., 2:] ^ 128, scale, -128 * scale


def _six_bits(fields: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Decodes 12 bytes [..., 12] to factors of the scales and biases of 8 groups, 6 bits each."""
    low, middle, high = fields[..., :4], fields[..., 4:8], fields[..., 8:]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    biases = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    return scales.astype(np.float32), biases.astype(np.float32)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales, biases = _six_bits(blocks[..., 4:16])
    return _half(blocks[..., :2])[..., None] * scales, -_half(blocks[..., 2:4])[..., None] * biases


def _q4_k(blocks: np.ndarray) -> Arrays:
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32))
    return codes, *_k_scales(blocks)


def _q5_k(blocks: np.ndarray) -> Arrays:
    codes = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32))
    codes = codes.reshape(*blocks.shape[:-1], 8, 32)
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return codes | fifth << 4, *_k_scales(blocks)


def _q3_k(blocks: np.ndarray) -> Arrays:
    """A weight is the scale times an integer in -124…128, the product of a group's factor and a
    code.
    """
    low = _quarters(blocks[..., 32:96].reshape(*blocks.shape[:-1], 2, 32))
    bits = np.arange(8, dtype=np.uint8).reshape(2, 4, 1)
    high = blocks[..., None, None, :32] >> bits & 1
    codes = low.astype(np.int16) + 4 * high.astype(np.int16) - 4
    fields = blocks[..., 96:108]
    factors = np.concatenate([fields[..., :8] & 15, fields[..., :8] >> 4], axis=-1)
    factors = factors | _quarters(fields[..., 8:]).reshape(*factors.shape) << 4
    products = (
        codes.reshape(*blocks.shape[:-1], 16, 16) * (factors.astype(np.int16) - 32)[..., None]
    )
    scale = np.repeat(_half(blocks[..., 108:])[..., None], 2, axis=-1)
    return (products + 124).astype(np.uint8), scale, -124 * scale


def _mxfp4(blocks: np.ndarray) -> Arrays:
    return _nibbles(blocks[..., 1:]), blocks[..., 0]


def _q1_0(blocks: np.ndarray) -> Arrays:
    """Code 0 stands for -d, and code 1 for d, where d is the block's scale."""
    scale = _half(blocks[..., :2])
    return np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little"), 2 * scale, -scale


def _quarters(fields: np.ndarray) -> np.ndarray:
    """Splits bytes [..., n] into 2-bit codes [..., 4, n], with the lowest bits of all bytes
    first."""
    return fields[..., None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3


def _q2_0(blocks: np.ndarray) -> Arrays:
    """A byte holds four neighbouring weights. Codes 0 to 3 are -d, 0, d and 2 d, where d is the
    block's scale.
    """
    scale = _half(blocks[..., :2])
    codes = np.swapaxes(_quarters(blocks[..., 2:]), -1, -2)
    return codes.reshape(*blocks.shape[:-1], -1), scale, -scale


def _of_two_groups(codes: np.ndarray, fields: np.ndarray) -> Arrays:
    scale = np.repeat(_half(fields)[..., None], 2, axis=-1)
    return codes, scale, -scale


def _tq2_0(blocks: np.ndarray) -> Arrays:
    """Codes are as in Q2_0. 32 bytes hold 128 codes: the lowest bits hold the first 32 codes, and
    so on.
    """
    codes = _quarters(blocks[..., :64].reshape(*blocks.shape[:-1], 2, 32))
    return _of_two_groups(codes.reshape(*blocks.shape[:-1], 256), blocks[..., 64:])


def _trits(fields: np.ndarray, count: int) -> np.ndarray:
    """Splits bytes [..., n] into codes 0 to 2 [..., count · n], with the first codes of all bytes
    first.

    The codes are the base-3 digits of the fraction byte / 256.
    """
    powers = (3 ** np.arange(count)).astype(np.uint8)[:, None]
    fractions = (fields[..., None, :] * powers).astype(np.uint16)
    return (fractions * 3 >> 8).astype(np.uint8).reshape(*fields.shape[:-1], -1)


def _tq1_0(blocks: np.ndarray) -> Arrays:
    """A block has 52 bytes of codes. Each of the last four of these bytes holds four codes, and
    each of the other bytes holds five.
    """
    parts = [_trits(blocks[..., :32], 5), _trits(blocks[..., 32:48], 5)]
    codes = np.concatenate([*parts, _trits(blocks[..., 48:52], 4)], axis=-1)
    return _of_two_groups(codes, blocks[..., 52:])


CARRIED: dict[str, tuple[int, Quantization, Callable[[np.ndarray], Arrays]]] = {
    "Q4_0": (18, Quantization(4, 32), _q4_0),
    "Q4_1": (20, Quantization(4, 32), _q4_1),
    "Q5_0": (22, Quantization(5, 32), _q5_0),
    "Q5_1": (24, Quantization(5, 32), _q5_1),
    "Q8_0": (34, Quantization(8, 32), _q8_0),
    "Q3_K": (110, Quantization(8, 128), _q3_k),
    "Q4_K": (144, Quantization(4, 32), _q4_k),
    "Q5_K": (176, Quantization(5, 32), _q5_k),
    "MXFP4": (17, Quantization(4, 32, "mxfp4"), _mxfp4),
    "Q1_0": (18, Quantization(2, 128), _q1_0),
    "Q2_0": (18, Quantization(2, 64), _q2_0),
    "PQ2_0": (34, Quantization(2, 128), _q2_0),
    "TQ1_0": (54, Quantization(2, 128), _tq1_0),
    "TQ2_0": (66, Quantization(2, 128), _tq2_0),
}
# Types that some versions of the gguf package cannot decode.
_NOT_OF_THE_PACKAGE = ("Q1_0", "Q2_0", "PQ2_0")


def arrays(kind: str, data: np.ndarray) -> Arrays:
    size, _, decode = CARRIED[kind]
    parts = decode(data.reshape(len(data), -1, size))
    return tuple(np.ascontiguousarray(part.reshape(len(data), -1)) for part in parts)


def numbers(kind: str, data: np.ndarray) -> np.ndarray:
    if kind not in _NOT_OF_THE_PACKAGE:
        return gguf.dequantize(data, gguf.GGMLQuantizationType[kind])
    codes, *others = arrays(kind, data)
    scales, biases = (np.repeat(each, CARRIED[kind][1].group_size, axis=1) for each in others)
    return scales * codes + biases
