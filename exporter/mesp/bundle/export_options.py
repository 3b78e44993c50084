from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mesp.data.load import DataOptions
from mesp.quantization.choose import Quantizations


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """The options of `mesp.export`, which documents each."""

    data: str | None
    data_options: DataOptions | None
    seq_len: int | Sequence[int]
    rank: int | Sequence[int]
    mode: str | None
    bits: int | None
    group_size: int | None
    head_bits: int | None
    quantize: str
    calibrate: str | None
    random_weights: bool
    layers: int | None
    seed: int
    overwrite: bool


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
