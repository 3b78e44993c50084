"""The kinds of attention in a model, and which layer has which."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mesp.errors import MespError
from mesp.models.config_json import unsupported
from mesp.models.families import FAMILIES
from mesp.models.rope_scaling import rope_frequencies


@dataclass(frozen=True)
class Attention:
    """One kind of attention; most models have one, those with a sliding window two."""

    frequencies: tuple[float, ...]  # radians a position of each rotated pair; empty: no RoPE
    rope_scale: float = 1.0  # multiplies the rotated part of q and k
    sliding_window: int | None = None  # a query at t sees the keys t - window + 1 … t

    def within(self, length: int) -> Attention:
        """The same for sequences of `length` tokens: a window of that many or more is none."""
        unlimited = self.sliding_window is None or self.sliding_window >= length
        return replace(self, sliding_window=None) if unlimited else self


def attention_by_layer(config: dict[str, Any], head_dim: int) -> list[Attention]:
    """The attention of each layer, as Hugging Face's implementation has it."""
    count = config["num_hidden_layers"]
    every = config.get("sliding_window_pattern") or FAMILIES[config["model_type"]].full_every
    types = config.get("layer_types") or [
        "sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)
    ]
    interval = config.get("no_rope_layer_interval", 4)
    has_rope = [True] * count
    if config["model_type"] == "smollm3":
        has_rope = config.get("no_rope_layers") or [(i + 1) % interval for i in range(count)]
    for key, each in (("layer_types", types), ("no_rope_layers", has_rope)):
        if len(each) != count:
            raise MespError(
                f"The model's config.json is not in order: {key} has {len(each)} entries for "
                f"{count} blocks; take an unchanged config.json."
            )

    kinds = []
    for layer_type, rotates in zip(types, has_rope, strict=True):
        if layer_type not in ("full_attention", "sliding_attention"):
            raise unsupported("layer_types", layer_type)
        slides = layer_type == "sliding_attention"
        frequencies, scale = (), 1.0
        if rotates:
            frequencies, scale = rope_frequencies(config, head_dim, local=slides)
        window = config.get("sliding_window") if slides else None
        kinds.append(Attention(frequencies, scale, window or None))
    return kinds
