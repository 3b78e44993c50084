"""tools/bench.py as a user runs it, on tiny models with the built engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import TINY, write_model
from mesp.engine import CHECKOUT, built_engine

BENCH = Path(__file__).parent.parent / "tools" / "bench.py"
ENGINE = Path(os.environ.get("MESP_ENGINE") or built_engine(CHECKOUT))
# One thread: several, on a machine that is busy, mostly wait for each other.
ENVIRONMENT = {
    **os.environ,
    "MESP_ENGINE": str(ENGINE if ENGINE.exists() else sys.executable),
    "OPENBLAS_NUM_THREADS": "1",
}
needs_engine = pytest.mark.skipif(not ENGINE.exists(), reason="mesp-engine has not been built")


def bench(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, BENCH, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRONMENT,
    )


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", TINY)


@needs_engine
def test_every_way_to_train_is_measured(model: Path, tmp_path: Path):
    methods = "mesp,mebp,mezo,mesp-paper,mlx-lm-checkpoint-fast"
    size = ("--model", model, "--seq-len", 16, "--steps", 2, "--work", tmp_path / "work")
    done = bench(*size, "--methods", methods, "--offload", "each", "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""

    written = json.loads((tmp_path / "rows.json").read_text())
    rows = {row["variant"]: row for row in written["rows"]}
    assert list(rows) == [
        "mesp in memory",
        "mesp inputs on disk",
        "mesp state on disk",
        *methods.split(",")[1:],
    ]
    for row in rows.values():
        assert (row["model"], row["blocks"], row["seq_len"], row["rank"]) == ("tiny", 3, 16, 8)
        assert row["error"] is None and row["os"] and row["cpu"]
        assert row["seconds"] > 0 and row["steps"] == 2
        assert row["footprint_peak_bytes"] > row["mlx_peak_bytes"] > 0
        # They all begin with the same loss, on the same window.
        assert row["losses"][0] == pytest.approx(rows["mebp"]["losses"][0], rel=1e-4)
    assert rows["mesp-paper"]["losses"] == pytest.approx(rows["mebp"]["losses"], rel=1e-5)
    assert rows["mesp-paper"]["baseline_bytes"] < rows["mesp-paper"]["footprint_peak_bytes"]
    written = [rows[f"mesp {what}"]["written_bytes"] for what in ("in memory", "inputs on disk")]
    assert 0 == written[0] < written[1] < rows["mesp state on disk"]["written_bytes"]
    assert rows["mebp"]["time_to_mebp"] == rows["mesp in memory"]["peak_to_mesp"] == 1
    assert rows["mebp"]["predicted_peak_bytes"] > 0
    assert rows["mebp"]["paper_bytes"] is None

    header, _, *lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert {"method", "peak MB", "predicted MB", "time of MeBP"} <= set(cells(header))
    assert "paper MB" not in header  # it has none for this model
    assert [cells(line)[4] for line in lines[: len(rows)]] == list(rows)


@needs_engine
def test_the_whole_model_is_extrapolated(model: Path, tmp_path: Path):
    size = ("--model", model, "--seq-len", 16, "--layers", 1, 2, "--work", tmp_path / "work")
    files = ("--json", tmp_path / "rows.json", "--plot", tmp_path / "rows.png")
    done = bench(*size, *files, "--methods", "mesp", "--memory-limit", "least", "--steps", 1)
    assert done.returncode == 0, done.stderr
    one, two, whole = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["blocks"] for row in (one, two, whole)] == [1, 2, 3]
    assert whole["extrapolated_from"] == [1, 2]
    peaks = [row["footprint_peak_bytes"] for row in (one, two, whole)]
    assert peaks[2] == pytest.approx(2 * peaks[1] - peaks[0])
    assert two["predicted_peak_bytes"] < whole["predicted_peak_bytes"]
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


@needs_engine
def test_a_run_that_fails_leaves_the_others(model: Path, tmp_path: Path):
    size = ("--model", model, "--seq-len", 16, "--steps", 1, "--work", tmp_path / "work")
    done = bench(*size, "--methods", "mesp", "--memory-limit", 0.1, "auto", "bar")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 2
    assert "tiny 16 mesp ≤ 0.1 MB failed: A memory limit" in done.stderr
    assert "tiny 16 mesp bar failed: There is no figure" in done.stderr
    assert [cells(line)[4] for line in done.stdout.splitlines() if line.startswith("| tiny")] == [
        "mesp ≤ 0.1 MB",
        "mesp",
        "mesp bar",
    ]


def test_storing_h(tmp_path: Path):
    size = ("--model", "Qwen2.5-0.5B", "--seq-len", 8, "--rank", 4, 8, "--steps", 1)
    done = bench("--table", "h", *size, "--work", tmp_path, "--json", tmp_path / "h.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "h.json").read_text())["rows"]
    assert [row["h_bytes_of_block"] for row in rows] == [7 * 8 * 4 * 4, 7 * 8 * 8 * 4]
    assert rows[0]["h_bytes"] == 24 * rows[0]["h_bytes_of_block"]
    assert all(0 < row["h_seconds_of_block"] < row["gradient_seconds_of_block"] for row in rows)


def test_quality_of_mezo(model: Path, tmp_path: Path):
    size = ("--model", model, "--seq-len", 16, "--steps", 2, "--work", tmp_path / "work")
    done = bench("--table", "mezo-quality", *size, "--json", tmp_path / "mezo.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "mezo.json").read_text())["rows"]
    assert [row["layer"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert abs(row["cosine"]) < 0.2 and 0.4 < row["sign_agreement"] < 0.6
        assert row["relative_error"] > 1


@needs_engine
def test_convergence(tmp_path: Path):
    size = ("--seq-len", 32, "--steps", 1, "--work", tmp_path, "--json", tmp_path / "losses.json")
    done = bench("--table", "convergence", *size)
    assert done.returncode == 0, done.stderr
    assert "MeSP and MeBP: largest relative difference" in done.stdout
    mesp, mebp, mezo = json.loads((tmp_path / "losses.json").read_text())["rows"]
    assert [row["method"] for row in (mesp, mebp, mezo)] == ["mesp", "mebp", "mezo"]
    assert mesp["losses"] == pytest.approx(mebp["losses"], rel=1e-4)
    assert [step for step, _ in mesp["held_out"]] == [0, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--methods", "mesp,sgd"], "no method 'sgd'"),
        (["--memory-limit", "much"], "much is neither a number of MB nor"),
        (["--memory-limit", "mebp", "--methods", "mesp"], "needs mebp among the --methods"),
        (["--seq-len", "0"], "0 is not in the range"),
        (["--table", "h", "--offload", "all"], "--offload has no use in the table h"),
        (["--table", "h", "--model", "demo"], "not demo"),
        (["--data", "text.txt"], "--data has no use in the table memory"),
        (["--plot", "peaks.txt"], "must end in .png, .svg or .pdf"),
        (["--model", "no-such-model"], "There is no model no-such-model"),
        (["--model", "demo", "--layers", "99"], "fewer than --layers"),
    ],
)
def test_a_bad_option_is_one_sentence(options: list[str], said: str, tmp_path: Path):
    done = bench(*options, "--work", tmp_path)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert done.stdout == "" and "Traceback" not in done.stderr
