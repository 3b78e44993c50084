"""What a bundle is written with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mesp.data.load import DataOptions
from mesp.quantization.choose import Quantizations

DEVICE = "gpu" if mx.metal.is_available() else "cpu"  # where none is asked for
DTYPE_OF = {"cpu": "float32", "gpu": "bfloat16"}  # likewise, by device


@dataclass(frozen=True)
class ExportOptions:
    """What to write, all of it checked: `mesp-export`'s options and what follows from them."""

    out: Path
    data: str | None
    data_options: DataOptions
    seq_lens: list[int]
    ranks: list[int]
    quantizations: Quantizations
    dtype: str
    device: str
    seed: int
    overwrite: bool
