"""package_releases.json records facts about the packages' releases, for example the commit and the
tools version.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from helpers.paths import ROOT

HOME = ROOT / "ios" / "MeSPTrainer"
PROJECT = HOME / "MeSPTrainer.xcodeproj"
RESOLVED = PROJECT / "project.xcworkspace" / "xcshareddata" / "swiftpm" / "Package.resolved"
RECORD = json.loads((Path(__file__).parent / "package_releases.json").read_text())
PACKAGES = RECORD["packages"]
OLDEST = RECORD["oldest_xcode"]


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def manifest(folder: Path, wheel: str | None) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "MESP_HOST_MLX"}
    if wheel:
        environment["MESP_HOST_MLX"] = wheel
    command = ["swift", "package", "--package-path", ROOT, "--scratch-path", folder, "dump-package"]
    return json.loads(subprocess.check_output(command, env=environment, text=True))


@pytest.fixture(scope="module")
def app_manifest(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return manifest(tmp_path_factory.mktemp("app"), None)


def asked_for(manifest: dict, *traits: str) -> set[str]:
    found = set()
    for target in manifest["targets"]:
        for dependency in target["dependencies"]:
            _, package, _, condition = dependency.get("product", [None] * 4)
            needed = (condition or {}).get("traits")
            if package and (not needed or not set(needed).isdisjoint(traits)):
                found.add(package)
    return found


@pytest.fixture(scope="module")
def ranges(app_manifest: dict) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """All requirements are ranges of versions, because SwiftPM refuses to use a released package
    that requires a commit of another package.
    """
    found = {}
    for dependency in app_manifest["dependencies"]:
        (package,) = dependency["sourceControl"]
        name = package["identity"]
        (url,) = package["location"]["remote"]
        assert url["urlString"] == (PACKAGES | RECORD["beside_this"])[name]["location"]
        (bounds,) = package["requirement"]["range"]
        found[name] = version(bounds["lowerBound"]), version(bounds["upperBound"])
    release = found.pop("mlx-swift-lm")[0]
    assert release == version(RECORD["beside_this"]["mlx-swift-lm"]["release"])
    return found


@pytest.fixture(scope="module")
def pins() -> dict[str, dict]:
    resolved = json.loads(RESOLVED.read_text(encoding="utf-8"))
    return {pin["identity"]: pin for pin in resolved["pins"]}


@pytest.fixture(scope="module")
def releases(pins: dict[str, dict]) -> dict[str, dict]:
    return {name: PACKAGES[name]["releases"][pin["state"]["version"]] for name, pin in pins.items()}


def test_every_pin_is_the_commit_of_its_release(pins: dict, releases: dict):
    for name, pin in pins.items():
        assert pin["kind"] == "remoteSourceControl"
        assert pin["location"] == PACKAGES[name]["location"]
        assert pin["state"]["revision"] == releases[name]["commit"]
        assert re.fullmatch(r"[0-9a-f]{40}", pin["state"]["revision"])


def test_where_the_wheel_has_mlx_no_package_is_fetched(app_manifest: dict, tmp_path: Path):
    here = manifest(tmp_path, "/wheel/mlx")
    assert [list(each) for each in here["dependencies"]] == [["fileSystem"]]
    for part in ("products", "targets"):
        names = [{each["name"] for each in read[part]} for read in (app_manifest, here)]
        assert names[0] - names[1] == {"MeSPTokenizers", "MeSPMLXLM"}
        assert names[1] - names[0] <= {"Trainer"}, "what the ledger counts, on Linux alone"


def test_an_app_gets_another_package_only_by_a_trait(app_manifest: dict, ranges: dict):
    names = {trait["name"]: trait["enabledTraits"] for trait in app_manifest["traits"]}
    assert names == {"MLXLM": [], "Tokenizers": []}  # none by default
    assert asked_for(app_manifest) == {"mlx-swift"}
    assert (
        asked_for(app_manifest, "Tokenizers") == {"mlx-swift", "swift-transformers"} == set(ranges)
    )
    assert asked_for(app_manifest, "MLXLM") == {"mlx-swift", "mlx-swift-lm"}


def test_what_is_required_is_pinned_and_nothing_else(ranges: dict, pins: dict, releases: dict):
    required = set(ranges)
    for release in releases.values():
        for name, (first, below) in release["requires"].items():
            required.add(name)
            assert version(first) <= version(pins[name]["state"]["version"]) < version(below), name
    assert required == set(pins)


def test_what_the_manifest_requires_is_pinned_to_the_first_of_its_range(ranges: dict, pins: dict):
    for name, (first, _) in ranges.items():
        assert version(pins[name]["state"]["version"]) == first, name


def test_the_pinned_mlx_swift_carries_the_mlx_that_the_core_names(releases: dict):
    support = (HOME / "Bundle" / "MLXSupport.swift").read_text(encoding="utf-8")
    (named,) = re.findall(r'static let version = "(.+)"', support)
    assert RECORD["mlx"][releases["mlx-swift"]["mlx"]] == named


@pytest.mark.parametrize("name", RECORD["beside_this"])
def test_an_app_can_take_this_package_beside_another(name: str, ranges: dict, pins: dict):
    other = RECORD["beside_this"][name]
    theirs = other["requires"] | other["its_readme_requires"]
    common = theirs.keys() & (ranges.keys() | pins.keys())
    assert common >= {"mlx-swift", "swift-transformers"}
    for package in common:
        first, below = map(version, theirs[package])
        assert first <= version(pins[package]["state"]["version"]) < below, package


def test_the_project_takes_packages_by_the_manifest_alone():
    """Only the package's manifest states what the project requires: a second requirement in the
    project could differ.
    """
    project = (PROJECT / "project.pbxproj").read_text(encoding="utf-8")
    assert "XCLocalSwiftPackageReference" in project
    assert "XCRemoteSwiftPackageReference" not in project


def test_the_oldest_xcode_builds_the_pins_without_trust_in_a_plug_in(releases: dict):
    swift = version(RECORD["swift_of_xcode"][OLDEST])
    for name, release in releases.items():
        assert version(release["tools"]) <= swift, name
        assert not release["plugin"], name
    own = ["Package.swift", "ios/HostMLX/Package.swift", "ios/HostMLXLedger/Package.swift"]
    for manifest in (ROOT / path for path in own):
        tools = re.match(r"// swift-tools-version: (\S+)", manifest.read_text(encoding="utf-8"))
        assert version(tools[1]) <= swift


def test_git_keeps_the_projects_pins_and_not_those_of_the_command_line():
    def ignored(path: Path) -> bool:
        command = ["git", "check-ignore", "--quiet", str(path)]
        return subprocess.run(command, cwd=ROOT).returncode == 0

    assert not ignored(RESOLVED)
    assert ignored(ROOT / "Package.resolved")
