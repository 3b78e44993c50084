import json
import os
import shutil
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest

from collect import main
from helpers.commands import invoke, refused, succeeded
from helpers.phones import APP, PROGRAMS, Phones
from helpers.runs import write_run


def collect(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    return invoke(main, "collect.py", *arguments, env=environment)


def collect_runs(folder: Path) -> subprocess.CompletedProcess:
    return collect("--from", folder / "runs", "--out", folder / "out")


def rows(done: subprocess.CompletedProcess) -> dict[str, list[str]]:
    assert done.returncode == 0, done.stderr
    lines = [line.split("  ") for line in done.stdout.splitlines()[1:]]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {run: columns for run, *columns in cells}


def test_a_folder_of_runs_is_copied_and_listed(tmp_path: Path):
    source, out = tmp_path / "runs", tmp_path / "out"
    write_run(source / "a")
    write_run(source / "deep" / "b", end="stopped")
    write_run(source / "c", end="failed")
    write_run(source / "d", end=None)
    write_run(source / "e", end=None, ago=timedelta(hours=2))
    table = rows(collect("--from", source, "--out", out))
    common = ["Qwen2.5-0.5B", "mesp", "256", "8", "4", "4.00 → 3.70"]
    assert table == {
        "a": [*common, "4.51 → 3.77", "512", "128", "61.2", "finished"],
        "c": [*common, "4.51 → 3.77", "512", "128", "61.2", "failed"],
        "d": [*common, "4.51 → -", "512", "128", "50.0", "running"],
        "b": [*common, "4.51 → 3.77", "512", "128", "61.2", "stopped"],
        "e": [*common, "4.51 → -", "512", "128", "50.0", "killed"],
    }
    assert sorted(path.name for path in out.iterdir()) == ["a", "b", "c", "d", "e"]
    files = {path.relative_to(out / "a") for path in (out / "a").rglob("*") if path.is_file()}
    assert files == {Path("metrics.jsonl"), Path("adapters/adapters.safetensors")}


def test_runs_go_to_collected_where_no_folder_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/a"))
    assert [*rows(collect("--from", "runs"))] == ["a"]
    assert Path("collected/a/metrics.jsonl").is_file()


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_last_line_that_is_cut_off_is_left_out(tmp_path: Path, cut: int):
    run = write_run(tmp_path / "runs" / "a", end=None)
    log = run / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-cut])
    steps = rows(collect_runs(tmp_path))["a"][4]
    assert steps == ("4" if cut == 1 else "3"), "one byte less is a whole record without its end"


@pytest.mark.parametrize("what", ["line", "large", "first line", "pipe", "closed"])
def test_a_bad_run_is_named_and_the_others_go_on(tmp_path: Path, what: str):
    run = write_run(tmp_path / "runs" / "b")
    write_run(tmp_path / "runs" / "c")
    log = run / "metrics.jsonl"
    if what == "line":
        lines = log.read_text().splitlines()
        log.write_text("\n".join([*lines[:3], lines[3][:20], *lines[4:]]) + "\n")
    elif what in ("large", "first line"):
        os.truncate(log, 0)
        os.truncate(log, (300 if what == "large" else 200) << 20)
    elif what == "pipe":
        log.unlink()
        os.mkfifo(log)
    else:
        (tmp_path / "out" / "b").mkdir(parents=True)
        (tmp_path / "out" / "b" / "metrics.jsonl").mkdir()
        (tmp_path / "out" / "b-2").touch()
    done = collect_runs(tmp_path)
    assert "c" in rows(done)
    said = {
        "line": f"Line 4 of {tmp_path / 'out' / 'b' / 'metrics.jsonl'} is not a log record.\n",
        "large": f"{run} was left out: its log has more than 256 MiB.\n",
        "pipe": f"{run} was left out: {log} is not a regular file.\n",
    }
    assert done.stderr == said.get(what, "")


@pytest.mark.parametrize("name", [".a.partial", ".a.replaced", ".a", "..a", "."])
def test_a_run_has_no_name_of_an_unfinished_folder(tmp_path: Path, name: str):
    name = name if name.strip(".") else "..."
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / name, steps=2, seed=1)
    for _ in range(2):
        table = rows(collect_runs(tmp_path))
        assert sorted(columns[4] for columns in table.values()) == ["2", "4"]
        assert not any(path.name.startswith(".") for path in (tmp_path / "out").iterdir())


def test_a_name_may_be_as_long_as_a_name_can_be(tmp_path: Path):
    for number, letter in enumerate("ö漢", 1):
        name = letter * (255 // len(letter.encode()))
        write_run(tmp_path / "runs" / name, steps=number)
    write_run(tmp_path / "runs" / "b")
    table = rows(collect_runs(tmp_path))
    assert {columns[4] for columns in table.values()} == {"1", "2", "4"}


def test_modes_are_the_collectors_own(tmp_path: Path):
    run = write_run(tmp_path / "runs" / "a")
    for path in (run / "adapters", *run.rglob("*")):
        path.chmod(0o7777 if path.is_dir() else 0o6755)
    before = os.umask(0o022)
    try:
        rows(collect_runs(tmp_path))
    finally:
        os.umask(before)
    modes = {path.is_dir(): path.stat().st_mode & 0o7777 for path in (tmp_path / "out").rglob("*")}
    assert modes == {True: 0o755, False: 0o644}


def test_folders_in_folders_have_an_end(tmp_path: Path):
    run = write_run(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "b").mkdir()
    for folder in (run / "adapters", tmp_path / "runs" / "b"):
        for _ in range(1200):
            folder = folder / "x"
            os.mkdir(folder)
    try:
        done = collect_runs(tmp_path)
    finally:  # pytest's own way to remove folders is recursive
        subprocess.run(["rm", "-r", *tmp_path.iterdir()], check=True)
    assert list(rows(done)) == ["a"] and "is not a folder of a run" in done.stderr


def test_a_log_with_nothing_in_it_is_listed(tmp_path: Path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "metrics.jsonl").touch()
    row = rows(collect_runs(tmp_path))["a"]
    assert row == ["?", "?", "?", "?", "0", "-", "- → -", "-", "-", "-", "killed"]


def weights(folder: Path) -> str:
    return (folder / "out" / "a" / "adapters" / "adapters.safetensors").read_text()


def test_a_run_that_went_on_is_refreshed(tmp_path: Path):
    write_run(tmp_path / "runs" / "a", steps=2, end=None)
    collect_runs(tmp_path)
    write_run(tmp_path / "runs" / "a", steps=9)
    assert rows(collect_runs(tmp_path))["a"][4] == "9"
    assert weights(tmp_path) == "weights after 9 steps"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


def test_a_newer_copy_is_kept(tmp_path: Path):
    write_run(tmp_path / "runs" / "a", steps=9)
    collect_runs(tmp_path)
    write_run(tmp_path / "runs" / "a", steps=2, end=None)
    done = collect_runs(tmp_path)
    assert "is further on than" in done.stderr
    assert rows(done)["a"][4] == "9"
    assert weights(tmp_path) == "weights after 9 steps"


def test_another_run_of_the_same_name_gets_a_place_of_its_own(tmp_path: Path):
    write_run(tmp_path / "runs" / "a", steps=3)
    collect_runs(tmp_path)
    write_run(tmp_path / "runs" / "a", steps=5, seed=1)
    for _ in range(2):
        assert rows(collect_runs(tmp_path))["a-2"][4] == "5"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a", "a-2"]
    assert weights(tmp_path) == "weights after 3 steps"


def test_a_folder_that_is_no_run_is_not_replaced(tmp_path: Path):
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "out" / "a").mkdir(parents=True)
    (tmp_path / "out" / "a" / "thesis.txt").write_text("precious")
    collect_runs(tmp_path)
    assert (tmp_path / "out" / "a" / "thesis.txt").read_text() == "precious"
    assert (tmp_path / "out" / "a-2" / "metrics.jsonl").exists()


def test_out_within_the_source_is_not_collected_again(tmp_path: Path):
    write_run(tmp_path / "a")
    for _ in range(2):
        table = rows(collect("--from", tmp_path, "--out", tmp_path / "out"))
        assert list(table) == ["a"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a"]


def test_out_that_holds_the_source_is_refused(tmp_path: Path):
    write_run(tmp_path / "runs" / "a")
    sentence = refused(collect("--from", tmp_path / "runs", "--out", tmp_path))
    assert sentence == f"--out {tmp_path} holds what is to be collected: choose another folder."


def test_a_folder_without_runs(tmp_path: Path):
    done = collect("--from", tmp_path, "--out", tmp_path / "out")
    assert (done.returncode, done.stdout) == (0, "There are no runs yet.\n")
    assert refused(collect("--from", tmp_path / "none", "--out", tmp_path / "out")) == (
        f"There is no folder {tmp_path / 'none'}."
    )


@pytest.mark.parametrize("name", ["[/b]", "[link=x]a[/]", "a\x1b]0;b\x07"])
def test_what_a_run_is_called_is_text(tmp_path: Path, name: str):
    run = write_run(tmp_path / "runs" / (name.replace("/", "") + "x"))
    log = run / "metrics.jsonl"
    log.write_text(log.read_text().replace("Qwen2.5-0.5B", json.dumps(name)[1:-1]))
    done = succeeded(collect_runs(tmp_path))
    assert name.replace("\x1b", " ").replace("\x07", "").strip() in done.stdout
    assert "\x1b]" not in done.stdout and "\x1b]" not in done.stderr


@pytest.mark.parametrize("place", ["adapters", "adapters/more", "samples.json", "metrics.jsonl"])
@pytest.mark.parametrize("what", ["a file", "a folder", "a pipe"])
def test_what_is_no_regular_file_is_not_collected(tmp_path: Path, place: str, what: str):
    private, run = tmp_path / "private", write_run(tmp_path / "runs" / "a")
    private.mkdir()
    (private / "key").write_text("secret")
    path = run / place
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if what == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(private if what == "a folder" else private / "key")
    done = collect_runs(tmp_path)
    assert done.returncode == 0 and f"{path} is not a regular file" in done.stderr
    copied = [each for each in (tmp_path / "out").rglob("*") if each.is_file()]
    assert not any("secret" in each.read_text() for each in copied)
    assert not any(each.is_symlink() for each in (tmp_path / "out").rglob("*"))
    assert bool(copied) == (place != "metrics.jsonl")


def collect_phone(phones: Phones, *arguments: object) -> subprocess.CompletedProcess:
    return collect(*arguments, "--out", phones.folder / "out", **phones.environment())


@pytest.mark.parametrize("nests", [True, False])
def test_the_only_phone_is_read(phones: Phones, nests: bool):
    runs = phones.add("Ada's iPhone")
    phones.add("A Watch", platform="watchOS")
    phones.add("Left at home", tunnelState="unavailable")
    phones.world["nests"] = nests
    write_run(runs / "a", end=None)
    write_run(runs / "b")
    assert list(rows(collect_phone(phones))) == ["a", "b"]
    assert (phones.folder / "out" / "a" / "adapters" / "adapters.safetensors").exists()
    write_run(runs / "a", steps=8)
    assert rows(collect_phone(phones))["a"][4] == "8"


XCRUN, OTHER = "xcrun devicectl list devices", "pymobiledevice3 usbmux list"


@pytest.mark.parametrize(
    ("program", "listing", "name"),
    [
        *(("xcrun", XCRUN, name) for name in ("Grace's iPhone", "ID-1", "0000-1")),
        *(("pymobiledevice3", OTHER, name) for name in ("Grace's iPhone", "0000-1")),
    ],
)
def test_one_of_several_phones_is_chosen(phones: Phones, program: str, listing: str, name: str):
    phones.program = program
    write_run(phones.add("Ada's iPhone") / "a")
    write_run(phones.add("Grace's iPhone") / "g")
    said = refused(collect_phone(phones))
    assert said.startswith("Several phones can be reached, choose one with --device: ")
    if program == "xcrun":
        assert said.endswith(": Ada's iPhone (ID-0), Grace's iPhone (ID-1).")
    assert list(rows(collect_phone(phones, "--device", name))) == ["g"]
    said = refused(collect_phone(phones, "--device", "Alan"))
    assert said == f"There is no phone Alan: `{listing}` shows which there are."


def test_another_app_is_read(phones: Phones):
    other = phones.folder / "other"
    write_run(other / "Documents" / "runs" / "o")
    phones.add("Ada's iPhone", apps={"org.example.Other": str(other)})
    assert list(rows(collect_phone(phones, "--app", "org.example.Other"))) == ["o"]


@pytest.mark.parametrize("program", ["xcrun", "pymobiledevice3"])
def test_reports_of_self_checks_come_too(phones: Phones, program: str):
    phones.program = program
    documents = phones.add("Ada's iPhone").parent
    (documents / "self-check").mkdir()
    (documents / "self-check" / "demo 2026-01-01.json").write_text("{}")
    out = phones.folder / "out"
    done = collect_phone(phones)
    assert (done.returncode, done.stdout) == (0, "There are no runs yet.\n")
    report = out / "self-check" / "demo 2026-01-01.json"
    assert report.read_text() == "{}" and str(report) in done.stderr


def test_a_mac_without_xcode(tmp_path: Path):
    path = f"{PROGRAMS['xcrun']}:{os.environ['PATH']}"
    environment = {key: value for key, value in os.environ.items() if key != "FAKE_XCRUN"}
    assert refused(collect("--out", tmp_path / "out", **{**environment, "PATH": path})).startswith(
        "xcrun finds no devicectl: install Xcode 15 or later"
    )


def test_a_machine_without_xcrun(tmp_path: Path):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").symlink_to(shutil.which("python3"))
    assert refused(collect("--out", tmp_path / "out", PATH=str(programs))) == (
        "A phone is read and written with xcrun, which comes with Xcode on a Mac, or elsewhere "
        "with pymobiledevice3: pip install pymobiledevice3, or collect from a folder with --from."
    )


@pytest.fixture
def others(phones: Phones) -> Phones:
    phones.program = "pymobiledevice3"
    return phones


def test_without_xcode_the_only_phone_is_read(others: Phones):
    runs = others.add("Ada's iPhone")
    others.add("Left at home", tunnelState="unavailable")
    write_run(runs / "a")
    assert list(rows(collect_phone(others))) == ["a"]
    pulls = [["apps", "pull"], ["apps", "pull"]]
    assert [call[:2] for call in others.calls()] == [["usbmux", "list"], *pulls]


def test_without_xcode_what_is_wrong_is_said(others: Phones):
    assert refused(collect_phone(others)).startswith("No phone can be reached")
    others.add("Ada's iPhone")
    done = collect_phone(others)
    assert (done.returncode, done.stdout) == (0, "There are no runs yet.\n")
    (phone,) = others.world["devices"]
    phone["apps"] = {}
    assert refused(collect_phone(others)).startswith(f"The app {APP} is not on the phone Ada's")
    phone["locked"] = True
    assert refused(collect_phone(others)) == (
        "The phone Ada's iPhone is locked: unlock it and try again."
    )
