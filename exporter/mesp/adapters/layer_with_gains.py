from __future__ import annotations

import mlx.core as mx
from mlx import nn

from mesp.adapters.load import dequantized
from mesp.dependencies import mlx_lm


class LoRALinearWithGains(mlx_lm.tuner.lora.LoRALinear):
    """y = G ∘ (x Wᵀ) + scale · (x A) B + bias,   G [out]"""

    def __init__(
        self, linear: nn.Module, a: mx.array, b: mx.array, scale: float, gains: mx.array
    ) -> None:
        # mlx-lm's __init__ is not called, because it would make another layer and random matrices.
        nn.Module.__init__(self)
        self.linear, self.lora_a, self.lora_b = linear, a, b
        self.scale, self.gains = scale, gains

    def __call__(self, x: mx.array) -> mx.array:
        bias = self.linear.get("bias", 0.0)
        y = self.gains * (self.linear(x) - bias) + bias
        # In the engine's order, so that both overflow for the same numbers.
        return y + (self.scale * (x @ self.lora_a)) @ self.lora_b

    def fuse(self, dequantize: bool = True) -> nn.Linear:
        weight = dequantized(self.linear).astype(mx.float32)
        outputs, inputs = weight.shape
        fused = nn.Linear(inputs, outputs, bias="bias" in self.linear)
        fused.weight = self.gains[:, None] * weight + self.scale * (self.lora_a @ self.lora_b).T
        if "bias" in self.linear:
            fused.bias = self.linear.bias
        return fused
