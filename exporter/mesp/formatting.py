from __future__ import annotations

import math
import re
from typing import Any


def printable(text: str) -> str:
    return "".join(each if each.isprintable() or each in "\n\t" else " " for each in text)


_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def escape(text: str) -> str:
    """Returns the text with an escape such as \u200b for each character that shows nothing."""
    return "".join(
        each
        if each in "\n\t" or (each.isprintable() and not _BLANK.match(each))
        else each.encode("unicode_escape").decode()
        for each in text
    )


def decimal(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def megabytes(size: float | None) -> str:
    return decimal(None if size is None else size / 1e6, 1)


def perplexity(loss: float) -> float | None:
    """Returns exp(loss) for a loss in nats per token, or None for a loss of 700 or more, whose
    perplexity is above every number.
    """
    return math.exp(loss) if loss < 700 else None


def quality(record: dict[str, Any]) -> str:
    accuracy = record.get("accuracy")
    if not isinstance(accuracy, int | float):
        return f"perplexity {decimal(perplexity(record['loss']))}"
    return f"accuracy {accuracy:.0%}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
