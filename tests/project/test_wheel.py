import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mesp
from helpers.paths import ROOT
from helpers.sources import copy_sources
from mesp.engine.build import find_engine, mlx_folder

pytestmark = pytest.mark.wheel


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("installed")


@pytest.fixture(scope="module")
def programs(work: Path) -> Path:
    context, environment = work / "context", work / "environment"
    copy_sources(context)
    call([sys.executable, "-m", "build", "--outdir", work / "dist", context], work)
    (wheel,) = (work / "dist").glob("*.whl")
    call([sys.executable, "-m", "venv", environment], work)
    call([environment / "bin" / "pip", "install", "--quiet", wheel], work)
    return environment / "bin"


def call(command: list[object], work: Path, **environment: str) -> subprocess.CompletedProcess:
    known = {name: value for name, value in os.environ.items() if not name.startswith("MESP_")}
    known.pop("PYTHONPATH", None)
    done = subprocess.run(
        [*map(str, command)],
        cwd=work,
        env=known | {"XDG_CACHE_HOME": str(work / "cache")} | environment,
        capture_output=True,
        text=True,
    )
    assert environment or done.returncode == 0, done.stderr + done.stdout
    return done


def test_the_commands_work_away_from_a_checkout(programs: Path, work: Path):
    call([programs / "mesp", "export", "--model", "demo", "--seq-len", 64], work)
    steps = ("--steps", 5, "--val-batches", 2)
    refused = [programs / "mesp-train", "demo.mesp", *steps, "--out", "none"]
    done = call(refused, work, PATH="/nowhere")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("Error: mesp-engine has not been built, and")
    assert not (work / "none").exists()

    first = call([programs / "mesp-train", "demo.mesp", *steps, "--out", "run"], work)
    assert "Building mesp-engine in" in first.stderr
    assert "Finished after 5 steps" in first.stdout
    again = call([programs / "mesp", "train", "demo.mesp", *steps, "--out", "again"], work)
    assert "Building" not in again.stderr
    (place,) = (work / "cache" / "mesp").iterdir()
    assert {path.name for path in place.iterdir()} == {"mesp-engine", "lock", "mlx"}

    adapters = ("--adapters", "run/adapters")
    prompt = ("--prompt", "My fellow citizens", "--max-tokens", 8)
    assert call([programs / "mesp", "generate", "demo.mesp", *adapters, *prompt], work).stdout
    (work / "text.jsonl").write_text('{"text": "We the people of the United States"}\n')
    measured = call([programs / "mesp", "evaluate", "demo.mesp", "text.jsonl", *adapters], work)
    assert "perplexity" in measured.stdout
    call([programs / "mesp", "fuse", "demo.mesp", *adapters, "--out", "fused"], work)
    assert (work / "fused" / "model.safetensors").exists()
    listed = call([programs / "mesp", "models"], work)
    assert listed.stderr == "" and "Qwen2.5-0.5B" in listed.stdout


FIVE_LINES = """
import mesp
bundle = mesp.export("demo", "five.mesp", seq_len=64)
run = mesp.train(bundle, steps=5, memory_limit=60)
print(run.losses, run.peak_bytes, run.adapters)
print(mesp.generate(bundle, "My fellow citizens", adapters=run.adapters, max_tokens=8))
print(mesp.evaluate(bundle, "five.jsonl", adapters=run.adapters))
"""


def test_five_lines_of_python_work_away_from_a_checkout(programs: Path, work: Path):
    (work / "five.jsonl").write_text('{"text": "We the people"}\n{"text": "of the world"}\n')
    done = call([programs / "python", "-c", FIVE_LINES], work)
    assert "perplexity" in done.stdout and "five.mesp" not in done.stderr
    notebook = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    call([programs / "python", "-c", "\n".join(cells)], work)


def test_a_wheel_of_this_platform_needs_no_compiler(work: Path):
    call(["make", "--directory", ROOT, "dist"], work)
    (wheel,) = (ROOT / "dist").glob(f"mesp-{mesp.__version__}-py3-none-m*.whl")
    environment = work / "ready"
    call([sys.executable, "-m", "venv", environment], work)
    call([environment / "bin" / "pip", "install", "--quiet", wheel], work)
    program = environment / "bin" / "mesp"
    (carried,) = environment.rglob("programs/mesp-engine")
    names_ours = str(mlx_folder()).encode() in carried.read_bytes()
    assert not names_ours  # The engine finds the `mlx` of its own environment.
    alone = {"PATH": "/nowhere", "XDG_CACHE_HOME": str(work / "ready-cache")}
    for command in (
        ["export", "--model", "demo", "--seq-len", 64, "--out", "ready.mesp"],
        ["train", "ready.mesp", "--steps", 5, "--val-batches", 2, "--out", "ready-run"],
        ["generate", "ready.mesp", "--adapters", "ready-run/adapters", "--prompt", "My fellow"],
    ):
        done = call([program, *command], work, **alone)
        assert done.returncode == 0 and "Building" not in done.stderr, done.stderr
    assert not (work / "ready-cache" / "mesp").exists()
    refused = call([carried, "federate", "settings.json"], work, **alone)
    assert refused.returncode == 2 and "takes no part in federations" in refused.stderr

    train = ["train", "ready.mesp", "--steps", 5, "--val-batches", 2, "--out"]
    engine = {"MESP_ENGINE": str(find_engine())}
    call([program, *train, "checkout-run"], work, **engine)
    ready, other = (mesp.RunLog.load(work / name).losses for name in ("ready-run", "checkout-run"))
    assert ready == other and len(ready) == 5
