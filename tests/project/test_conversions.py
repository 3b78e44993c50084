import re
from collections.abc import Iterator

from helpers.paths import ROOT

CONVERSION = re.compile(r"\b(?:UInt|Int)(?:8|16|32|64)?\((?!\w+:)")
FLOATING = re.compile(
    r"Double|Float\b|\d\.\d|\de\d|rounded|[sS]econds|[sS]hare|[rR]ate\b|newValue|\bvalue\b"
)


def arguments(text: str) -> Iterator[str]:
    for found in CONVERSION.finditer(text):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        yield text[found.end() : end - 1]


def test_a_floating_point_number_becomes_an_integer_without_a_trap():
    sources = ROOT / "ios" / "MeSPTrainer"
    left = {
        f"{path.relative_to(sources)}: {argument}"
        for path in sources.rglob("*.swift")
        if "Tests" not in path.relative_to(sources).parts[0]
        for argument in arguments(path.read_text(encoding="utf-8"))
        if FLOATING.search(argument)
    }
    # a rate below 1, and bits
    assert left == {
        "Core/Math/Dropout.swift: Double(key.rate) * 0x1p32",
        "Import/PlainFamilies.swift: bfloat16(Float(root))",
    }, "take Int(whole:)"
