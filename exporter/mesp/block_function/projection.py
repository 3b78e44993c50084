"""A block's projections: a quantized matrix with its LoRA matrices."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import reduce

import mlx.core as mx

from mesp.block_function import tiles
from mesp.block_function.dequantize import dequantize
from mesp.bundle.layout import Layout
from mesp.models.architecture import Block
from mesp.quantization.modes import Quantization


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
        wide = x.astype(mx.float32)
        packed = (self.weight, self.scales, self.biases)
        if self.device == "gpu":
            # Sums that MLX fuses with what follows; `addmm` would need its addend in an array.
            product = mx.quantized_matmul(
                x.astype(self.dtype), *packed, **asdict(self.quantization)
            )
            y = product.astype(mx.float32) + (self.scale * (wide @ self.a)) @ self.b
            return y if total is None else total + y
        total = mx.addmm(
            mx.array(0.0) if total is None else total,
            wide,
            dequantize(*packed, self.quantization).T,
        )
        return mx.addmm(total, self.scale * (wide @ self.a), self.b)

    def start(self, plus: mx.array | None) -> mx.array | None:
        """What the products are added to: bias + plus, of which both may be missing."""
        terms = [a.astype(mx.float32) for a in (plus, self.bias) if a is not None]
        return reduce(mx.add, terms) if terms else None

    def by_rows(self, x: mx.array, plus: mx.array | None = None) -> mx.array:
        """The same, unpacking few rows of W at a time."""
        parts: list[mx.array] = []
        for rows in tiles.cut(self.b.shape[1], tiles.WIDTH):
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


def projections(
    block: Block, layout: Layout, arrays: dict[str, mx.array], lora: mx.array,
    scale: mx.array, device: str, dtype: mx.Dtype,
) -> dict[str, Projection]:  # fmt: skip
    """The block's projections (`q`, …, `down`) as views of `arrays` and the flat `lora`."""
    modules, start = {}, 0
    sizes = block.sizes()
    rank = lora.size // block.lora_size(1)
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
    places = block.projections()
    return {name: modules[module].outputs(rows) for name, (module, rows, _) in places.items()}
