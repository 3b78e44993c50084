import re
from pathlib import Path

import pytest

from helpers.paths import APP
from helpers.swift_package import Symbol, public_api, public_symbols

API = Path(__file__).with_name("public_api.txt")
HINT = """The public API differs from its list. If it is meant to, say so in CHANGELOG.md, and run
PYTHONPATH=tests .venv/bin/python -m helpers.swift_package | tee tests/app/public_api.txt
"""


@pytest.fixture(scope="module")
def symbols(symbol_graphs: Path) -> list[Symbol]:
    return public_symbols(symbol_graphs)


def of_mesp(symbols: list[Symbol]) -> list[Symbol]:
    found = [each for each in symbols if each.module == "MeSP"]
    assert len(found) > 50
    return found


def test_the_public_api_is_the_one_on_the_list(symbols: list[Symbol]):
    present, listed = public_api(symbols).splitlines(), API.read_text("utf-8").splitlines()
    changed = [f"- {line}" for line in listed if line not in present]
    changed += [f"+ {line}" for line in present if line not in listed]
    assert not changed, "\n".join([HINT, *changed])


def test_the_library_has_few_types(symbols: list[Symbol]):
    mesp = of_mesp(symbols)
    types = [".".join(each.path) for each in mesp if each.is_type and not each.is_in_foreign_type]
    assert 0 < len(types) <= 15, types


def test_everything_public_is_documented(symbols: list[Symbol]):
    mesp = [each for each in symbols if each.module in ("MeSP", "MeSPTokenizers")]
    assert [".".join(each.path) for each in mesp if not each.is_documented] == []


def test_nothing_else_is_public_without_the_app_needing_it(symbols: list[Symbol]):
    """The app's views are outside of the package, so a declaration that they name may be public."""
    places = [APP / place for place in ("App", "Widget")]
    text = "\n".join(file.read_text("utf-8") for place in places for file in place.rglob("*.swift"))

    def is_named(each: Symbol) -> bool:
        if each.module in ("MeSP", "MeSPTokenizers"):
            return True
        if each.is_required or each.kind == "enum.case" or each.name == "appendInterpolation":
            return True
        if each.kind == "subscript":
            return re.search(rf"\[{each.path[-1].partition('(')[2].partition(':')[0]}:", text)
        name = each.path[-2] if each.kind == "init" else each.name
        return re.search(rf"\b{re.escape(name)}\b", text) is not None

    needed = {each for each in symbols if is_named(each)}
    while True:
        said = {each for need in needed for each in need.references}
        words = {word for need in needed for word in re.findall(r"\w+", default_values(need))}
        more = {e for e in symbols if e.identifier in said or e.name in words} - needed
        if not more:
            break
        needed |= more
    assert [f"{e.module}: {e.declaration}" for e in symbols if e not in needed] == []


def default_values(symbol: Symbol) -> str:
    return symbol.declaration.partition(" = ")[2]
