from __future__ import annotations

import re

NUMBER = re.compile(r"####\s*(-?)\$?\s*(\d[\d,]*(?:\.\d+)?)")


def final_number(text: str) -> str | None:
    """Returns the first number that follows `####`, without commas, or None if there is none."""
    found = NUMBER.search(text)
    return None if found is None else "".join(found.groups()).replace(",", "")
