"""The options of an export."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from mesp.data.load import DataOptions
from mesp.quantization.choose import Quantizations

DEVICE = "gpu" if mx.metal.is_available() else "cpu"  # the default


@dataclass(frozen=True)
class BundleOptions:
    """The bundle to write, and its functions' lengths, ranks and device. With `pack`, a GPU's
    functions take packed records too.
    """

    out: Path
    seq_lens: list[int]
    ranks: list[int]
    dtype: str
    device: str
    overwrite: bool
    pack: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class ExportOptions(BundleOptions):
    """The checked options of a model's export."""

    data: str | None
    data_options: DataOptions
    quantizations: Quantizations
    seed: int
    quantize: str = "least-squares"  # or "nearest"
    calibrate: str | None = None  # the data that moments are computed from; None: random tokens
