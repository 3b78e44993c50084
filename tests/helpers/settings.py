import json
import re
from typing import Any

from helpers.paths import ROOT

LISTED = r'```json\n(\{"bundle": "DIR", "data": null, "output".*?\})\n```'


def documented_settings() -> dict[str, Any]:
    """Returns the settings that a page of docs/ lists, with the paper's defaults."""
    pages = [page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md")]
    (listed,) = [found[1] for page in pages if (found := re.search(LISTED, page, re.DOTALL))]
    return json.loads(listed)
