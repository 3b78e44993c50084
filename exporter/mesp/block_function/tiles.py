"""The sizes of the tiles of a GPU's block function."""

from __future__ import annotations

import math
from collections.abc import Iterator

# The most numbers in a tile's array that is as wide as the MLP, divided by the tokens of the
# sequence. So a longer sequence has longer tiles, but not more tiles.
NUMBERS_A_TOKEN = 2048

# Query rows in a tile of attention. The rows are few, because a tile reads no key after its last
# row: small tiles read fewer keys.
ATTENTION_ROWS = 32

# Value heads times tokens in a tile of a gated delta net. A tile has at least FEWEST_HEADS. With
# smaller tiles, the graph would grow by as much memory as the tiles save.
HEADS_BY_TOKENS = 512
# Heads times tokens in a tile of Mamba-2, whose heads are smaller.
STATE_SPACE_HEADS_BY_TOKENS = 2048
FEWEST_HEADS = 2


def cut(size: int, largest: int) -> Iterator[slice]:
    """Cuts range(size) into slices of nearly equal length, at most `largest`."""
    length = math.ceil(size / math.ceil(size / largest))
    for start in range(0, size, length):
        yield slice(start, min(start + length, size))
