import email
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import platform_wheel
from helpers.paths import ROOT
from helpers.sources import copy_sources
from mesp.engine.build import mlx_folder

DOCKERFILE = ROOT / "Dockerfile"


def test_a_wheel_has_every_target_of_the_package():
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    manifest = (ROOT / "Package.swift").read_text(encoding="utf-8")
    with_wheel, _ = manifest.split("if !hostMLX {")
    paths = re.findall(r'path: "(ios/MeSPTrainer/.+?)"', with_wheel)
    assert paths
    assert [path for path in paths if f'"{path}"' not in setup] == []


def test_a_wheel_has_every_kind_of_file_that_is_built():
    (listed,) = re.findall(r"SUFFIXES = \((.*)\)", (ROOT / "setup.py").read_text(encoding="utf-8"))
    folders = (
        "HostMLX",
        "HostMLXLedger",
        *(f"MeSPTrainer/{n}" for n in ("Bundle", "Core", "Engine")),
    )
    command = ["git", "ls-files", *(f"ios/{folder}" for folder in folders)]
    files = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    files += re.findall(r'\.process\("(.+?)"\)', (ROOT / "Package.swift").read_text("utf-8"))
    kinds = {Path(file).suffix for file in files}
    assert kinds - {".md"} == set(re.findall(r'"(.+?)"', listed))


def test_the_dockerfile_has_no_known_fault():
    found = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    linter = shutil.which("hadolint", path=found)
    assert linter, "hadolint is missing: run `make setup`"
    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_that_of_the_tests():
    image = re.search(r"^FROM (\S+)", DOCKERFILE.read_text(encoding="utf-8"), re.M)[1]
    assert re.fullmatch(r"swift:[\w.-]+@sha256:[0-9a-f]{64}", image)
    for workflow in ("ci", "nightly", "release"):
        text = (ROOT / ".github" / "workflows" / f"{workflow}.yml").read_text(encoding="utf-8")
        assert re.findall(r"container: (\S+)", text) == [image]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels") / "sources"
    copy_sources(folder)
    return folder


def make_wheel(sources: Path, out: Path, *options: str) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out]
    command += [f"--config-setting=--build-option={option}" for option in options]
    done = subprocess.run([*command, sources], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel)


def information(wheel: zipfile.ZipFile, name: str) -> Message:
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return email.message_from_bytes(wheel.read(path))


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", text)


def test_a_wheel_with_an_engine_is_of_its_platform_and_its_mlx(sources: Path, tmp_path: Path):
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "mesp-engine").write_text("#!/bin/sh\n")
    (programs / "mesp-engine").chmod(0o755)
    (programs / "mlx-version").write_text("0.32.3\n")
    options = f"--programs={programs}", "--plat-name=manylinux_2_35_x86_64"
    wheel = make_wheel(sources, tmp_path, *options)
    assert wheel.filename.endswith("-py3-none-manylinux_2_35_x86_64.whl")
    assert information(wheel, "WHEEL").get_all("Tag") == ["py3-none-manylinux_2_35_x86_64"]
    assert information(wheel, "WHEEL")["Root-Is-Purelib"] == "false"
    engine = wheel.getinfo("mesp/engine/programs/mesp-engine")
    assert engine.external_attr >> 16 & 0o111 == 0o111
    assert "mesp/engine/sources/Package.swift" in wheel.namelist()

    about = information(wheel, "METADATA")
    assert about["License-Expression"] == "MIT AND Apache-2.0 WITH Swift-exception AND Unicode-3.0"
    needed = [Requirement(text) for text in about.get_all("Requires-Dist")]
    of_mlx = {(*need.extras, str(need.specifier)) for need in needed if need.name == "mlx"}
    assert of_mlx == {("==0.32.3",), ("cpu", "==0.32.3")}
    assert any(need.name == "mlx-lm" and "==" not in str(need.specifier) for need in needed)


def test_a_wheel_without_an_engine_is_for_every_platform(sources: Path, tmp_path: Path):
    wheel = make_wheel(sources, tmp_path)
    assert information(wheel, "WHEEL").get_all("Tag") == ["py3-none-any"]
    assert not [path for path in wheel.namelist() if "/programs/" in path]
    about = information(wheel, "METADATA")
    assert about["License-Expression"] == "MIT"
    assert 'mlx<0.33,>=0.32.2; sys_platform != "linux"' in about.get_all("Requires-Dist")

    # PyPI shows only this page, so relative links would be broken.
    shown = about.get_payload()
    assert about["Description-Content-Type"] == "text/markdown" and "# MeSP" in shown
    relative = [link for link, _ in links(shown) if not link.startswith(("https:", "#"))]
    assert relative == [] and "<img" not in shown and "Drawn by" not in shown


def test_with_an_address_the_links_of_the_readme_lead_to_the_repository(
    sources: Path, tmp_path: Path
):
    copy = tmp_path / "sources"
    shutil.copytree(sources, copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    project = (copy / "pyproject.toml").read_text(encoding="utf-8")
    heading = "[project.urls]\n"
    assert heading in project
    addressed = project.replace(heading, f'{heading}Source = "https://example.org/mesp"\n')
    (copy / "pyproject.toml").write_text(addressed, encoding="utf-8")
    shown = information(make_wheel(copy, tmp_path), "METADATA").get_payload()
    found = [link or picture for link, picture in links(shown)]
    assert [link for link in found if not link.startswith(("https://", "#"))] == []
    start = "https://example.org/mesp"
    assert f"{start}/blob/HEAD/docs/guide.md#data" in found
    assert f"{start}/raw/HEAD/docs/images/memory.png" in found


@pytest.mark.skipif(sys.platform != "linux", reason="ELF files")
def test_what_an_engine_needs_of_a_linux_is_compared_with_mlxs_needs():
    mlx = mlx_folder() / "lib" / "libmlx.so"
    openblas = next(mlx_folder().parent.glob("scipy_openblas32/lib/*.so"))
    assert platform_wheel.excess(openblas, mlx) == []
    too_much = platform_wheel.excess(mlx, openblas)
    assert any(name.startswith("libblas-") for name in too_much)
    assert any(name.startswith("GLIBCXX_3.4.") for name in too_much)
    assert re.fullmatch(r"manylinux_2_\d+_(x86_64|aarch64)", platform_wheel.linux_tag())


def test_the_package_index_documents_products():
    text = (ROOT / ".spi.yml").read_text(encoding="utf-8")
    assert len(text.encode()) <= 1_000
    manifest = yaml.safe_load(text)
    assert manifest["version"] == 1
    ((targets,),) = (config.values() for config in manifest["builder"]["configs"])
    products = re.findall(r'\.library\(name: "(\w+)"', (ROOT / "Package.swift").read_text("utf-8"))
    assert targets and set(targets) <= set(products)
