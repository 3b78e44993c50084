import json
from pathlib import Path

import pytest

import mesp
import release
from helpers.commands import invoke
from mesp.errors import MespError

CHANGELOG = """# Changelog

## [0.2.0] - 2026-12-24

### Added

- A thing.

## [0.1.0] - Unreleased

- All.
"""


def test_the_notes_are_the_versions_section():
    assert release.notes(CHANGELOG, "0.2.0", is_tagged=True) == "### Added\n\n- A thing.\n"
    assert release.notes(CHANGELOG, "0.1.0", is_tagged=False) == "- All.\n"


@pytest.mark.parametrize(
    ("version", "said"), [("0.1.0", "says Unreleased: give it a date"), ("0.3.0", "no section")]
)
def test_a_tag_needs_a_section_with_a_date(version: str, said: str):
    with pytest.raises(MespError, match=said):
        release.notes(CHANGELOG, version, is_tagged=True)


def test_another_tag_is_refused(tmp_path: Path):
    done = invoke(release.main, "release.py", "--tag", "v9.9", "--out", tmp_path / "release")
    assert done.returncode == 2 and f"is not v{mesp.__version__}" in done.stderr
    assert not (tmp_path / "release").exists()


def test_notes_and_sbom_are_written(tmp_path: Path):
    done = invoke(release.main, "release.py", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "notes.md").read_text("utf-8").startswith("### ")
    bom = json.loads((tmp_path / f"mesp-{mesp.__version__}.cdx.json").read_text("utf-8"))
    assert bom["metadata"]["component"]["purl"] == f"pkg:pypi/mesp@{mesp.__version__}"
    purls = [part["purl"] for part in bom["components"]]
    assert len(set(purls)) == len(purls)
    for name in ("pypi/mlx@", "pypi/mlx-lm@", "pypi/numpy@", "github/swiftlang/swift@"):
        assert any(purl.startswith(f"pkg:{name}") for purl in purls), name
