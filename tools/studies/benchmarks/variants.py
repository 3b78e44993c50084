import itertools
from typing import Any, NamedTuple

from mesp.errors import MespError

# The offload settings that can be measured, by method. MeZO keeps no block inputs.
OFFLOADS = {
    "mesp": ("none", "inputs", "all"),
    "mebp": ("none", "inputs", "all"),
    "mezo": ("none", "all"),
}
ENGINE_METHODS = tuple(OFFLOADS)

# Settings of the measurements in Python.
MLX_LM = {"kind": "mlx-lm", "checkpoint": False, "fast": False}
PYTHON_METHODS: dict[str, dict[str, Any]] = {
    "mesp-paper": {"kind": "paper", "store_h": False},
    "mesp-store-h": {"kind": "paper", "store_h": True},
    "mlx-lm": MLX_LM,
    "mlx-lm-checkpoint": {**MLX_LM, "checkpoint": True},
    "mlx-lm-fast": {**MLX_LM, "fast": True},
    "mlx-lm-checkpoint-fast": {**MLX_LM, "checkpoint": True, "fast": True},
    "products": {"kind": "products", "recompute": False},
    "products-recomputed": {"kind": "products", "recompute": True},
}
# Settings of `in_peft.train`.
PEFT_METHODS: dict[str, dict[str, Any]] = {
    "torch-peft": {"checkpoint": False},
    "torch-peft-checkpoint": {"checkpoint": True},
}
METHODS = (*ENGINE_METHODS, *PYTHON_METHODS, *PEFT_METHODS)
LIMITS = ("auto", "least", "bar", "mebp", "all")
EVERYTHING_MB = 1e6  # more than all intermediates need


class Variant(NamedTuple):
    """A variant of training.

    `limit` is one of LIMITS or a number of MB. `threads` is the number of BLAS threads, or None for
    the default.
    """

    method: str
    limit: str = "auto"
    offload: str | None = None
    threads: int | None = None

    def __str__(self) -> str:
        limit = self.limit if self.limit in LIMITS else f"≤ {self.limit} MB"
        where = {"none": "in memory", "inputs": "inputs on disk", "all": "state on disk"}
        threads = self.threads and f"{self.threads} thread{'s' * (self.threads > 1)}"
        parts = (self.method, limit != "auto" and limit, where.get(self.offload or ""), threads)
        return " ".join(part for part in parts if part)


def find_variants(
    methods: tuple, limits: tuple, offload: str, threads: tuple[int, ...]
) -> list[Variant]:
    """Returns the variants in the order of the methods. MeBP is first if its peak is a limit."""
    if "mebp" in limits:
        if "mebp" not in methods:
            raise MespError("--memory-limit mebp needs mebp among the --methods.")
        methods = sorted(methods, key=lambda method: method != "mebp")
    variants = []
    for method in methods:
        offloads = [each for each in OFFLOADS.get(method, ()) if offload in (each, "each")]
        choices = itertools.product(
            limits if method == "mesp" else ["auto"], offloads or [None], threads or [None]
        )
        variants += [Variant(method, *choice) for choice in choices]
    return list(dict.fromkeys(variants))
