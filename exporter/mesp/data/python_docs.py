from __future__ import annotations

import re

from mesp.data.records import Conversation, Pair, Text

HELD_OUT = 10


def python_docs() -> dict[str, list[Text]]:
    """Returns the prose of Python's language reference, which comes with Python (`help("topics")`).

    Code and grammar are left out, and lines are joined.
    """
    from pydoc_data.topics import topics

    sections, seen = [], set()
    for _, text in sorted(topics.items()):
        sections.append([])
        for block in re.split(r"\n{2,}", text.strip()):
            paragraph = " ".join(block.split())
            prose = not block.startswith("      ") and re.match(r"[A-Z].{40,}\.$", paragraph)
            if prose and paragraph not in seen:
                seen.add(paragraph)
                sections[-1].append(paragraph)
            if sum(map(len, sections[-1])) > 4000:
                sections.append([])
    documents = [
        Text("\n\n".join(each) + "\n", is_file=True, where="python-docs")
        for each in sections
        if each
    ]
    return {
        "train": [each for i, each in enumerate(documents) if i % HELD_OUT != HELD_OUT // 2],
        "valid": documents[HELD_OUT // 2 :: HELD_OUT],
    }


PROMPT_WORDS, ANSWER_WORDS = 8, 12


def python_docs_pairs() -> dict[str, list[Pair]]:
    return {split: _pairs(documents) for split, documents in python_docs().items()}


def _pairs(documents: list[Text]) -> list[Pair]:
    pairs = []
    for document in documents:
        for words in map(str.split, document.text.split("\n\n")):
            prompt, answer = words[:PROMPT_WORDS], words[PROMPT_WORDS:][:ANSWER_WORDS]
            if len(answer) == ANSWER_WORDS:
                both = (f" {' '.join(each)}" for each in (answer, reversed(answer)))
                answers = (Conversation.of(" ".join(prompt), each) for each in both)
                pairs.append(Pair(*answers, where="python-docs-pairs"))
    return pairs
