"""Tests finding and building the engine with a stand-in compiler."""

import os
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest

import mesp
from helpers.commands import wait_for
from helpers.paths import FAKE_ENGINE, ROOT
from mesp.block_function import mlxfn
from mesp.engine import build
from mesp.engine.build import COUNTER, expected_version
from mesp.engine.process import running
from mesp.errors import MespError

SWIFT = """
echo "$MESP_HOST_MLX $*" >> "$FAKES/calls"
echo "[1/2] Compiling MeSPCore"
while [ -e "$FAKES/slow" ]; do sleep 0.02; done
[ -e "$FAKES/broken" ] && { echo "error: no such module"; exit 1; }
while [ $# -gt 0 ]; do
  case $1 in
    --product) name=$2 ;; --scratch-path) out=$2 ;;
  esac
  shift
done
mkdir -p "$out/release" && cp "$FAKES/engine" "$out/release/$name"
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "fakes"
    folder.mkdir()
    shutil.copy(FAKE_ENGINE, folder / "engine")
    write_program(folder / "swift", SWIFT)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKES", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MESP_ENGINE", raising=False)
    monkeypatch.delenv("MESP_HOST_MLX", raising=False)
    return folder


@pytest.fixture
def checkout(fakes: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "ios").mkdir(parents=True)
    (folder / "ios" / "Core.swift").touch()
    (folder / "Package.swift").touch()
    return folder


@pytest.fixture
def installed(fakes: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "Package.swift").write_text("// a package")
    return folder


@pytest.fixture
def carried(fakes: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "programs"
    folder.mkdir()
    shutil.copy(FAKE_ENGINE, folder / "mesp-engine")
    (folder / "mlx-version").write_text(metadata.version("mlx") + "\n")
    return folder


def start(folder: Path, search: str = "find_engine", *carried: Path) -> subprocess.Popen:
    program = "import sys, pathlib, mesp.engine.build, mesp.errors\n"
    program += f"try: print(mesp.engine.build.{search}(*map(pathlib.Path, sys.argv[1:])))\n"
    program += "except mesp.errors.MespError as error: sys.exit(error.message)\n"
    where = (folder, "/nowhere") if folder.name == "checkout" else ("/nowhere", folder)
    return subprocess.Popen(
        [sys.executable, "-c", program, *where, *carried],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def find(folder: Path, search: str = "find_engine", *carried: Path) -> subprocess.CompletedProcess:
    process = start(folder, search, *carried)
    return subprocess.CompletedProcess(
        process.args, process.wait(), process.stdout.read(), process.stderr.read()
    )


def calls(fakes: Path) -> list[str]:
    log = fakes / "calls"
    return log.read_text().splitlines() if log.exists() else []


def write_program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_an_engine_that_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def find_named(engine: object) -> str:
        monkeypatch.setenv("MESP_ENGINE", str(engine))
        return find(Path("/nowhere/checkout")).stderr.strip()

    for says, said in {
        "echo mesp-engine 9.9.9 with MLX 0.32.4": "mesp-engine 9.9.9 with MLX 0.32.4",
        "echo cannot load libmlx.so >&2; exit 127": "cannot load libmlx.so",
        "exit 1": "nothing",
    }.items():
        wanted = f"which is not {expected_version()}: it says {said}. Build it again, or unset"
        assert wanted in find_named(write_program(tmp_path / "mesp-engine", says))
    nowhere = "MESP_ENGINE names /nowhere/mesp-engine, which is not a program."
    assert find_named("/nowhere/mesp-engine") == nowhere


def test_the_version_is_that_of_the_sources():
    wheel = metadata.version("mlx")
    assert expected_version() == f"mesp-engine {mesp.__version__} with MLX {wheel}"
    home = ROOT / "ios" / "MeSPTrainer"
    assert f'version = "{mesp.__version__}"' in (home / "Core" / "Run" / "Run.swift").read_text()
    of_mlx_swift = (home / "Bundle" / "MLXSupport.swift").read_text()
    assert f'version = "{mlxfn.MLX}"' in of_mlx_swift
    said = subprocess.run([FAKE_ENGINE, "--version"], capture_output=True, text=True).stdout
    assert said.strip() == expected_version()


def test_a_missing_engine_is_built_against_the_installed_mlx(checkout: Path, fakes: Path):
    found = find(checkout)
    engine = checkout / ".build" / "release" / "mesp-engine"
    assert found.stdout.strip() == str(engine), found.stderr
    assert engine.exists()
    (call,) = calls(fakes)
    mlx, _, arguments = call.partition(" ")
    assert (Path(mlx) / "include").is_dir()
    folders = f"--package-path {checkout} --scratch-path {checkout}/.build"
    options = f"{folders} --disable-build-manifest-caching -Xswiftc -enable-testing"
    assert arguments == f"build -c release --product mesp-engine {options}"


def test_a_missing_counter_is_built_from_the_ledgers_package(checkout: Path, fakes: Path):
    ledger = checkout / "ios" / "HostMLXLedger"
    found = find(checkout, "find_counter")
    assert found.stdout.strip() == str(checkout / ".build" / "release" / "mesp-count"), found.stderr
    (call,) = calls(fakes)
    assert f"--product mesp-count --package-path {ledger} " in call


def test_an_installed_packages_counter_lies_beside_its_engine(installed: Path):
    engine, counter = (
        Path(find(installed, search).stdout.strip()) for search in ("find_engine", "find_counter")
    )
    assert counter == engine.with_name("mesp-count") and counter.exists()
    assert engine.read_bytes() == FAKE_ENGINE.read_bytes()


def test_the_counter_beside_a_named_engine_is_taken(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    counter = tmp_path / "mesp-count"
    monkeypatch.setenv("MESP_ENGINE", str(tmp_path / "mesp-engine"))
    for version, taken in ((expected_version(COUNTER), True), ("mesp-count 9.9.9", False)):
        write_program(counter, f"echo {version}")
        assert (find(checkout, "find_counter").stdout.strip() == str(counter)) == taken


def test_an_engine_is_built_again_only_when_a_source_is_newer(checkout: Path, fakes: Path):
    find(checkout)
    find(checkout)
    assert len(calls(fakes)) == 1
    later = time.time() + 60
    os.utime(checkout / "ios" / "Core.swift", (later, later))
    find(checkout)
    assert len(calls(fakes)) == 2


@pytest.mark.parametrize("place", ["checkout", "installed"])
def test_a_failed_build_shows_what_the_compiler_said(place: str, fakes: Path, request):
    (fakes / "broken").touch()
    found = find(request.getfixturevalue(place))
    assert found.returncode == 1
    assert "error: no such module" in found.stderr
    assert found.stderr.splitlines()[-1].startswith("mesp-engine could not be built")


@pytest.mark.parametrize("place", ["checkout", "installed"])
def test_a_missing_compiler_is_named(place: str, request, monkeypatch: pytest.MonkeyPatch):
    folder = request.getfixturevalue(place)
    monkeypatch.setenv("PATH", "/nowhere")
    (said,) = find(folder).stderr.splitlines()
    assert "install Swift 6.1 from https://swift.org/install" in said


def test_without_sources_the_way_out_is_named(fakes: Path, tmp_path: Path):
    assert "or set MESP_ENGINE" in find(tmp_path).stderr


def find_carried(installed: Path, carried: Path) -> subprocess.CompletedProcess:
    return find(installed, "find_engine", carried)


def test_the_engine_of_a_wheel_is_taken_as_it_is(
    installed: Path, carried: Path, fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = find_carried(installed, carried)
    assert (found.stdout.strip(), found.stderr) == (str(carried / "mesp-engine"), "")
    assert calls(fakes) == [] and not (tmp_path / "cache").exists()
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}")
    assert find_carried(installed, carried).stdout == found.stdout


def test_the_engine_of_a_wheel_runs_with_the_mlx_of_its_headers_alone(
    installed: Path, carried: Path, fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (carried / "mlx-version").write_text("0.32.3\n")
    engine = Path(find_carried(installed, carried).stdout.strip())
    assert engine.parents[1] == tmp_path / "cache" / "mesp" and len(calls(fakes)) == 1
    monkeypatch.setenv("PATH", "/nowhere")
    said = f"runs with MLX 0.32.3, and {metadata.version('mlx')} is installed: install the package"
    assert said in find_carried(installed, carried).stderr


@pytest.mark.parametrize(
    "does, said",
    [
        ("echo cannot load libmlx.so >&2; exit 127", "does not start (it says cannot load libmlx"),
        ("echo mesp-engine 0.0.1 with MLX 0.1", "(it says mesp-engine 0.0.1 with MLX 0.1)"),
        ("exit 1", "does not start (it says nothing)"),
    ],
)
def test_an_engine_of_a_wheel_that_does_not_start_is_built_or_named(
    does: str, said: str, installed: Path, carried: Path, fakes: Path,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    write_program(carried / "mesp-engine", does)
    assert find_carried(installed, carried).stdout.strip() not in ("", str(carried / "mesp-engine"))
    assert len(calls(fakes)) == 1
    monkeypatch.setenv("PATH", "/nowhere")
    found = find_carried(installed, carried)
    assert found.returncode == 1 and said in found.stderr and "install Swift 6.1" in found.stderr


def test_an_installed_packages_engine_is_built_once(installed: Path, fakes: Path, tmp_path: Path):
    found = find(installed)
    engine = Path(found.stdout.strip())
    assert tmp_path / "cache" / "mesp" in engine.parents and os.access(engine, os.X_OK)
    assert f"-{mesp.__version__}-mlx-{metadata.version('mlx')}-" in engine.parent.name
    assert found.stderr == f"Building mesp-engine in {engine.parent}, once; some minutes.\n"
    assert {path.name for path in engine.parent.iterdir()} == {"mesp-engine", "lock", "mlx"}
    again = find(installed)
    assert (again.stdout, again.stderr) == (found.stdout, "")
    assert len(calls(fakes)) == 1
    assert f"--package-path {installed} " in calls(fakes)[0]
    assert [path.name for path in installed.iterdir()] == ["Package.swift"]


def test_engines_of_environments_that_are_gone_are_removed(installed: Path, tmp_path: Path):
    gone, another = (tmp_path / "cache" / "mesp" / f"engine-{name}" for name in "ab")
    for folder, mlx in ((gone, tmp_path / "no-mlx"), (another, tmp_path)):
        folder.mkdir(parents=True)
        (folder / "mlx").write_text(str(mlx))
    find(installed)
    assert another.exists() and not gone.exists()


def test_other_sources_have_an_engine_of_their_own(installed: Path, fakes: Path):
    first = find(installed).stdout
    (installed / "Package.swift").write_text("// a newer package")
    assert find(installed).stdout not in ("", first)
    assert len(calls(fakes)) == 2


@pytest.mark.parametrize("body", ["exit 127", "echo mesp-engine 0.0.1 with MLX 0.1"])
def test_an_engine_that_does_not_start_any_more_is_built_again(
    body: str, installed: Path, fakes: Path
):
    engine = Path(find(installed).stdout.strip())
    write_program(engine, body)
    assert find(installed).stdout.strip() == str(engine)
    assert len(calls(fakes)) == 2
    assert engine.read_bytes() == FAKE_ENGINE.read_bytes()


def test_two_processes_at_once_build_one_engine(installed: Path, fakes: Path):
    (fakes / "slow").touch()
    first = start(installed)
    wait_for(lambda: calls(fakes), first)
    second = start(installed)
    assert second.stderr.readline().endswith("; waiting for it.\n")
    (fakes / "slow").unlink()
    said = [process.communicate()[0] for process in (first, second)]
    assert said[0] == said[1] != ""
    assert len(calls(fakes)) == 1


def test_a_build_that_is_killed_leaves_no_engine(installed: Path, fakes: Path, tmp_path: Path):
    (fakes / "slow").touch()
    process = start(installed)
    wait_for(lambda: calls(fakes), process)
    process.kill()
    process.communicate()
    assert list((tmp_path / "cache").rglob("mesp-engine")) == []
    (fakes / "slow").unlink()
    assert Path(find(installed).stdout.strip()).exists()


def test_a_cache_that_cannot_be_written_is_named(
    installed: Path, fakes: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    found = find(installed)
    assert "Cannot keep the engine in /dev/null/mesp/engine-" in found.stderr
    assert "XDG_CACHE_HOME" in found.stderr and calls(fakes) == []


@pytest.mark.parametrize("what", ["the engine", "its folder", "the cache"])
@pytest.mark.parametrize("by", ["another user", "everybody"])
def test_a_program_of_somebody_else_is_not_run(installed: Path, tmp_path: Path, what: str, by: str):
    if by == "another user" and os.getuid() != 0:
        pytest.skip("only root gives files away")
    engine = Path(find(installed).stdout.strip())
    write_program(engine, f"touch {tmp_path / 'harm'}")
    path = {"the engine": engine, "its folder": engine.parent, "the cache": engine.parents[1]}[what]
    if by == "everybody":
        path.chmod(0o777)
    else:
        os.chown(path, 12345, 12345)
    found = find(installed)
    assert found.returncode == 1, found.stderr
    assert found.stderr.startswith(f"{path} is another user's"), found.stderr
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    "prints", ["printf '\\377\\n'", "yes", "yes | tr -d '\\n'", "exec sleep 999"]
)
def test_a_program_that_says_no_version_is_refused(
    prints: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    program = write_program(tmp_path / "program", prints)
    monkeypatch.setenv("MESP_ENGINE", str(program))
    monkeypatch.setattr(build, "VERSION_SECONDS", 1.0)
    with pytest.raises(MespError) as caught:
        build.find_engine()
    assert f"MESP_ENGINE names {program}, which is not mesp-engine" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_what_is_no_record_is_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    lines = ["5", "[]", "null", "[" * 100_000, "\\377", '{"type": "end"}']
    prints = "\n".join(f"printf '{line}\\n'" for line in lines)
    program = write_program(tmp_path / "program", prints)
    with running([], {}, engine=program) as started:
        assert list(started) == [{"type": "end"}]
    started.check()
    assert [record.message[:3] for record in caplog.records] == ["5", "[]", "nul", "[[[", "\ufffd"]
