from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import reduce

import mlx.core as mx

from mesp.block_function.dequantize import dequantize
from mesp.models.architecture import Block
from mesp.models.layout import Layout
from mesp.models.quantization_formats import Quantization


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
    # x's dtype in a product with packed weights. None: the weights are dequantized first.
    dtype: mx.Dtype | None

    def __call__(self, x: mx.array, plus: mx.array | None = None) -> mx.array:
        """Returns y, or y + plus: x [1, T, in] -> float32 [1, T, out]."""
        wide = x.astype(mx.float32)
        packed = (self.weight, self.scales, self.biases)
        addends = [a.astype(mx.float32) for a in (plus, self.bias) if a is not None]
        total = reduce(mx.add, addends) if addends else None
        if self.dtype is not None:
            # MLX fuses these sums with the operations after them. `addmm` would need its addend in
            # memory.
            product = mx.quantized_matmul(
                x.astype(self.dtype), *packed, **asdict(self.quantization)
            )
            y = product.astype(mx.float32) + (self.scale * (wide @ self.a)) @ self.b
            return y if total is None else total + y
        weight = dequantize(*packed, self.quantization)
        total = mx.addmm(mx.array(0.0) if total is None else total, wide, weight.T)
        return mx.addmm(total, self.scale * (wide @ self.a), self.b)

    def outputs(self, rows: slice) -> Projection:
        return replace(
            self,
            weight=self.weight[rows],
            scales=self.scales[rows],
            biases=None if self.biases is None else self.biases[rows],
            bias=None if self.bias is None else self.bias[rows],
            b=self.b[:, rows],
        )

    def after(self, done: mx.array) -> Projection:
        return replace(self, weight=mx.depends([self.weight], [done])[0])


def projections(
    block: Block, layout: Layout, arrays: dict[str, mx.array], lora: mx.array,
    scale: mx.array, dtype: mx.Dtype | None,
) -> dict[str, Projection]:  # fmt: skip
    modules, start = {}, 0
    sizes = block.sizes()
    rank = lora.size // block.lora_size(1)

    def part(name: str) -> mx.array | None:
        array = arrays.get(name)
        if array is None or dtype is None or not mx.issubdtype(array.dtype, mx.floating):
            return array
        return array.astype(dtype)

    for name, (out, inp) in sizes.items():
        middle, stop = start + inp * rank, start + (inp + out) * rank
        modules[name] = Projection(
            arrays[f"{name}.weight"],
            *(part(f"{name}.{each}") for each in ("scales", "biases")),
            arrays.get(f"{name}.bias"),
            a=lora[start:middle].reshape(inp, rank),
            b=lora[middle:stop].reshape(rank, out),
            scale=scale,
            quantization=Quantization.of(layout, f"{name}.", inp),
            dtype=dtype,
        )
        start = stop
    places = block.projections()
    return {name: modules[module].outputs(rows) for name, (module, rows, _) in places.items()}
