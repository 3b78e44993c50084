"""Adds files to the distributions that pyproject.toml describes.

- Wheels and sdists get the sources of the programs.
- The wheel of a platform also gets the built programs.
- All of them get the README in the form for PyPI.
"""

import re
import tomllib
from pathlib import Path
from typing import ClassVar

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

# Whole SwiftPM packages, because a manifest does not load if a target is missing. MeSPMLXLM and
# MeSPTokenizers are left out: they are no targets if MESP_HOST_MLX is set.
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
    "ios/MeSPTrainer/Example",
    "ios/MeSPTrainer/Federation",
    "ios/MeSPTrainer/Files",
    "ios/MeSPTrainer/Import",
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
# The license of a wheel with programs; tools/platform_wheel_notice.txt has the notices.
LICENSE_OF_PROGRAMS = "MIT AND Apache-2.0 WITH Swift-exception AND Unicode-3.0"


class BuildWithEngineSources(build_py):
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


class WheelWithPrograms(bdist_wheel):
    """With `--programs FOLDER`, makes a wheel for the platform `--plat-name` that contains the
    programs in FOLDER.
    """

    user_options: ClassVar = [
        *bdist_wheel.user_options,
        ("programs=", None, "folder of built programs"),
    ]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.programs = None

    def finalize_options(self) -> None:
        if self.programs:
            package = self.distribution
            package.has_ext_modules = lambda: True  # makes setuptools build a platform wheel
            package.metadata.license_expression = LICENSE_OF_PROGRAMS
            version = Path(self.programs, "mlx-version").read_text(encoding="utf-8").strip()
            package.install_requires = package.metadata.install_requires = [
                re.sub(r"^(mlx(\[cpu\])?)[<>=][^;]*", rf"\1=={version}", requirement)
                for requirement in package.install_requires
            ]
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return ("py3", "none", tag[2]) if self.programs else tag  # for any Python 3

    def run(self) -> None:
        if self.programs:
            self.run_command("build")
            built = Path(self.get_finalized_command("build").build_lib)
            self.copy_tree(self.programs, str(built / "mesp" / "engine" / "programs"))
        super().run()


def description(readme: str, source: str | None) -> str:
    """Returns the README in the form for PyPI.

    Relative links lead to the repository `source`. Without `source`, they become plain text, and
    pictures are left out.
    """
    if source:
        to_file = rf"{source}/blob/HEAD/"
        readme = re.sub(r"\]\((?!https?:|#)", f"]({to_file}", readme)
        return re.sub(r'src="(?!https?:)', f'src="{source}/raw/HEAD/', readme)
    # Removes the pictures, and the note in italics below a picture.
    readme = re.sub(r"<img [^>]*>\n\n(\*[^*]+\*\n\n)?", "", readme)
    return re.sub(r"\[([^][]*)\]\((?!https?:|#)[^)]*\)", r"\1", readme)


project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
setup(
    cmdclass={"build_py": BuildWithEngineSources, "bdist_wheel": WheelWithPrograms},
    long_description=description(
        Path("README.md").read_text(encoding="utf-8"), project.get("urls", {}).get("Source")
    ),
    long_description_content_type="text/markdown",
)
