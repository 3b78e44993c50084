"""The options of an export."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from mesp.data.load import DataOptions
from mesp.quantization.choose import Quantizations

DEVICE = "gpu" if mx.metal.is_available() else "cpu"  # where none is asked for


@dataclass(frozen=True)
class BundleOptions:
    """The bundle to write, and what its functions are for; those for a GPU take packed records too
    with `pack`."""

    out: Path
    seq_lens: list[int]
    ranks: list[int]
    dtype: str
    device: str
    overwrite: bool
    pack: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class ExportOptions(BundleOptions):
    """The options of an export of one model, checked."""

    data: str | None
    data_options: DataOptions
    quantizations: Quantizations
    seed: int
    quantize: str = "least-squares"  # or "nearest"
    calibrate: str | None = None  # the data that moments are taken of; None: random tokens
