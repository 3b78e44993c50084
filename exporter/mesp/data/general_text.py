from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from mesp.data.plain_text import begin_of_text, cut_text
from mesp.data.source_files import read_text
from mesp.data.splits import Split
from mesp.errors import MespError

SIZE = 1 << 22  # the maximum size of a text in bytes


def read_general_text(file: Path | None, tokenizer: Any, vocab_size: int) -> Split:
    """Returns the tokens of `file`, or of MeSP's own general.txt, as a stream.

    Raises MespError if the file cannot be read, has fewer than two tokens, or has a token outside
    the vocabulary.
    """
    if file is None:
        text = (files("mesp.data") / "general.txt").read_text("utf-8")
    else:
        text = read_text(file, SIZE)
    ids: list[int] = []
    for piece in cut_text(text):
        ids += tokenizer.encode(piece, add_special_tokens=False)
    if len(ids) < 2 or max(ids) >= vocab_size:
        raise MespError(f"{file or 'The general text'} has no tokens that the model knows.")
    return Split(np.array(ids, np.uint32), begin=begin_of_text(tokenizer))
