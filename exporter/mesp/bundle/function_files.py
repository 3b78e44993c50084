from __future__ import annotations

from pathlib import Path

from mesp.block_function import fused
from mesp.block_function.forward_pass import block_function
from mesp.block_function.trace import export_block
from mesp.bundle.export_options import BundleOptions
from mesp.bundle.manifest import BlockGroup
from mesp.errors import MespError
from mesp.models.architecture import Architecture, Block
from mesp.models.layout import DTYPE_OF, DTYPES, Layout


def write_functions(
    folder: Path, arch: Architecture, layouts: list[Layout], options: BundleOptions
) -> list[BlockGroup]:
    """Writes the block functions, a file for each kind and sequence length.

    A GPU's functions, also those for packed records with `options.pack`, have fused primitives.
    Blocks with the same layout, mixer and MLP form a group. Two groups share a file if their
    functions for that sequence length are equal.
    """
    members: dict[tuple[Layout, Block], list[int]] = {}
    for i, described in enumerate(zip(layouts, arch.blocks, strict=True)):
        members.setdefault(described, []).append(i)
    groups: list[BlockGroup] = []
    written: dict[tuple[Layout, Block, str, int], str] = {}
    for number, ((layout, block), layers) in enumerate(members.items()):
        prefix = f"block.{number}." if number else "block."
        group = BlockGroup(tuple(layers), {}, {}, layout)
        kinds = {"": group.functions, "plain.": group.plain_functions}
        kinds |= {"packed.": group.packed_functions} if options.pack else {}
        if block.mlp.experts:
            # A block function cannot choose the experts of each token.
            kinds = {}
        for kind, files in kinds.items():
            fast = None if kind == "plain." else fused
            function = block_function(block, layout, fast)
            device = "gpu" if fast else "cpu"
            dtype, packed = DTYPES[DTYPE_OF[device]], kind == "packed."
            for seq_len in options.seq_lens:
                same = (layout, block.within(seq_len), kind, seq_len)
                if same not in written:
                    written[same] = f"{prefix}{kind}{seq_len}.mlxfn"
                    of_file = (function, block, layout, dtype, device)
                    sizes = ([seq_len], options.ranks, packed)
                    try:
                        export_block(str(folder / written[same]), *of_file, *sizes)
                    except RuntimeError as error:
                        raise MespError(
                            f"Cannot write {options.out}: is the disk full? ({error})"
                        ) from error
                files[str(seq_len)] = written[same]
        groups.append(group)
    return groups
