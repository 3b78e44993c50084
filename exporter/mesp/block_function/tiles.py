from __future__ import annotations

import math
from collections.abc import Iterator

# The largest number of elements in a tile's array, per token of the sequence. So a longer sequence
# has longer tiles, not more tiles.
NUMBERS_A_TOKEN = 2048

# Query rows in a tile of attention. A tile reads no key after its last row, so small tiles read
# fewer keys.
ATTENTION_ROWS = 32

# Value heads times tokens in a tile of a gated delta net. For any length, FEWEST_HEADS heads may
# share a tile. Smaller tiles save no memory, because the graph grows.
HEADS_BY_TOKENS = 512
# Heads times tokens in a tile of Mamba-2.
STATE_SPACE_HEADS_BY_TOKENS = 2048
FEWEST_HEADS = 2


def cut(size: int, largest: int) -> Iterator[slice]:
    """Cuts range(size) into slices of nearly equal length, with at most `largest` items each."""
    length = math.ceil(size / math.ceil(size / largest))
    for start in range(0, size, length):
        yield slice(start, min(start + length, size))
