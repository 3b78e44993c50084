import json
import shutil
from pathlib import Path

import pytest

import demo


@pytest.mark.slow
def test_the_demo_counts_what_is_right(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, tmp_path: Path
):
    for name, value in {"STEPS": 21, "TRAINING_CASES": 42, "HELD_OUT_CASES": 3, "SHOWN": 2}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "OUT", tmp_path)
    demo.main(["--seed", "1"], standalone_mode=False)
    printed, _ = capfd.readouterr()
    assert "Right to the letter: 0 of 3 before fine-tuning, 0 of 3 after." in printed
    requests = (tmp_path / "requests" / "valid.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in requests]
    for prompt in prompts[:2]:
        assert f"\n{prompt}\n  before ✗ " in printed
    assert prompts[2] not in printed
    (samples,) = (tmp_path / "collected").glob("*/samples.json")
    assert [each["prompt"] for each in json.loads(samples.read_text())] == prompts[:2]
    assert prompts[0] in (tmp_path / "report.html").read_text()
    shutil.rmtree(tmp_path)
