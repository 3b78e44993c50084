"""The packages that a first build in Xcode takes, without a Mac: what the manifest and the project
ask for and what Package.resolved pins agree with each other and with what the packages' releases
say of themselves (package_releases.json), and the oldest Xcode that docs/app.md names builds them.
An app can take mlx-swift-lm beside MeSPCore.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest

from helpers.paths import ROOT

HOME = ROOT / "ios" / "MeSPTrainer"
PROJECT = HOME / "MeSPTrainer.xcodeproj"
RESOLVED = PROJECT / "project.xcworkspace" / "xcshareddata" / "swiftpm" / "Package.resolved"
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
RECORD = json.loads((Path(__file__).parent / "package_releases.json").read_text())
PACKAGES = RECORD["packages"]
OLDEST = RECORD["oldest_xcode"]
MANIFEST = (ROOT / "Package.swift").read_text(encoding="utf-8")
APP_PAGE = (ROOT / "docs" / "app.md").read_text(encoding="utf-8")


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def mlx_swift_range() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first mlx-swift that Package.swift takes, and the first that it does not."""
    requirements = re.findall(r'\.package\(url: "(.+?)", (.+)\)\n', MANIFEST)
    ((url, requirement),) = requirements
    assert url == PACKAGES["mlx-swift"]["location"]
    first = version(re.fullmatch(r'\.upToNextMinor\(from: "(.+)"\)', requirement)[1])
    return first, (first[0], first[1] + 1, 0)


@pytest.fixture(scope="module")
def pins() -> dict[str, dict]:
    resolved = json.loads(RESOLVED.read_text(encoding="utf-8"))
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


def test_the_pinned_mlx_swift_is_the_first_in_the_manifests_range(pins: dict):
    assert version(pins["mlx-swift"]["state"]["version"]) == mlx_swift_range()[0]


def test_the_pinned_mlx_swift_carries_the_mlx_that_the_core_names(releases: dict):
    support = (HOME / "Bundle" / "MLXSupport.swift").read_text(encoding="utf-8")
    (named,) = re.findall(r'static let version = "(.+)"', support)
    assert RECORD["mlx"][releases["mlx-swift"]["mlx"]] == named


@pytest.mark.parametrize("name", RECORD["beside_the_core"])
def test_an_app_can_take_this_package_beside_the_core(name: str):
    """Both require mlx-swift alone together, and some version of it suits both."""
    theirs = RECORD["beside_the_core"][name]["requires"]
    (first, below) = map(version, theirs["mlx-swift"])
    our_first, our_below = mlx_swift_range()
    latest_first = max(first, our_first)
    assert latest_first < min(below, our_below)
    assert ".".join(map(str, latest_first)) in PACKAGES["mlx-swift"]["releases"]


def test_the_project_asks_for_the_pinned_swift_transformers(pins: dict):
    project = (PROJECT / "project.pbxproj").read_text(encoding="utf-8")
    (requirement,) = re.findall(r"requirement = \{(.*?)\};", project, flags=re.S)
    settings = dict(re.findall(r"(\w+) = (\S+);", requirement))
    pinned = pins["swift-transformers"]["state"]
    assert settings == {"kind": "revision", "revision": pinned["revision"]}
    assert f'repositoryURL = "{pins["swift-transformers"]["location"]}"' in project


def test_the_oldest_xcode_builds_the_pins_without_trust_in_a_plug_in(releases: dict):
    swift = version(RECORD["swift_of_xcode"][OLDEST])
    for name, release in releases.items():
        assert version(release["tools"]) <= swift, name
        assert not release["plugin"], name
    own = ["Package.swift", "ios/HostMLX/Package.swift", "ios/HostMLXLedger/Package.swift"]
    for manifest in (ROOT / path for path in own):
        tools = re.match(r"// swift-tools-version: (\S+)", manifest.read_text(encoding="utf-8"))
        assert version(tools[1]) <= swift


def test_page_and_workflow_say_what_a_first_build_needs():
    page = " ".join(APP_PAGE.split())
    assert f"Xcode {OLDEST} or newer" in page
    workflow = WORKFLOW.read_text(encoding="utf-8")
    assert f"/Applications/Xcode_{OLDEST}.app" in workflow
    # What every job installs, a person has to install too.
    (installed,) = re.findall(r"- run: (xcodebuild -downloadComponent \w+)", workflow)
    assert installed in page


def test_git_keeps_the_projects_pins_and_not_those_of_the_command_line():
    """The command line's depend on whether MESP_HOST_MLX is set; the app's do not."""

    def ignored(path: Path) -> bool:
        command = ["git", "check-ignore", "--quiet", str(path)]
        return subprocess.run(command, cwd=ROOT).returncode == 0

    assert not ignored(RESOLVED)
    assert ignored(ROOT / "Package.resolved")
