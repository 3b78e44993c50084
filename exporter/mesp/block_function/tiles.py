from __future__ import annotations

import math
from collections.abc import Iterator

# The largest number of elements in an array of an MLP's tile, per token of the sequence, if the
# tile has more than 8 tokens. So a longer sequence has longer tiles, not more tiles.
NUMBERS_A_TOKEN = 2048

# Query rows in a tile of attention.
ATTENTION_ROWS = 32

# The largest product of value heads and tokens in a tile of a gated delta net. A tile may exceed it
# to hold FEWEST_HEADS value heads or the value heads of one key head. Smaller tiles save no memory,
# because the graph grows.
HEADS_BY_TOKENS = 512
# The largest product of heads and tokens in a tile of Mamba-2.
STATE_SPACE_HEADS_BY_TOKENS = 2048
FEWEST_HEADS = 2


def cut(size: int, largest: int) -> Iterator[slice]:
    """Cuts range(size) into slices of one length, which is at most `largest`."""
    length = math.ceil(size / math.ceil(size / largest))
    for start in range(0, size, length):
        yield slice(start, min(start + length, size))
