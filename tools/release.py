"""Writes the notes and the SBOM of a release.

\b
  python tools/release.py --tag v0.1.0 --out build/release

The notes are the version's section of CHANGELOG.md. The SBOM is in CycloneDX's format. It has the
packages of .ci/image.txt, with which the image runs, and what a wheel's engine contains. With a
tag, the section must have a date.
"""

import json
import re
from pathlib import Path

import click
from packaging.requirements import Requirement

import mesp
from mesp.commands.command import Command
from mesp.errors import MespError

ROOT = Path(__file__).resolve().parents[1]


def notes(changelog: str, version: str, is_tagged: bool) -> str:
    """Returns the version's section, without its heading."""
    found = re.search(
        rf"^## \[{re.escape(version)}\] - ([^\n]+)\n(.*?)(?=^## \[|\Z)", changelog, re.M | re.S
    )
    if not found:
        raise MespError(f"CHANGELOG.md has no section [{version}]: write one.")
    if is_tagged and not re.fullmatch(r"\d{4}-\d\d-\d\d", found[1]):
        raise MespError(f"The section [{version}] of CHANGELOG.md says {found[1]}: give it a date.")
    return found[2].strip() + "\n"


def sbom(lock: str, dockerfile: str, version: str) -> dict[str, object]:
    packages = [Requirement(each) for each in re.findall(r"^(\S+==.*?) \\$", lock, re.M)]
    swift = re.search(r"^FROM swift:([\d.]+)", dockerfile, re.M)
    assert packages and swift
    parts = {(each.name, next(iter(each.specifier)).version): "pypi" for each in packages}
    parts["swiftlang/swift", swift[1]] = "github"  # its libraries, in the engine of a Linux wheel
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component("pypi", "mesp", version)},
        "components": [component(kind, *part) for part, kind in parts.items()],
    }


def component(kind: str, name: str, version: str) -> dict[str, str]:
    purl = f"pkg:{kind}/{name}@{version}"
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


@click.command(cls=Command, help=__doc__)
@click.option("--tag", default="", help="The release's tag: v and the version.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
def main(tag: str, out: Path) -> None:
    version = mesp.__version__
    if tag not in ("", f"v{version}"):
        raise MespError(f"The tag {tag} is not v{version}, the version in mesp/__init__.py.")
    text = notes((ROOT / "CHANGELOG.md").read_text("utf-8"), version, is_tagged=bool(tag))
    lock = (ROOT / ".ci" / "image.txt").read_text("utf-8")
    bom = sbom(lock, (ROOT / "Dockerfile").read_text("utf-8"), version)
    out.mkdir(parents=True, exist_ok=True)
    (out / "notes.md").write_text(text, "utf-8")
    (out / f"mesp-{version}.cdx.json").write_text(json.dumps(bom, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
