"""The packages that a first build in Xcode takes, without a Mac: what the manifest and the project
ask for and what Package.resolved pins agree with each other and with what the packages' releases
say of themselves (package_releases.json), and the oldest Xcode that docs/app.md names builds them.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

from helpers.paths import ROOT
from mesp.block_function import mlxfn

HOME = ROOT / "ios" / "MeSPTrainer"
PROJECT = HOME / "MeSPTrainer.xcodeproj"
RESOLVED = PROJECT / "project.xcworkspace" / "xcshareddata" / "swiftpm" / "Package.resolved"
RECORD = json.loads((Path(__file__).parent / "package_releases.json").read_text())
PACKAGES = RECORD["packages"]
OLDEST = RECORD["oldest_xcode"]
MANIFEST = (ROOT / "Package.swift").read_text(encoding="utf-8")
APP_PAGE = (ROOT / "docs" / "app.md").read_text(encoding="utf-8")


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def mlx_swift_range() -> tuple[str, str]:
    """The first and the last mlx-swift that Package.swift takes."""
    (found,) = re.findall(
        r'"https://github\.com/ml-explore/mlx-swift", "(.+)"\.\.\."(.+)"', MANIFEST
    )
    return found


@pytest.fixture(scope="module")
def pins() -> dict[str, dict]:
    resolved = json.loads(RESOLVED.read_text(encoding="utf-8"))
    # Version 3 adds a hash of the requirements that only Xcode computes; it reads both.
    assert resolved["version"] == 2
    return {pin["identity"]: pin for pin in resolved["pins"]}


@pytest.fixture(scope="module")
def releases(pins: dict[str, dict]) -> dict[str, dict]:
    """The recorded release that each package is pinned to."""
    found = {}
    for name, pin in pins.items():
        state = pin["state"]
        found[name] = PACKAGES[name]["releases"][state.get("version", state["revision"])]
    return found


def test_every_pin_is_the_commit_of_its_release(pins: dict, releases: dict):
    for name, pin in pins.items():
        assert pin["kind"] == "remoteSourceControl"
        assert pin["location"] == PACKAGES[name]["location"]
        assert pin["state"]["revision"] == releases[name]["commit"]
        assert re.fullmatch(r"[0-9a-f]{40}", pin["state"]["revision"])


def test_what_is_required_is_pinned_and_nothing_else(pins: dict, releases: dict):
    required = {"mlx-swift", "swift-transformers"}
    for release in releases.values():
        for name, (first, below) in release["requires"].items():
            required.add(name)
            assert version(first) <= version(pins[name]["state"]["version"]) < version(below), name
    assert required == set(pins)


def test_the_pinned_mlx_swift_is_in_the_manifests_range(pins: dict):
    first, last = mlx_swift_range()
    assert version(first) <= version(pins["mlx-swift"]["state"]["version"]) <= version(last)


def test_every_mlx_swift_in_the_range_carries_the_wheels_mlx():
    """One bundle for all: its functions have the layout of that MLX."""
    first, last = mlx_swift_range()
    recorded = PACKAGES["mlx-swift"]["releases"]
    assert {first, last} <= set(recorded)
    inside = [recorded[v] for v in recorded if version(first) <= version(v) <= version(last)]
    assert len({(each["mlx"], each["mlx-c"]) for each in inside}) == 1
    (mlx,) = {each["mlx"] for each in inside}
    assert RECORD["mlx"][mlx] == mlxfn.MLX


def test_the_project_asks_for_the_pinned_swift_transformers(pins: dict):
    project = (PROJECT / "project.pbxproj").read_text(encoding="utf-8")
    (requirement,) = re.findall(r"requirement = \{(.*?)\};", project, flags=re.S)
    settings = dict(re.findall(r"(\w+) = (\S+);", requirement))
    pinned = pins["swift-transformers"]["state"]
    assert settings == {"kind": "revision", "revision": pinned["revision"]}
    assert f'repositoryURL = "{pins["swift-transformers"]["location"]}"' in project


def test_the_pins_need_neither_the_newest_xcode_nor_trust_in_a_plug_in(releases: dict):
    swift = version(RECORD["swift_of_xcode"][OLDEST])
    for name, release in releases.items():
        assert version(release["tools"]) <= swift, name
        assert not release["plugin"], name
    own = [ROOT / "Package.swift", ROOT / "ios" / "HostMLX" / "Package.swift"]
    for manifest in own:
        tools = re.match(r"// swift-tools-version: (\S+)", manifest.read_text(encoding="utf-8"))
        assert version(tools[1]) <= swift


def test_the_sources_are_in_the_oldest_xcodes_swift():
    """Swift 6.0, the oldest Xcode's, takes no comma after the last argument; Swift 6.1 does."""
    assert RECORD["swift_of_xcode"][OLDEST] == "6.0"
    for source in HOME.rglob("*.swift"):
        text = re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', source.read_text(encoding="utf-8"))
        found = re.search(r",\s*\)", re.sub(r"//.*", "", text))
        assert not found, f"{source.name}, line {text[: found.start()].count(chr(10)) + 1}"


def test_the_page_says_what_a_first_build_needs(pins: dict):
    page = " ".join(APP_PAGE.split())
    assert f"Xcode {OLDEST.removesuffix('.0')} or newer" in page
    assert "xcodebuild -downloadComponent MetalToolchain" in page
    newest = mlx_swift_range()[1]
    needed = version(PACKAGES["mlx-swift"]["releases"][newest]["tools"])
    (xcode,) = [x for x, swift in RECORD["swift_of_xcode"].items() if version(swift) == needed]
    assert f"mlx-swift {pins['mlx-swift']['state']['version']}" in page
    assert f"Xcode {xcode}" in page and "-skipPackagePluginValidation" in page


def test_git_keeps_the_projects_pins_and_not_those_of_the_command_line():
    """The command line's depend on whether MESP_HOST_MLX is set; the app's do not."""

    def ignored(path: Path) -> bool:
        command = ["git", "check-ignore", "--quiet", str(path)]
        return subprocess.run(command, cwd=ROOT).returncode == 0

    assert not ignored(RESOLVED)
    assert ignored(ROOT / "Package.resolved")
