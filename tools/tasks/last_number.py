"""The answer to one of GSM8K's problems: the number after its solution."""

from __future__ import annotations

import re

NUMBER = re.compile(r"####\s*(-?)\$?\s*(\d[\d,]*(?:\.\d+)?)")


def last_number(text: str) -> str | None:
    """What stands after the last `####`, without the commas between thousands; None where there is
    no number."""
    found = NUMBER.findall(text)
    return None if not found else "".join(found[-1]).replace(",", "")
