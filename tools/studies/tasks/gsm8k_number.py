"""The answer to one of GSM8K's problems: the number after its solution."""

from __future__ import annotations

import re

NUMBER = re.compile(r"####\s*(-?)\$?\s*(\d[\d,]*(?:\.\d+)?)")


def final_number(text: str) -> str | None:
    """Returns the text after the first `####`, without the commas between thousands; None where
    there is no number. Further text of the model does not count.
    """
    found = NUMBER.search(text)
    return None if found is None else "".join(found.groups()).replace(",", "")
