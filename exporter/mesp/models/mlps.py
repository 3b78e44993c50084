from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mesp.models.mixers import (
    Modules,
    Part,
    Shape,
    is_positive,
    is_size,
    modules_from_manifest,
    projections_of,
    refuse_unsound,
)

MOST_EXPERTS = 1 << 12


@dataclass(frozen=True)
class Experts:
    """A mixture of gated MLPs of one width. A router chooses some of them for each token.

        y = Σ w_e down_e(act(gate_e(x)) ∘ up_e(x)),  w_e = scaling · s_e / Σ s

    Both sums run over the chosen experts: the `num_experts_per_tok` experts with the highest scores
    s, after `bias` is added if there is one. With `mlp_gate`, the output of the MLP beside the
    experts is multiplied by sigmoid(x gᵀ). The router and g are frozen.
    """

    router: str  # the name of the linear layer [num_experts, hidden] that is the router
    matrices: str
    # the function that computes the scores s from the router's output: "softmax" or "sigmoid"
    scores: str
    # The name of a bias that is added to the scores for the choice of experts only.
    bias: str | None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    intermediate_size: int = 0
    scaling: float = 1.0
    mlp_gate: str | None = None  # the name of the linear layer [1, hidden] that is g
    trained: bool = False

    def stacked(self, hidden: int) -> dict[str, Shape]:
        inner = (self.intermediate_size, hidden)
        shapes = {"gate_proj": inner, "up_proj": inner, "down_proj": inner[::-1]}
        return {f"{self.matrices}.{name}": shape for name, shape in shapes.items()}

    def hf_modules(self) -> Modules:
        gate, up, down = self.stacked(0)
        experts = f"{self.matrices.rpartition('.')[0]}.experts"
        return ((f"{experts}.gate_up_proj", (gate, up)), (f"{experts}.down_proj", (down,)))

    def linears(self, hidden: int) -> dict[str, Shape]:
        gate = {} if self.mlp_gate is None else {self.mlp_gate: (1, hidden)}
        return {self.router: (self.num_experts, hidden)} | gate

    def vectors(self) -> dict[str, tuple[int, ...]]:
        return {} if self.bias is None else {self.bias: (self.num_experts,)}

    def check(self) -> None:
        names = (self.router, self.matrices, self.bias or "", self.mlp_gate or "")
        sizes = (self.num_experts, self.num_experts_per_tok, self.intermediate_size)
        refuse_unsound(
            {
                "experts' sizes": all(map(is_size, sizes))
                and self.num_experts_per_tok <= self.num_experts <= MOST_EXPERTS,
                "experts' scores": self.scores in ("softmax", "sigmoid"),
                "experts' scaling": is_positive(self.scaling),
                "experts' names": all(type(name) is str for name in names),
            }
        )


@dataclass(frozen=True)
class MLP:
    """down(act(gate(x)) ∘ up(x)), a mixture of experts, or the sum of both."""

    modules: Modules
    intermediate_size: int  # 0 if there are only experts
    experts: Experts | None = None

    def shapes(self, hidden: int) -> dict[str, Shape]:
        inner = (self.intermediate_size, hidden)
        shapes = {"gate": inner, "up": inner, "down": inner[::-1]}
        return shapes if self.modules else {}

    def check(self) -> None:
        if self.experts:
            self.experts.check()
        has_none = self.experts is not None and not self.modules
        gate = self.experts.mlp_gate if self.experts else None
        projections = [] if has_none else ["down", "gate", "up"]
        refuse_unsound(
            {
                "sizes": self.intermediate_size == 0
                if has_none
                else is_size(self.intermediate_size),
                "mlp": sorted(projections_of(self.modules)) == projections,
                "mlp_gate": gate is None or not has_none,
            }
        )

    def to_manifest(self) -> dict[str, Any]:
        entry = {key: value for key, value in asdict(self).items() if value is not None}
        if self.experts:
            del entry["experts"]["trained"]
        return entry


@dataclass(frozen=True)
class PerLayerEmbedding(Part):
    """The per-layer embedding term norm(out(act(gate(h)) ∘ p)), which a block adds to its output h.

    p [tokens, size] is computed from the tokens and the first block's input.
    """

    modules: Modules
    size: int

    def shapes(self, hidden: int) -> dict[str, Shape]:
        return {"ple_gate": (self.size, hidden), "ple_out": (hidden, self.size)}

    def check(self) -> None:
        self._require(self.size)


def mlp_from_manifest(entry: dict[str, Any]) -> MLP:
    experts = entry.get("experts")
    fields = {**entry, "modules": modules_from_manifest(entry["modules"])}
    return MLP(**{**fields, "experts": None if experts is None else Experts(**experts)})


def per_layer_from_manifest(entry: dict[str, Any] | None) -> PerLayerEmbedding | None:
    if entry is None:
        return None
    return PerLayerEmbedding(**{**entry, "modules": modules_from_manifest(entry["modules"])})
