import importlib
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from helpers.paths import ROOT

HOME = ROOT / "ios" / "MeSPTrainer"
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"),
    *(ROOT / "SECURITY.md", ROOT / ".github" / "PULL_REQUEST_TEMPLATE.md"),
    *(ROOT / "tools" / "README.md", ROOT / "tools" / "studies" / "README.md"),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(HOME.rglob("*.docc/*.md")),
]
PLACES = {
    **dict.fromkeys(("docs", "exporter", "ios", "tests", "tools"), ROOT),
    **dict.fromkeys(("Adapters", "App", "AppModel", "Bundle", "Control", "Core"), HOME),
    **dict.fromkeys(("Download", "Engine", "Federation", "MeSP", "SelfCheck", "Tokenizers"), HOME),
    "MLXLM": HOME,
    "UITests": HOME,
    "mesp": ROOT / "exporter",
}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def split(page: Path) -> tuple[list[str], list[str]]:
    text = page.read_text(encoding="utf-8")
    parts = re.split(r"^```.*\n", text, flags=re.M)
    assert len(parts) % 2, f"{page.name} has a fence without an end"
    code = "".join(parts[1::2]).replace("\\\n", " ").splitlines()
    return code, "".join(parts[::2]).splitlines()


def code(page: Path) -> Iterator[str]:
    fenced, prose = split(page)
    yield from (line.partition(" #")[0] for line in fenced)
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", "\n".join(prose)):
        yield " ".join(span.split())


def anchors(page: Path) -> set[str]:
    headings = [line.lstrip("#").strip() for line in split(page)[1] if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path):
    prose = "\n".join(split(page)[1])
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", prose):
        path, _, anchor = "".join(target).partition("#")
        if not path.startswith(("http:", "https:")):
            found = page.parent / path if path else page
            if not found.exists() or (anchor and anchor not in anchors(found)):
                broken.append("".join(target))
    assert broken == []


@each_page
def test_targets_of_make_exist(page: Path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z][\w-]*)", "\n".join(code(page))))
    assert named - set(re.findall(r"^([\w-]+):", makefile, flags=re.M)) == set()


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    folders = [ROOT / place for place in ("exporter", "ios", "tests", "tools")]
    paths = [ROOT / "setup.py", *(path for folder in folders for path in folder.rglob("*.*"))]
    return {p.name: p.read_text(encoding="utf-8") for p in paths if p.suffix in (".swift", ".py")}


@each_page
def test_files_and_tests_exist(page: Path, sources: dict[str, str]):
    tests = "".join(text for name, text in sources.items() if re.match(r"test_|\w+Tests\.", name))
    missing = []
    for span in code(page):
        place = PLACES.get(span.split("/")[0])
        if place and re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", span):
            missing += [] if (place / span).exists() else [span]
        elif re.fullmatch(r"\w+\.(swift|py)", span):
            missing += [] if span in sources else [span]
        elif re.fullmatch(r"test_\w+", span):
            missing += [] if f"def {span}(" in tests else [span]
    if page.name in ("reliability.md", "security.md"):  # tables of promises and Swift tests
        rows = "\n".join(line for line in split(page)[1] if line.startswith("|"))
        named = re.findall(r"`([a-z]+[A-Z]\w+)`", rows)
        missing += [name for name in named if f"func {name}(" not in tests]
    assert missing == []


@pytest.fixture(scope="module")
def commands() -> dict[str, list[click.Option]]:
    scripts = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = {
        name: getattr(importlib.import_module(module), function)
        for name, module, function in re.findall(r'^(mesp[-\w]*) = "([\w.]+):(\w+)"', scripts, re.M)
    }
    together = found.pop("mesp")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        for tool in ("bench", "check_gpu", "collect", "push"):
            found[f"tools/{tool}.py"] = runpy.run_path(str(ROOT / "tools" / f"{tool}.py"))["main"]
    with click.Context(together) as context:
        for name in together.list_commands(context):
            found[f"mesp {name}"] = together.get_command(context, name)
    return {
        name: [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
        for name, command in found.items()
    }


@each_page
def test_options_exist(page: Path, commands: dict[str, list[click.Option]]):
    known = {
        command: {name for option in options for name in (*option.opts, *option.secondary_opts)}
        for command, options in commands.items()
    }
    unknown = []
    for line in code(page):
        typed = re.search("|".join(map(re.escape, commands)), line)
        rest = line[typed.end() :] if typed else ""
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest):
            if option not in known[typed[0]]:
                unknown.append(f"{typed[0]} {option}")
    assert unknown == []


def test_help_explains_every_option(commands: dict[str, list[click.Option]]):
    """The guide has no table of all options, so `--help` has to explain each."""
    assert [
        f"{command} {option.opts[-1]}"
        for command, options in commands.items()
        for option in options
        if not option.help
    ] == []


MEASUREMENTS = json.loads((ROOT / "docs" / "measurements.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("measured", MEASUREMENTS, ids=lambda measured: measured["name"])
def test_documents_state_the_figures_that_were_measured(measured: dict[str, Any]):
    value = measured["value"]
    number = value if isinstance(value, str) else f"{value:,}"
    for page, sentences in measured["stated"].items():
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        for sentence in sentences:
            stated = sentence.replace("{:.0f}", f"{value:.0f}" if "{:.0f}" in sentence else "")
            stated = stated.replace("{}", number)
            assert stated in text, f"{page} lacks {stated!r} of docs/measurements.json"


def test_the_first_page_has_the_code_of_the_librarys_page():
    """tests/app compiles the code of the library's page."""
    first, landing = (
        re.findall(r"^```swift\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
        for page in (ROOT / "README.md", HOME / "MeSP" / "MeSP.docc" / "MeSP.md")
    )
    assert first == landing
