import json
import zipfile
from functools import partial
from pathlib import Path

import pytest

from helpers.commands import refused, run_tool, succeeded
from helpers.paths import ROOT
from helpers.phones import Phones

START = {"names": ["machine"], "host": "iPhone18,1", "bundle": "demo", "device": "gpu"}
MACHINE = {"name": "machine", "verdict": "note", "sentence": "6 cores.", "measured": []}
REPORT = {
    "start": START,
    "checks": [{**MACHINE, "seconds": 0.1}],
    "end": {"verdict": "pass", "constants": {}, "seconds": 1},
}


first_hour = partial(run_tool, "first_hour.py")


def packed(out: Path) -> dict[str, str]:
    with zipfile.ZipFile(out / "first-hour.zip") as archive:
        names = archive.namelist()
        return {n.removeprefix("first-hour/"): archive.read(n).decode() for n in names}


@pytest.mark.slow
def test_this_machine_gives_one_file(tmp_path: Path):
    home = tmp_path / "ada"
    out = home / "out"
    done = succeeded(first_hour("--seconds", 0.05, "--out", out, HOME=str(home)))
    assert done.stdout.endswith(f"Send this file back: {out / 'first-hour.zip'}\n")
    files = packed(out)
    assert set(files) == {
        "machine.json", "log.txt", "self-check/self-check.json", "self-check/self-check.html",
        "runs/default/metrics.jsonl", "runs/cpu/metrics.jsonl",
    }  # fmt: skip
    assert json.loads(files["machine.json"])["failed"] == []
    assert json.loads(files["self-check/self-check.json"])["end"]["verdict"] == "pass"
    assert "The losses of the first step are" in files["log.txt"]
    assert not any(str(home) in text for text in files.values())


def test_a_phones_reports_and_logs_come_and_nothing_else(phones: Phones, tmp_path: Path):
    run = phones.add("Ada's iPhone") / "demo mesp"
    (run / "adapters").mkdir(parents=True)
    (run / "adapters" / "adapters.safetensors").write_bytes(b"secret")
    recorded = ROOT / "ios" / "MeSPTrainer" / "Recorded" / "metrics.jsonl"
    (run / "metrics.jsonl").write_bytes(recorded.read_bytes())
    (run / "samples.json").write_text('[{"prompt": "private", "before": "", "after": ""}]')
    phones.world["self_check"] = REPORT
    out = tmp_path / "out"
    succeeded(first_hour("--phone", "--out", out, **phones.environment()))
    files = packed(out)
    assert json.loads(files["self-check/self-check.json"])["start"]["host"] == "iPhone18,1"
    assert files["runs/demo mesp/metrics.jsonl"] == recorded.read_text()
    assert not any("private" in text or "secret" in text for text in files.values())


def test_a_step_that_fails_is_in_the_file(phones: Phones, tmp_path: Path):
    phones.add("Ada's iPhone", apps={"org.example.Other": str(tmp_path)})
    out = tmp_path / "out"
    done = first_hour("--phone", "--out", out, **phones.environment())
    assert done.returncode == 1 and "Send this file back" in done.stdout
    assert done.stderr.startswith("This failed: ")
    files = packed(out)
    assert len(json.loads(files["machine.json"])["failed"]) == 2
    assert "is not on the phone" in files["log.txt"]


def test_a_phone_that_is_not_wanted_is_refused(tmp_path: Path):
    done = first_hour("--device", "Ada's iPhone", "--out", tmp_path / "out")
    assert refused(done) == "--device names a phone: give it with --phone."
    assert not (tmp_path / "out").exists()
