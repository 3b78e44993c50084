import re
import subprocess
from pathlib import Path

from safetensors.numpy import load_file

from helpers.paths import ROOT
from mesp.engine.build import find_engine


def test_the_example_trains_as_an_app_does(tmp_path: Path):
    program = find_engine().with_name("tutor")
    assert program.is_file(), "make engine-and-tests builds it"
    bundle = ROOT / "ios/MeSPTrainer/Demo.mesp"
    done = subprocess.run([program, bundle, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("== ")
    assert len(parts) == 7, done.stdout
    first, cancelled, whole, choices, file, refused = parts[1:]
    assert '[!{"arguments":{"lamp":true},"name":"set"}][<end>]' in first

    def steps(part: str) -> list[int]:
        return [int(step) for step in re.findall(r"^step (\d+)/", part, re.M)]

    assert steps(cancelled)[0] == 0 and 10 <= steps(cancelled)[-1] < 30
    assert steps(whole)[0] >= 10 and steps(whole)[-1] == 30
    assert "the app's own work" in whole and "waits: The app is busy" in whole
    losses = [float(loss) for loss in re.findall(r"held-out ([\d.]+)", cancelled + whole)]
    assert losses[-1] < losses[0] / 2
    assert re.search(r"^with adapters: \".+\"\nwithout: ", whole, re.M)
    assert steps(choices)[-1] == 12 and steps(file)[-1] == 2 and "31 conversations" in file
    assert refused.splitlines()[1] == "steps must be at least 1."
    half, end = (
        load_file(tmp_path / name / "adapters.safetensors") for name in ("half", "adapters")
    )
    assert half.keys() == end.keys() and any((half[name] != end[name]).any() for name in half)
