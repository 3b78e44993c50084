import re
from html.parser import HTMLParser
from pathlib import Path


class Page(HTMLParser):
    def __init__(self, path: Path):
        super().__init__()
        self.text, self.rows, self.references = "", [], []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("th", "td"):
            self.rows[-1].append("")
        for name, value in attributes:
            if name in ("src", "href", "data", "action"):
                self.references.append(value)
            self.references += re.findall(r"url\((.*?)\)", value or "")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    def row(self, name: str) -> list[str]:
        cells = next(row for row in self.rows if row and row[0] == name)
        return [cell.strip() for cell in cells[1:]]
