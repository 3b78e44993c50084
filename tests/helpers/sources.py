import shutil
from pathlib import Path

from helpers.paths import ROOT


def copy_sources(target: Path) -> None:
    target.mkdir()
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line.startswith("!"):
            source, copy = ROOT / line[1:], target / line[1:]
            copy.parent.mkdir(exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".build"))
            else:
                shutil.copy(source, copy)
