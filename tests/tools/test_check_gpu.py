import json
import sys
from functools import partial
from pathlib import Path

import pytest

from helpers.commands import refused, run_tool, succeeded
from helpers.pages import Page
from helpers.paths import DEMO_BUNDLE
from helpers.phones import APP, Phones
from mesp.engine.build import expected_version
from mesp.engine.process import stream_records

NAMES = ["machine", "repeats", "resume"]
START = {"names": NAMES, "host": "iPhone18,1", "bundle": "demo", "device": "gpu"}
START |= {"gpu": "A19 <Pro>", "neural_accelerators": "checking"}
REPEATS = {
    "name": "repeats",
    "verdict": "pass",
    "sentence": "50 repeats are the same.",
    "measured": [{"name": "repeats", "value": 50, "unit": ""}],
    "seconds": 4.0,
}
MACHINE = {
    "name": "machine",
    "verdict": "note",
    "sentence": "6 cores, and <b>tags</b>.",
    "measured": [
        {"name": "memory", "value": 12e9, "unit": "bytes"},
        {"name": "leaked per thousand", "value": 4100, "unit": "bytes"},
    ],
    "seconds": 0.1,
}
RESUME = {"name": "resume", "verdict": "fail", "sentence": "It differs.", "measured": []}
RESUME |= {"seconds": 1.0}
CONSTANTS = {"metal_bytes": 3.2e7, "eval_seconds": 2e-4}
CONSTANTS |= {"flops_per_second": 1.2e12, "bytes_per_second": 8e10}
END = {"verdict": "pass", "constants": CONSTANTS, "seconds": 5.0}


check = partial(run_tool, "check_gpu.py")


def verdicts(out: Path) -> dict[str, str]:
    report = json.loads((out / "self-check.json").read_text())
    return {check["name"]: check["verdict"] for check in report["checks"]}


def write_engine(folder: Path, *lines: object, then: str = "") -> str:
    engine = folder / "engine"
    text = "".join(json.dumps(line) + "\n" for line in lines)
    engine.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"if sys.argv[1] == '--version': sys.exit(print({expected_version()!r}))\n"
        "assert sys.argv[1] == 'self-check'\n"
        f"sys.stdout.write({text!r})\nsys.stdout.flush()\n{then}\n"
    )
    engine.chmod(0o755)
    return str(engine)


def test_the_engine_runs_the_named_checks_of_a_fresh_process():
    settings = {"bundle": str(DEMO_BUNDLE), "checks": ["leaving", "metal.footprint", "errors"]}
    records = stream_records("self-check", settings)
    checks = {each["name"]: each["verdict"] for each in records if each["type"] == "check"}
    assert checks == {"metal.footprint": "note", "leaving": "note", "errors": "pass"}


def record(kind: str, fields: dict) -> dict:
    return {"type": kind, **fields}


def row(page: Page, name: str) -> list[str]:
    return [cell.split("\n")[0] for cell in page.row(name)]


@pytest.mark.slow
def test_this_machine(tmp_path: Path):
    options = ("--repeats", 2, "--seconds", 0.05, "--out", tmp_path)
    done = succeeded(check("--bundle", DEMO_BUNDLE, *options))
    assert done.stdout == f"{tmp_path / 'self-check.html'}\n"
    report = json.loads((tmp_path / "self-check.json").read_text())
    lines = {each["name"]: each for each in report["checks"]}
    assert list(lines) == report["start"]["names"]
    assert {"gradients.cpu", "map.no_copy", "peak.128", "time.256"} <= set(lines)
    skipped = {name for name, verdict in verdicts(tmp_path).items() if verdict == "skipped"}
    assert skipped == {"gpu", "product.rows", "throttling"}, "metal.footprint is of a fresh process"
    assert set(verdicts(tmp_path).values()) == {"pass", "note", "skipped"}
    assert all(each["sentence"] for each in lines.values())
    assert report["end"]["verdict"] == "pass"
    assert set(report["end"]["constants"]) == {
        "eval_seconds", "kernel_seconds", "new_buffer_seconds", "map_seconds",
        "bytes_per_second", "flops_per_second", "metal_bytes",
    }  # fmt: skip
    page = Page(tmp_path / "self-check.html")
    for name, line in lines.items():
        assert row(page, name)[0] == line["verdict"]
        assert f"{line['verdict']:<7} {name}" in done.stderr
    assert "nothing failed" in page.text and "http" not in page.source


def test_a_check_that_fails_is_exit_code_1(tmp_path: Path):
    records = [record("check", each) for each in (MACHINE, REPEATS, RESUME)]
    end = record("end", {**END, "verdict": "fail"})
    engine = write_engine(tmp_path, record("start", START), *records, end)
    done = check("--bundle", DEMO_BUNDLE, "--out", tmp_path, MESP_ENGINE=engine)
    assert done.returncode == 1, done.stderr
    page = Page(tmp_path / "self-check.html")
    assert "something failed" in page.text and row(page, "resume") == ["fail", "It differs."]
    assert row(page, "machine") == ["note", "6 cores, and <b>tags</b>."]
    assert "<b>" not in page.source
    assert row(page, "GPU") == ["A19 <Pro>"]
    assert row(page, "neural accelerators") == ["checking"]
    assert row(page, "checks") == ["1 passed, 1 failed, 1 measured, 0 skipped"]
    assert row(page, "memory") == ["12,000.0 MB"]
    assert row(page, "eval seconds") == ["200.0 µs"]
    assert row(page, "metal bytes") == ["32.0 MB"]
    assert row(page, "leaked per thousand") == ["4.1 kB"]
    assert row(page, "flops per second") == ["1,200.0 GFLOP/s"]
    assert row(page, "bytes per second") == ["80.0 GB/s"]


def test_an_engine_that_dies_in_a_check_fails_that_check(tmp_path: Path):
    records = record("start", START), record("check", MACHINE)
    engine = write_engine(tmp_path, *records, then="os.abort()")
    done = check("--bundle", DEMO_BUNDLE, "--out", tmp_path, MESP_ENGINE=engine)
    assert done.returncode == 1, done.stderr
    assert verdicts(tmp_path) == {"machine": "note", "repeats": "fail", "resume": "skipped"}
    assert "SIGABRT" in Page(tmp_path / "self-check.html").row("repeats")[1]


def tf32_engine(folder: Path, in_force: bool) -> str:
    engine = folder / "engine"
    engine.write_text(f"""#!{sys.executable}
import json, os, sys
if sys.argv[1] == "--version":
    sys.exit(print({expected_version()!r}))
settings = json.load(open(sys.argv[2]))
on = os.environ.get("MLX_ENABLE_TF32") == "1" and {in_force}
names = settings.get("checks") or ["machine", "gradients.cpu", "tf32", "time.128", "time.256"]
measured = {{
    "machine": {{}},
    "gradients.cpu": {{"loss": 1e-5, "q.A": 3e-4 if on else 2e-7}},
    "tf32": {{"in force": int(on)}},
    "time.128": {{f"default: {{p}}": 0.8 if on else 1 for p in ("forward", "head", "backward")}},
    "time.256": {{f"default: {{p}}": 1 if on else 2 for p in ("forward", "head", "backward")}},
}}
def show(kind, fields):
    print(json.dumps({{"type": kind, **fields}}))
show("start", {{"names": names, "host": "Mac", "bundle": "demo", "device": "gpu"}})
for name in names:
    show("check", {{
        "name": name, "verdict": "fail" if on and name == "gradients.cpu" else "pass",
        "sentence": "It is so.", "seconds": 1.0,
        "measured": [{{"name": n, "value": v, "unit": ""}} for n, v in measured[name].items()],
    }})
show("end", {{"verdict": "pass", "constants": {{}}, "seconds": 5.0}})
""")
    engine.chmod(0o755)
    return str(engine)


def test_the_neural_accelerator_is_measured_in_a_second_process(tmp_path: Path):
    options = ("--bundle", DEMO_BUNDLE, "--neural-accelerator", "--out", tmp_path)
    succeeded(check(*options, MESP_ENGINE=tf32_engine(tmp_path, True), MLX_ENABLE_TF32="1"))
    page = Page(tmp_path / "self-check.html")
    assert row(page, "neural_accelerator") == [
        "note",
        "With TF32, steps took 0.80 and 0.50 of the time without it. The largest error of a "
        "gradient with TF32 is 0.0003.",
    ]
    assert row(page, "time.128 with TF32, relative") == ["0.8"]
    assert row(page, "with TF32: q.A") == ["0.0003"]
    assert verdicts(tmp_path)["gradients.cpu"] == "pass", "of the process without TF32"


def test_an_engine_that_dies_with_tf32_leaves_the_report(tmp_path: Path):
    engine = Path(tf32_engine(tmp_path, True))
    engine.write_text(engine.read_text().replace("def show", "if on: os.abort()\ndef show"))
    options = ("--bundle", DEMO_BUNDLE, "--neural-accelerator", "--out", tmp_path)
    assert check(*options, MESP_ENGINE=str(engine)).returncode == 1
    assert verdicts(tmp_path)["neural_accelerator"] == "fail"
    assert "something failed" in Page(tmp_path / "self-check.html").text


def test_without_a_neural_accelerator_its_line_is_skipped(tmp_path: Path):
    options = ("--bundle", DEMO_BUNDLE, "--neural-accelerator", "--out", tmp_path)
    succeeded(check(*options, MESP_ENGINE=tf32_engine(tmp_path, False)))
    assert verdicts(tmp_path)["neural_accelerator"] == "skipped"


def test_what_cannot_be_checked_is_one_sentence(tmp_path: Path):
    cases = {
        ("--bundle", tmp_path): f"{tmp_path} is not a bundle: it has no manifest.json. "
        "Make one with mesp-export.",
        (): "Give a --bundle, --phone or a --report.",
        ("--bundle", DEMO_BUNDLE, "--report", "a.json"): "Give a --bundle, --phone or a --report.",
        ("--phone", "--neural-accelerator"): "--neural-accelerator starts mesp-engine on this "
        "machine: give it with --bundle.",
        ("--report", tmp_path / "none"): f"Cannot read {tmp_path / 'none'}: "
        "No such file or directory.",
    }
    for arguments, sentence in cases.items():
        assert refused(check(*arguments, "--out", tmp_path / "out")) == sentence
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"start": {}}', '{"start": 1, "checks": []}'])
def test_a_file_that_is_no_report_is_named(tmp_path: Path, text: str):
    (tmp_path / "a.json").write_text(text)
    said = refused(check("--report", tmp_path / "a.json", "--out", tmp_path))
    assert said == f"{tmp_path / 'a.json'} is not a report of a self-check."


def test_a_report_that_stops_short_fails_where_it_does(tmp_path: Path):
    (tmp_path / "a.json").write_text(json.dumps({"start": START, "checks": [MACHINE]}))
    assert check("--report", tmp_path / "a.json", "--out", tmp_path).returncode == 1
    assert verdicts(tmp_path) == {"machine": "note", "repeats": "fail", "resume": "skipped"}


def test_a_phone_is_started_and_its_report_comes_back(phones: Phones):
    old = phones.add("Ada's iPhone").parent / "self-check" / "old.json"
    old.parent.mkdir()
    old.write_text(json.dumps({"start": START, "checks": [MACHINE, REPEATS, RESUME], "end": END}))
    resumed = {**RESUME, "verdict": "pass"}
    report = {"start": START, "checks": [MACHINE, REPEATS, resumed], "end": END}
    phones.world["self_check"] = report
    out = phones.folder / "out"
    succeeded(check(*("--phone", "--bundle", "qwen.mesp", "--out", out), **phones.environment()))
    assert verdicts(out) == {"machine": "note", "repeats": "pass", "resume": "pass"}
    (launch,) = [call for call in phones.calls() if "launch" in call]
    assert launch[-3:] == [APP, "--self-check", "qwen.mesp"]
    assert "--terminate-existing" in launch
    assert not (out / "old.json").exists(), "it was there before"


def test_a_phone_that_cannot_start_the_app_says_why(phones: Phones):
    phones.add("Ada's iPhone", apps={"org.example.Other": str(phones.folder)})
    done = check("--phone", "--out", phones.folder / "out", **phones.environment())
    assert done.returncode == 2 and done.stderr.startswith(f"Error: The app {APP} is")
    phones.program = "pymobiledevice3"
    phones.world["devices"][0]["apps"] = {APP: str(phones.folder)}
    done = check("--phone", "--out", phones.folder / "out", **phones.environment())
    assert done.returncode == 2 and "press Check This Phone" in done.stderr
