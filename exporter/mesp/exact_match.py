from __future__ import annotations

import json
import re
import string
from collections import Counter


def extract(pattern: re.Pattern[str] | None, text: str) -> str | None:
    """Returns the first match of `pattern` in `text`, or the match's first group if the pattern has
    groups.

    Returns None if nothing matches.
    """
    if pattern is None:
        return text.strip()
    found = pattern.search(text)
    return None if found is None else (found[1 if pattern.groups else 0] or "").strip()


def exact_match(answer: str | None, reference: str, is_json: bool = False) -> bool:
    """Returns whether an answer equals the reference. With `is_json`, compares JSON values instead
    of texts.
    """
    if not is_json:
        return answer == reference
    value = canonical_json(answer or "")
    return value is not None and value == canonical_json(reference)


def f1(answer: str, reference: str) -> float:
    ours, theirs = (_words(text) for text in (answer, reference))
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


def _words(text: str) -> list[str]:
    text = "".join(each for each in text.lower() if each not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def canonical_json(text: str) -> str | None:
    """Returns a JSON text with sorted keys, so that equal values have equal texts, or None if it is
    invalid.
    """

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        value = json.loads(text, parse_constant=refuse, parse_float=_number)
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return None


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value
