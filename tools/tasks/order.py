"""Whether a sentence's words are in their order: a classification of real text."""

from __future__ import annotations

from mesp.data.python_docs import python_docs_pairs
from tasks.house import Case

CLASSES = ("straight", "reversed")


def cases(split: str, count: int) -> list[Case]:
    """`count` cases of each class, from the pairs that `python-docs-pairs` makes of the prose of
    Python's language reference: twelve words, as they are and from the last to the first."""
    found = []
    for document in python_docs_pairs()[split][:count]:
        for words, kind in zip(("chosen", "rejected"), CLASSES, strict=True):
            found.append(Case(document.content[words].strip(), kind))
    return found
