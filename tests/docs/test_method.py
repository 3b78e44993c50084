import doctest
import re

import pytest

from helpers.paths import ROOT

DOCUMENT = ROOT / "docs" / "method.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
FILES = dict(re.findall(r"^\[(.+)\]: (.+)$", TEXT, re.MULTILINE))
NAMED = sorted(set(re.findall(r"\[`(\w+)`\]\[(.+?)\]", TEXT)))


def examples(text: str) -> list[doctest.Example]:
    found, parser = [], doctest.DocTestParser()
    for fence in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for example in parser.get_examples(fence[1]):
            example.lineno += text.count("\n", 0, fence.start(1))
            found.append(example)
    return found


def test_examples():
    test = doctest.DocTest(examples(TEXT), {}, "method", str(DOCUMENT), 0, TEXT)
    report: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert result.attempted and not result.failed, "".join(report)


@pytest.mark.parametrize("path", FILES.values())
def test_file_exists(path):
    assert (DOCUMENT.parent / path).exists()


@pytest.mark.parametrize(("name", "file"), NAMED)
def test_name_is_declared(name, file):
    code = (DOCUMENT.parent / FILES[file]).read_text(encoding="utf-8")
    assert re.search(rf"^ *(.* )?(def|class|func|struct|enum) {name}\b", code, re.MULTILINE)
