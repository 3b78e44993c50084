"""The answer to a problem of GSM8K: the number after its solution."""

from __future__ import annotations

import re

NUMBER = re.compile(r"####\s*(-?)\$?\s*(\d[\d,]*(?:\.\d+)?)")


def final_number(text: str) -> str | None:
    """Returns the number after the first `####`, without commas; None if there is no number.

    Further text of the model does not count.
    """
    found = NUMBER.search(text)
    return None if found is None else "".join(found.groups()).replace(",", "")
