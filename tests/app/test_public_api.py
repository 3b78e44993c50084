from pathlib import Path

import pytest

from helpers.swift_package import LIBRARIES, Symbol, public_api, public_symbols

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


def test_everything_public_is_documented(symbols: list[Symbol]):
    mesp = [each for each in symbols if each.module in LIBRARIES]
    assert [".".join(each.path) for each in mesp if not each.is_documented] == []
