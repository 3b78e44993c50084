"""The sizes of the tiles of a GPU's block function."""

from __future__ import annotations

import math
from collections.abc import Iterator

# Numbers in an array as wide as the MLP for each token of the sequence: with more tokens kernels
# are longer, not more.
NUMBERS_A_TOKEN = 2048

# Query rows in a tile of attention. Few, because a tile reads no key after its last row.
ATTENTION_ROWS = 32

# Value heads times tokens in a tile of a gated delta net, and how many heads it has at least: a
# head's part of the graph takes as much memory as fewer heads would save.
HEADS_BY_TOKENS = 512
# The same of Mamba-2, whose heads are smaller.
STATE_SPACE_HEADS_BY_TOKENS = 2048
FEWEST_HEADS = 2


def cut(size: int, largest: int) -> Iterator[slice]:
    """Cuts range(size) into slices of about one length, at most `largest`."""
    length = math.ceil(size / math.ceil(size / largest))
    for start in range(0, size, length):
        yield slice(start, min(start + length, size))
