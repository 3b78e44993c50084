"""What mixes the tokens of a block, by its kind: data that the formulas of the kind read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

Modules = tuple[tuple[str, tuple[str, ...]], ...]  # linear layers, and which projections each is
Shape = tuple[int, int]  # (outputs, inputs) of a projection


@dataclass(frozen=True)
class AttentionMixer:
    """Attention; a model with sliding windows has two that differ in those alone."""

    type: ClassVar[str] = "attention"
    out: ClassVar[str] = "o"  # the projection that what it mixed goes through

    modules: Modules
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_norm: bool
    output_gate: bool  # q_proj gives of each head the query, then the gate of its output
    attention_scale: float
    attn_logit_softcapping: float | None
    frequencies: tuple[float, ...]  # radians a position of each rotated pair; empty: no RoPE
    rope_scale: float = 1.0  # multiplies the rotated part of q and k
    sliding_window: int | None = None  # a query at t sees the keys t - window + 1 … t

    def within(self, length: int) -> AttentionMixer:
        """The same for sequences of `length` tokens: a window of that many or more is none."""
        unlimited = self.sliding_window is None or self.sliding_window >= length
        return replace(self, sliding_window=None) if unlimited else self

    def shapes(self, hidden: int) -> dict[str, Shape]:
        """Its projections."""
        heads = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        queries = 2 * heads if self.output_gate else heads
        return {
            "q": (queries, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden),
            "o": (hidden, heads),
        }

    def norms(self) -> dict[str, int]:
        """The lengths of its norms, by the names of their weights."""
        return {f"self_attn.{each}_norm.weight": self.head_dim for each in "qk" if self.qk_norm}

    def check(self) -> None:
        """Raises ValueError where a field can't be what it says."""
        sizes = [self.num_attention_heads, self.num_key_value_heads, self.head_dim]
        sizes += [] if self.sliding_window is None else [self.sliding_window]
        cap = self.attn_logit_softcapping
        numbers = [self.attention_scale, self.rope_scale, *self.frequencies]
        numbers += [] if cap is None else [cap]
        refuse_unsound(
            {
                "sizes": all(map(is_size, sizes)),
                "numbers": all(map(is_positive, numbers)),
                "flags": type(self.qk_norm) is bool and type(self.output_gate) is bool,
                "num_key_value_heads": self.num_attention_heads % self.num_key_value_heads == 0,
                "frequencies": 2 * len(self.frequencies) <= self.head_dim,
                "modules": sorted(projections_of(self.modules)) == sorted("qkvo"),
            }
        )


Mixer = AttentionMixer
_TYPES: dict[str, type[Mixer]] = {each.type: each for each in (AttentionMixer,)}


def mixer_from_manifest(entry: dict[str, Any]) -> Mixer:
    """Raises ValueError, TypeError or KeyError where the entry is damaged."""
    fields = {**entry, "modules": modules_from_manifest(entry["modules"])}
    if "frequencies" in fields:
        fields["frequencies"] = tuple(fields["frequencies"])
    return _TYPES[fields.pop("type")](**fields)


def modules_from_manifest(entry: list[list]) -> Modules:
    """A JSON list of pairs as `Modules`."""
    return tuple((name, tuple(computes)) for name, computes in entry)


def projections_of(modules: Modules) -> Iterator[str]:
    """The projections that the modules are, in their order."""
    return (name for _, computes in modules for name in computes)


def is_size(value: Any) -> bool:
    """Whether it can be the number of something."""
    return type(value) is int and 0 < value < 1 << 31


def is_positive(value: Any) -> bool:
    """Whether it is a finite number above 0."""
    return type(value) in (int, float) and 0 < value < math.inf


def refuse_unsound(checks: dict[str, Any]) -> None:
    """Raises ValueError naming the first of the checks that does not hold."""
    for what, is_sound in checks.items():
        if not is_sound:
            raise ValueError(f"its {what} cannot be used")
