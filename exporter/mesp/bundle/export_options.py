from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mesp.data.load import DataOptions
from mesp.quantization.choose import Quantizations


@dataclass(frozen=True)
class BundleOptions:
    out: Path
    seq_lens: list[int]
    ranks: list[int]
    overwrite: bool
    pack: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class ExportOptions(BundleOptions):
    data: str | None
    data_options: DataOptions
    quantizations: Quantizations
    dtype: str  # of scales, biases, norms and other vectors
    seed: int
    quantize: str = "least-squares"  # or "nearest"
    calibrate: str | None = None  # data for least-squares quantization; None: random tokens
