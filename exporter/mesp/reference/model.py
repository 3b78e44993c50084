from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import mlx.core as mx

from mesp.bundle.reader import Bundle
from mesp.models.architecture import Architecture, Block
from mesp.models.mixers import Mixer
from mesp.models.quantization_formats import Quantization
from mesp.reference.dropout import Masks
from mesp.reference.pieces import Projection

Weights = dict[str, mx.array]


@dataclass
class Model:
    """Frozen weights. docs/formats.md lists the names of a block's arrays.

    `blocks` has a dictionary for each block. `embedding` and `head` hold the quantized matrix [V,
    hidden] as `weight`, `scales` and, in affine mode, `biases`. `head` also holds `norm` [hidden],
    the final RMSNorm's weight. In a model with tied embeddings, both hold the same matrix.
    """

    arch: Architecture
    blocks: list[Weights]
    embedding: Weights
    head: Weights
    # of per-layer embeddings: the table, a projection, and the norm of the projection's output
    per_layer: Weights = field(default_factory=dict)

    @classmethod
    def of(cls, bundle: Bundle) -> Model:
        arch = bundle.architecture
        blocks = [bundle.block(i) for i in range(arch.num_hidden_layers)]
        return cls(arch, blocks, bundle.embedding(), bundle.head(), bundle.per_layer())


def dequantize(weights: Weights, name: str, in_size: int) -> mx.array:
    """Returns W [out, in], float32, from `name`weight, `name`scales and, if present,
    `name`biases.
    """
    quantization = Quantization.of(weights, name, in_size)
    packed, scales, *biases = (weights[name + part] for part in quantization.parts)
    if biases:
        scales, biases = scales.astype(mx.float32), [biases[0].astype(mx.float32)]
    return mx.dequantize(packed, scales, *biases, **asdict(quantization), dtype=mx.float32)


# LoRA parameters are one flat float32 vector per block. The vector holds A [in, rank] and B [rank,
# out] of each module in the order of `Block.modules`. The projections of a fused module share its
# A, and each uses its own columns of B. If experts are trained, A [experts, in, rank] and B
# [experts, rank, out] of each kind of expert matrix follow. With DoRA, the magnitudes m [out]
# follow each module's B.

Matrices = dict[str, tuple[mx.array, ...]]


def unpack_lora(flat: mx.array, block: Block) -> Matrices:
    matrices: Matrices = {}
    start = 0
    # The vector's size is rank · lora_size(1) + the number of magnitudes. This number is smaller
    # than lora_size(1).
    rank, magnitudes = divmod(flat.size, block.lora_size(1))
    for name, (*stack, out_size, in_size) in block.adapted().items():
        middle = start + math.prod(stack) * in_size * rank
        end = middle + math.prod(stack) * out_size * rank
        matrices[name] = (
            flat[start:middle].reshape(*stack, in_size, rank),
            flat[middle:end].reshape(*stack, rank, out_size),
        )
        start = end
        if magnitudes and not stack:
            start = end + out_size
            matrices[name] += (flat[end:start],)
    return matrices


def experts_lora(flat: mx.array, block: Block) -> Matrices:
    """Returns the LoRA matrices of the experts. The dictionary is empty if the experts are
    frozen."""
    matrices = unpack_lora(flat, block)
    return {name: pair for name, pair in matrices.items() if name not in block.modules}


def pack_lora(matrices: Matrices, block: Block) -> mx.array:
    """Returns the flat vector [P] of each A, B and, with DoRA, m, or of their gradients."""
    return mx.concatenate([m.reshape(-1) for name in block.adapted() for m in matrices[name]])


def init_lora(arch: Architecture, rank: int, seed: int) -> list[mx.array]:
    """Returns an initial flat LoRA vector for each block: A is uniform in ±1/√in, and B is zero."""
    vectors = []
    block_keys = mx.random.split(mx.random.key(seed), arch.num_hidden_layers)
    for block, block_key in zip(arch.blocks, block_keys, strict=True):
        shapes = block.adapted()
        keys = mx.random.split(block_key, len(shapes))
        matrices = {}
        for key, (name, (*stack, out_size, in_size)) in zip(keys, shapes.items(), strict=True):
            bound = 1 / math.sqrt(in_size)
            a = mx.random.uniform(-bound, bound, (*stack, in_size, rank), key=key)
            matrices[name] = (a, mx.zeros((*stack, rank, out_size)))
        vectors.append(pack_lora(matrices, block))
    return vectors


def add_magnitudes(flat: mx.array, weights: Weights, block: Block) -> mx.array:
    """Returns the vector with DoRA's initial magnitudes m added: the norms of the rows of W."""
    matrices = unpack_lora(flat, block)
    for module, (_, in_size) in block.sizes().items():
        m = mx.linalg.norm(dequantize(weights, f"{module}.", in_size), axis=1)
        matrices[module] += (m,)
    return pack_lora(matrices, block)


Stored = Callable[[mx.array], mx.array]


class Parts(NamedTuple):
    """The operands of a block. `stored` is applied to each kept intermediate."""

    p: dict[str, Projection]
    vector: Weights
    eps: float
    mixer: Mixer
    stored: Stored

    @classmethod
    def of(
        cls,
        weights: Weights,
        lora: mx.array,
        block: Block,
        scale: float = 1.0,
        masks: Masks | None = None,
        stored: Stored = lambda x: x,
    ) -> Parts:
        """A projection of a fused module has its own rows of W and bias, and its own columns of B.
        It shares the module's A and dropout mask.
        """
        matrices = unpack_lora(lora, block)
        projections = {}
        for name, (module, rows, (_, in_size)) in block.projections().items():
            bias = weights.get(f"{module}.bias")
            A, B, *m = matrices[module]
            projections[name] = Projection(
                dequantize(weights, f"{module}.", in_size)[rows],
                None if bias is None else bias.astype(mx.float32)[rows],
                A,
                B[:, rows],
                scale,
                weights.get(f"{name}.h"),
                masks[module] if masks else None,
                m[0][rows] if m else None,
            )
        vectors = {
            name: weights[name].astype(mx.float32) for name in (*block.norms(), *block.vectors())
        }
        return cls(projections, vectors, block.arch.rms_norm_eps, block.mixer, stored)

    def of_record(self, record: slice) -> Parts:
        return self._replace(
            p={
                name: each if each.M is None else each._replace(M=each.M[record])
                for name, each in self.p.items()
            }
        )


def fuse(gradients: Matrices, block: Block) -> Matrices:
    """Returns the gradients of each module's LoRA parameters, from those of its projections.

    The projections' dB and dm are concatenated. The projections share A, so their dA are added.
    """
    fused = {}
    for module, names in block.modules.items():
        dA, *others = zip(*(gradients[name] for name in names), strict=True)
        fused[module] = (sum(dA[1:], dA[0]), *(mx.concatenate(each, axis=-1) for each in others))
    return fused
