from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from mesp.bundle.reader import Bundle
from mesp.data.records import BAD, CHOSEN, GOOD, REJECTED
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.formatting import escape

LONGEST = 2000
OPEN, CLOSE = "⟦", "⟧"
NAMES = {CHOSEN: "chosen", REJECTED: "rejected", GOOD: "good", BAD: "bad"}


def show_records(path: Path, count: int) -> None:
    """The part in the loss is between ⟦ and ⟧, in colour on a terminal. A stream counts as one
    record, which is cut to its first sequence.
    """
    bundle, console = Bundle(path), Console(soft_wrap=True, highlight=False)
    tokenizer = load_bundle_tokenizer(path)
    for record in trained_records(bundle, tokenizer, count):
        console.print(record)
    ends = ", ".join(tokenizer.decode([token]) for token in sorted(tokenizer.eos_token_ids))
    console.print(Text(f"Generation stops at {escape(ends)}."))


def trained_records(bundle: Bundle, tokenizer: Any, count: int) -> Iterator[Text]:
    tokens, mask, labels = bundle.tokens("train"), bundle.mask("train"), bundle.labels("train")
    examples, longest = bundle.examples("train"), max(bundle.manifest.seq_lens)
    if examples is None:
        examples = np.array([[0, min(len(tokens), longest + 1)]], np.uint32)
    for number, (start, length) in enumerate(examples[:count].tolist(), 1):
        ids = tokens[start : start + length].tolist()
        counted = np.ones(length, bool) if mask is None else mask[start : start + length] == 1
        counted[0] = False  # no token predicts the first token
        label = "" if labels is None else f", {NAMES[int(labels[number - 1])]}"
        text = Text(
            f"Record {number} of {len(examples):,}{label}: {length:,} tokens, "
            f"{np.count_nonzero(counted):,} in the loss\n",
            style="dim",
        )
        edges = [0, *(np.flatnonzero(np.diff(counted)) + 1).tolist(), length]
        shown = 0
        for first, stop in pairwise(edges):
            # Some tokenizers decode a space only after another token. So a piece is the difference
            # between two decoded prefixes.
            piece = tokenizer.decode(ids[:stop])[len(tokenizer.decode(ids[:first])) :]
            piece = escape(piece)[: LONGEST - shown].replace("\n", "↵\n")
            shown += len(piece)
            if counted[first]:
                text.append(f"{OPEN}{piece}{CLOSE}", style="bold green")
            else:
                text.append(piece, style="not dim")
            if shown >= LONGEST:
                text.append(" …", style="not dim")
                break
        yield text
