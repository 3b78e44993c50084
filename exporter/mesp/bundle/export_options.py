from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx

from mesp.data.load import DataOptions
from mesp.quantization.choose import Quantizations

DEVICE = "gpu" if mx.metal.is_available() else "cpu"


@dataclass(frozen=True)
class BundleOptions:
    """The options of the bundle to write. With `pack`, GPU functions for packed records are written
    too.
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
    data: str | None
    data_options: DataOptions
    quantizations: Quantizations
    seed: int
    quantize: str = "least-squares"  # or "nearest"
    calibrate: str | None = None  # data for least-squares quantization; None: random tokens
