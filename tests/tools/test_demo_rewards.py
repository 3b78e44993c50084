import json
import re
from pathlib import Path

import pytest

import demo_rewards


def test_nothing_of_held_out_requests_is_trained_on():
    train, held_out = map(demo_rewards.cases, (False, True))
    assert len(train) >= demo_rewards.PROMPTS * demo_rewards.STEPS
    assert len(held_out) >= demo_rewards.HELD_OUT_CASES
    for key in ("name", "city"):
        trained, new = (
            {json.loads(case["completion"])[key] for case in cases} for cases in (train, held_out)
        )
        assert new and not trained & new
    for case in held_out:
        answer = json.loads(case["completion"])
        assert all(value in case["prompt"] for value in answer.values())


@pytest.mark.slow
def test_the_demo_counts_what_is_right(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, tmp_path: Path
):
    small = {"HELD_OUT_CASES": 6, "MAX_TOKENS": 8, "PROMPTS": 1, "GROUP_SIZE": 3}
    for name, value in (small | {"OUT": tmp_path}).items():
        monkeypatch.setattr(demo_rewards, name, value)
    options = ["--model", "demo", "--steps", "2", "--seed", "3", "--seed", "4"]
    demo_rewards.main(options, standalone_mode=False)
    printed, _ = capfd.readouterr()
    # The demo model never answers in JSON.
    for seed in (3, 4):
        assert re.search(rf"^│ {seed} +│ 0 of 6 +│ 0 of 6 +│", printed, re.M)
    assert "A supervised run with as many sequences a step peaks at" in printed
    assert len([*(tmp_path / "runs").glob("*/seed[34]")]) == 2
