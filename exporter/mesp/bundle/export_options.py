from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mesp.data.load import DataOptions
from mesp.quantization.choose import Quantizations


@dataclass(frozen=True, kw_only=True)
class ExportArguments:
    """The options of `mesp.export`, which documents each."""

    data: str | None = None
    data_options: DataOptions | None = None
    seq_len: int | Sequence[int] = 256
    rank: int | Sequence[int] = 8
    mode: str | None = None
    bits: int | None = None
    group_size: int | None = None
    head_bits: int | None = None
    quantize: str = "least-squares"
    calibrate: str | None = None
    random_weights: bool = False
    layers: int | None = None
    seed: int = 0
    overwrite: bool = False


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
