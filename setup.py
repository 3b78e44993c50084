"""Puts what the programs in Swift are built from into wheels and sdists; pyproject.toml says all
else."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# The whole packages of SwiftPM: a manifest whose targets are not all there does not load. All but
# MeSPTokenizers, which is no target where MESP_HOST_MLX is set, as it is where these are built.
FOLDERS = (
    "ios/HostMLX/Sources",
    "ios/HostMLX/Tests",
    "ios/HostMLXLedger/Sources",
    "ios/HostMLXLedger/Tests",
    "ios/MeSPTrainer/Adapters",
    "ios/MeSPTrainer/AppModel",
    "ios/MeSPTrainer/Bundle",
    "ios/MeSPTrainer/Control",
    "ios/MeSPTrainer/Core",
    "ios/MeSPTrainer/Download",
    "ios/MeSPTrainer/Engine",
    "ios/MeSPTrainer/Federation",
    "ios/MeSPTrainer/Files",
    "ios/MeSPTrainer/MeSP",
    "ios/MeSPTrainer/SelfCheck",
    "ios/MeSPTrainer/Sentences",
    "ios/MeSPTrainer/Tests",
)
SUFFIXES = (".swift", ".cpp", ".h", ".json", ".txt")
SOURCES = ["Package.swift", "ios/HostMLX/Package.swift", "ios/HostMLXLedger/Package.swift"]
SOURCES += sorted(
    path.as_posix()
    for folder in FOLDERS
    for path in Path(folder).rglob("*")
    if path.suffix in SUFFIXES
)


class BuildWithEngineSources(build_py):
    """Copies them to `mesp/engine/sources`, but for an editable install, which has the checkout."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for source in SOURCES:
            target = Path(self.build_lib, "mesp", "engine", "sources", source)
            self.mkpath(str(target.parent))
            self.copy_file(source, str(target))

    def get_source_files(self) -> list[str]:
        return [*super().get_source_files(), *SOURCES]


setup(cmdclass={"build_py": BuildWithEngineSources})
