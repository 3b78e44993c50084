"""Adapters of bundles, written as mlx-lm writes them."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx

from mesp import reference
from mesp.bundle.reader import Bundle

RANK, SCALE = 2, 3.0


def write_adapters(folder: Path, bundle: Path, size: float = 0.1) -> Path:
    """Adapters that matter, of all modules and experts, as mlx-lm writes them."""
    arch = Bundle(bundle, to_run=False).architecture.training_experts()
    matrices = {}
    for i, flat in enumerate(reference.init_lora(arch, RANK, seed=1)):
        flat = flat + size * mx.random.normal(flat.shape, key=mx.random.key(i))
        for name, pair in reference.unpack_lora(flat, arch.blocks[i]).items():
            for part, matrix in zip("ab", pair, strict=True):
                matrix = matrix.swapaxes(1, 2) if matrix.ndim == 3 else matrix
                matrices[f"{arch.mlx_prefix}.layers.{i}.{name}.lora_{part}"] = matrix
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), matrices)
    keys = [*{name for block in arch.kinds for name in block.adapted()}]
    lora = {"rank": RANK, "scale": SCALE, "dropout": 0.0, "keys": keys}
    config = {"num_layers": arch.num_hidden_layers, "lora_parameters": lora}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
