from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from mesp.block_function import mlxfn
from mesp.block_function.check import check_block_functions
from mesp.block_function.forward_pass import BlockFunction
from mesp.models.architecture import Block
from mesp.models.layout import Layout


def export_block(
    path: str,
    function: BlockFunction,
    block: Block,
    layout: Layout,
    dtype: mx.Dtype,
    device: str,
    seq_lens: list[int],
    ranks: list[int],
    packed: bool = False,
) -> None:
    """Writes `function` to `path` (``….mlxfn``), with a trace for each rank and sequence length.

    Raises RuntimeError or OSError if the file cannot be written, ValueError if
    `check_block_functions` refuses the file, and MespError if the installed MLX has another file
    layout.
    """
    mlxfn.check_mlx()
    with mx.stream(mx.cpu), mx.exporter(path, function) as trace:
        weights = mx.zeros(layout.words, mx.uint32)
        for rank in ranks:
            lora = mx.zeros(block.lora_size(rank))
            for seq_len in seq_lens:
                trace(
                    mx.zeros((1, seq_len, block.arch.hidden_size), dtype),
                    lora,
                    mx.array(1.0),
                    weights,
                    *(mx.zeros(shape, dtype) for shape in block.given_shapes(seq_len)),
                    *([mx.zeros(seq_len, mx.int32)] if packed else []),
                )
    file = Path(path).read_bytes()
    if device != "cpu":
        file = mlxfn.on_device(file, device)
        Path(path).write_bytes(file)
    check_block_functions(file, device, dtype, block, layout.words, seq_lens, ranks, packed)
