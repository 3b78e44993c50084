"""The parts of a block that take each token by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mesp.models.mixers import (
    Modules,
    Shape,
    is_size,
    modules_from_manifest,
    projections_of,
    refuse_unsound,
)


@dataclass(frozen=True)
class MLP:
    """down(act(gate(x)) ∘ up(x)); a model may have several that differ in their width."""

    modules: Modules
    intermediate_size: int

    def shapes(self, hidden: int) -> dict[str, Shape]:
        """Its projections."""
        inner = (self.intermediate_size, hidden)
        return {"gate": inner, "up": inner, "down": (hidden, self.intermediate_size)}

    def check(self) -> None:
        """Raises ValueError where a field can't be what it says."""
        refuse_unsound(
            {
                "sizes": is_size(self.intermediate_size),
                "mlp": sorted(projections_of(self.modules)) == ["down", "gate", "up"],
            }
        )


@dataclass(frozen=True)
class PerLayerEmbedding:
    """The term that a block adds to h, its stream behind the MLP: norm(out(act(gate(h)) ∘ p)).

    p [T, size] is made of the token and of the first block's input, for each block another.
    """

    modules: Modules
    size: int

    def shapes(self, hidden: int) -> dict[str, Shape]:
        """Its projections."""
        return {"ple_gate": (self.size, hidden), "ple_out": (hidden, self.size)}

    def check(self) -> None:
        """Raises ValueError where a field can't be what it says."""
        refuse_unsound(
            {
                "sizes": is_size(self.size),
                "modules": sorted(projections_of(self.modules)) == ["ple_gate", "ple_out"],
            }
        )


def mlp_from_manifest(entry: dict[str, Any]) -> MLP:
    """Raises ValueError, TypeError or KeyError where the entry is damaged."""
    return MLP(**{**entry, "modules": modules_from_manifest(entry["modules"])})


def per_layer_from_manifest(entry: dict[str, Any] | None) -> PerLayerEmbedding | None:
    """Raises ValueError, TypeError or KeyError where the entry is damaged."""
    if entry is None:
        return None
    return PerLayerEmbedding(**{**entry, "modules": modules_from_manifest(entry["modules"])})
