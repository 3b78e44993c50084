"""The forward pass of a source model. Matrices are read and multiplied in tiles of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import mlx.core as mx
import numpy as np

from mesp.block_function.attention import keys_and_values, soft_cap
from mesp.block_function.dequantize import dequantize
from mesp.block_function.forward_pass import forward
from mesp.block_function.parts import Parts, rms_norm
from mesp.block_function.rope import rope
from mesp.block_function.tiles import cut
from mesp.models.architecture import Architecture
from mesp.models.tensor_names import name_of_expert
from mesp.models.weights import Weights, read_norm
from mesp.quantization.choose import Quantizations
from mesp.quantization.quantize_rows import read_rows

TILE = 1 << 22

Seen = Callable[[str, mx.array], None]


def product(x: mx.array, W: mx.array) -> mx.array:
    """Returns x Wᵀ, computed by NumPy. In MLX's Linux wheels, the product is much slower."""
    return mx.array(np.asarray(x.astype(mx.float32)) @ np.asarray(W).T)


@dataclass(frozen=True)
class SourceProjection:
    """A projection x Wᵀ + bias in float32, with W [out, in] and bias [out] or None."""

    read: Callable[[slice], mx.array]  # returns rows of W
    shape: tuple[int, int]
    bias: mx.array | None = None
    seen: Callable[[mx.array], None] = lambda x: None

    def __call__(self, x: mx.array, plus: mx.array | None = None) -> mx.array:
        self.seen(x)
        tiles = cut(self.shape[0], max(TILE // self.shape[1], 1))
        y = mx.concatenate([product(x, self.read(rows)) for rows in tiles], axis=-1)
        terms = [each for each in (self.bias, plus) if each is not None]
        return sum(terms, y)


@dataclass
class SideInputs:
    tokens: Sequence[int]
    x0: mx.array  # the first block's input
    shared: dict[int, tuple[mx.array, mx.array]] = field(default_factory=dict)


@dataclass(frozen=True)
class SourceModel:
    weights: Weights
    arch: Architecture
    quantizations: Quantizations  # as in the source's files

    def matrix(
        self, name: str, shape: tuple[int, int], rows: slice, expert: int | None = None
    ) -> mx.array:
        """Returns some rows of a matrix [out, in], float32."""
        stacked, name = name, name if expert is None else name_of_expert(name, expert)
        if not self.weights.is_quantized(name):
            return self.weights.rows(f"{name}.weight", shape, rows).astype(mx.float32)
        quantization = self.quantizations.in_files(stacked)
        packed, scales, *biases = read_rows(self.weights, name, shape, quantization, rows)
        return dequantize(packed, scales, *(biases or [None]), quantization.in_bundle)

    def embed(self, tokens: Sequence[int]) -> mx.array:
        """Returns the input of the first block, float32 [1, T, hidden]."""
        rows = [self.table("model.embed_tokens", slice(t, t + 1)) for t in tokens]
        return self.arch.embedding_scale * mx.concatenate(rows)[None]

    def table(self, name: str, rows: slice) -> mx.array:
        return self.matrix(name, (self.arch.vocab_size, self.arch.hidden_size), rows)

    def per_layer(self, index: int, side: SideInputs) -> mx.array | None:
        """Returns a layer's part of the per-layer embeddings [1, T, size], or None if the model has
        none.
        """
        if self.arch.per_layer is None:
            return None
        size, shapes = self.arch.per_layer.size, self.arch.per_layer_shapes
        of_layer = slice(index * size, (index + 1) * size)
        table, projection = shapes
        rows = [self.matrix(table, shapes[table], slice(t, t + 1)) for t in side.tokens]
        e = mx.concatenate(rows)[:, of_layer] * math.sqrt(size)
        r = product(side.x0, self.matrix(projection, shapes[projection], of_layer))
        norm = "model.per_layer_projection_norm.weight"
        weight = read_norm(self.weights, norm, (size,), self.arch)
        r = rms_norm(r / math.sqrt(self.arch.hidden_size), weight, self.arch.rms_norm_eps)
        return (r + e) / math.sqrt(2)

    def block(
        self, index: int, x: mx.array, side: SideInputs, seen: Seen = lambda module, x: None
    ) -> mx.array:
        """Returns the output of a block for the input x [1, T, hidden]."""
        block, prefix, weights = self.arch.blocks[index], f"model.layers.{index}.", self.weights

        def vector(name: str, shape: tuple[int, ...]) -> mx.array:
            return weights.rows(prefix + name, shape, slice(0, shape[0])).astype(mx.float32)

        arrays = {
            name: read_norm(weights, prefix + name, (size,), self.arch)
            for name, size in block.norms().items()
        }
        arrays |= {name: vector(name, shape) for name, shape in block.vectors().items()}
        sizes, biases = block.matrices(), block.biases()

        def projection(module: str, rows: slice, shape: tuple[int, int]) -> SourceProjection:
            def read(some: slice) -> mx.array:
                some = slice(rows.start + some.start, rows.start + some.stop)
                return self.matrix(prefix + module, sizes[module], some)

            bias = vector(f"{module}.bias", (biases[module],))[rows] if module in biases else None
            # All projections of a fused module have the same input, so `seen` is called for the
            # first only.
            is_first = rows.start == 0
            return SourceProjection(
                read, shape, bias, lambda x: seen(module, x) if is_first else None
            )

        p = {name: projection(*rows) for name, rows in block.projections().items()}
        for name, shape in block.frozen().items():
            p[name] = projection(name, slice(0, shape[0]), shape)

        def expert(number: int) -> list[SourceProjection]:
            return [
                SourceProjection(partial(self.matrix, prefix + name, shape, expert=number), shape)
                for name, shape in block.stacked().items()
            ]

        eps = self.arch.rms_norm_eps
        parts = Parts(
            p, arrays, eps, mx.float32, fast=None,
            per_layer=self.per_layer(index, side),
            shared=None if block.keys_of is None else side.shared[block.keys_of],
            expert=expert,
        )  # fmt: skip
        y, _, _, k, v, *_ = forward(block, parts, x)
        if index in self.arch.owners:
            turn = rope(block.mixer, slice(0, x.shape[1]))
            side.shared[index] = keys_and_values(block.mixer, parts, turn, k, v)
            mx.eval(*side.shared[index])
        mx.eval(y)
        return y

    def final(self, x: mx.array) -> mx.array:
        size, arch = (self.arch.hidden_size,), self.arch
        weight = read_norm(self.weights, "model.norm.weight", size, arch) / arch.logits_scaling
        return rms_norm(x, weight, arch.rms_norm_eps)

    def logits(self, final: mx.array, rows: slice) -> mx.array:
        name = "model.embed_tokens" if self.arch.tie_word_embeddings else "lm_head"
        z = product(final, self.table(name, rows))
        return soft_cap(z, self.arch.final_logit_softcapping)
