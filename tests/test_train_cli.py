"""mesp-train as a user runs it, against a stand-in engine."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"
MANIFEST = {"format": 1, "name": "demo", "mlx_version": "0.31.1", "device": "cpu"}
MANIFEST |= {"seq_lens": [128, 256, 512], "ranks": [8, 16], "files": []}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "demo.mesp"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(MANIFEST))
    return folder


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from mesp.train import main; main()", *map(str, arguments)]


def environment(how: str = "", **more: str) -> dict[str, str]:
    return {**os.environ, "MESP_ENGINE": str(FAKE_ENGINE), "FAKE_ENGINE": how, **more}


def train(
    *arguments: object, how: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments),
        env=environment(how),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=30,
    )


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_writes_every_setting_and_reports_the_run(bundle: Path, tmp_path: Path):
    run = tmp_path / "run"
    done = train(bundle, "--steps", 20, "--output", run)
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "settings.json").read_text()) == {
        "bundle": str(bundle),
        "output": str(run),
        "method": "mesp",
        "steps": 20,
        "seq_len": 256,
        "rank": 8,
        "alpha": 16.0,
        "learning_rate": 1e-4,
        "optimizer": "sgd",
        "seed": 0,
        "mezo_epsilon": 1e-3,
        "val_batches": 25,
        "eval_every": 0,
        "save_every": 100,
        "memory_limit_mb": None,
        "offload": None,
        "dry_run": False,
    }
    assert done.stdout.splitlines() == [
        "Finished after 20 steps in 10 s: 512 tokens/s, peak footprint 45.6 MB.",
        "Held-out loss 4.500 before, 3.800 after (nats a token).",
        f"Adapters: {run / 'adapters'}",
        f"Log:      {run / 'metrics.jsonl'}",
    ]


def test_options_reach_the_engine(bundle: Path, tmp_path: Path):
    run = tmp_path / "run"
    options = {
        "method": "mezo",
        "steps": 3,
        "seq_len": 128,
        "rank": 16,
        "alpha": 32.0,
        "learning_rate": 0.5,
    }
    options |= {"seed": 7, "mezo_epsilon": 0.01, "val_batches": 2, "eval_every": 1, "save_every": 2}
    arguments = [
        text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)
    ]
    assert train(bundle, *arguments, "--output", run).returncode == 0
    assert options.items() <= json.loads((run / "settings.json").read_text()).items()


def test_without_a_terminal_a_line_is_printed_every_tenth_of_the_steps(
    bundle: Path, tmp_path: Path
):
    lines = train(bundle, "--steps", 40, "--output", tmp_path / "run").stderr.splitlines()
    assert lines[0] == "step 0: held-out loss 4.500"
    assert [line.split()[1] for line in lines[1:-1]] == [f"{step}/40" for step in range(4, 41, 4)]
    assert lines[1].startswith("step 4/40  loss 3.975  512 tok/s  30.0 MB  ")
    assert lines[-1] == "step 40: held-out loss 3.800"


def test_on_a_terminal_a_bar_shows_where_the_run_is(bundle: Path, tmp_path: Path):
    master, slave = pty.openpty()
    arguments = command(bundle, "--steps", 50, "--output", tmp_path / "run")
    shown = environment("slow", TERM="xterm", COLUMNS="100")
    with subprocess.Popen(arguments, env=shown, stdout=subprocess.PIPE, stderr=slave) as process:
        os.close(slave)
        output = b""
        while True:
            try:
                output += os.read(master, 4096)
            except OSError:  # the other end is closed
                break
    os.close(master)
    assert process.returncode == 0
    text = output.decode()
    assert "50/50  loss 3.545  512 tok/s  30.0 MB" in text
    assert "━" in text
    assert text.count("/50  loss") > 3, "the bar moves while the run goes on"


def test_default_output_names_bundle_method_and_time(bundle: Path, tmp_path: Path):
    assert train(bundle, "--steps", 1, "--method", "mebp", cwd=tmp_path).returncode == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.match("demo-mebp-20??????T??????Z")
    assert (run / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", 0], "Invalid value for '--steps': 0 is not in the range x>=1."),
        (["--rank", 0], "Invalid value for '--rank': 0 is not in the range x>=1."),
        (["--rank", 4], "The bundle has no rank 4; it was exported for 8, 16."),
        (
            ["--seq-len", 200],
            "The bundle has no sequence length 200; it was exported for 128, 256, 512.",
        ),
        (
            ["--learning-rate", -1e-4],
            "Invalid value for '--learning-rate': -0.0001 is not in the range x>0.",
        ),
        (
            ["--learning-rate", "nan"],
            "Invalid value for '--learning-rate': nan is not a finite number.",
        ),
        (["--alpha", "inf"], "Invalid value for '--alpha': inf is not a finite number."),
        (
            ["--method", "sft"],
            "Invalid value for '--method': 'sft' is not one of 'mesp', 'mebp', 'mezo'.",
        ),
        (
            ["--output", "/proc/run"],
            "Cannot write the run to /proc/run: No such file or directory.",
        ),
    ],
)
def test_a_bad_option_is_one_sentence(bundle: Path, tmp_path: Path, arguments: list, sentence: str):
    done = train(bundle, "--steps", 5, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr.splitlines()[-1], done.stdout) == (
        2,
        f"Error: {sentence}",
        "",
    )
    assert list(tmp_path.iterdir()) == [bundle]


def test_a_missing_bundle_is_one_sentence(tmp_path: Path):
    done = train(tmp_path / "none.mesp", "--steps", 5, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ") and len(done.stderr.splitlines()) == 1
    assert "none.mesp" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_output_that_holds_a_run_is_refused(bundle: Path, tmp_path: Path):
    run = tmp_path / "run"
    assert train(bundle, "--steps", 2, "--output", run).returncode == 0
    before = (run / "metrics.jsonl").read_bytes()
    again = train(bundle, "--steps", 2, "--output", run)
    assert again.returncode == 2
    assert again.stderr == f"Error: {run} already holds a run: name another folder with --output.\n"
    assert (run / "metrics.jsonl").read_bytes() == before


def test_what_the_engine_refuses_is_said_and_nothing_is_left(bundle: Path, tmp_path: Path):
    done = train(bundle, "--steps", 5, "--output", tmp_path / "deep" / "run", how="refuse")
    assert done.returncode == 2
    assert done.stderr == "Error: blocks/00.bin is damaged; write the bundle again.\n"
    assert list(tmp_path.iterdir()) == [bundle]


def test_a_failure_on_the_way_says_what_is_left(bundle: Path, tmp_path: Path):
    run = tmp_path / "run"
    done = train(bundle, "--steps", 5, "--output", run, how="fail")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "Error: There is no space left on the disk. "
        f"The log is in {run / 'metrics.jsonl'}; no adapters had been saved."
    )


def test_a_crash_says_what_was_saved(bundle: Path, tmp_path: Path):
    run = tmp_path / "run"
    done = train(bundle, "--steps", 5, "--save-every", 2, "--output", run, how="crash")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "Error: mesp-engine was ended by SIGSEGV after step 3. "
        f"The log is in {run / 'metrics.jsonl'}; the adapters last saved are in {run / 'adapters'}."
    )


def test_what_else_the_engine_prints_is_passed_on(bundle: Path, tmp_path: Path):
    done = train(bundle, "--steps", 5, "--output", tmp_path / "run", how="noisy")
    assert done.returncode == 0
    assert "a library says hello" in done.stderr
    assert done.stderr.endswith("The bundle was exported for the CPU.\n")


def start_and_wait_for_steps(bundle: Path, run: Path, how: str) -> subprocess.Popen:
    arguments = command(bundle, "--steps", 5000, "--output", run)
    process = subprocess.Popen(
        arguments,
        env=environment(how),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 20
    log = run / "metrics.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 5:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    return process


@pytest.mark.parametrize(
    "whole_group", [True, False], ids=["typed on the terminal", "sent to mesp-train alone"]
)
def test_ctrl_c_stops_cleanly_and_reaches_the_engine_once(
    bundle: Path, tmp_path: Path, whole_group: bool
):
    run = tmp_path / "run"
    process = start_and_wait_for_steps(bundle, run, "slow")
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert (run / "signals").read_text() == "SIGINT\n"
    assert records(run)[-1]["reason"] == "stopped"
    assert output.startswith(f"Stopped after {records(run)[-1]['step']} steps")
    assert "Traceback" not in errors
    assert (run / "adapters" / "adapters.safetensors").exists()


def test_a_signal_that_is_ignored_stays_so(bundle: Path, tmp_path: Path):
    """As under nohup, or for a job that a script starts in the background."""
    run = tmp_path / "run"
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = start_and_wait_for_steps(bundle, run, "slow")
    finally:
        signal.signal(signal.SIGINT, previous)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert (run / "signals").read_text() == "SIGTERM\n"


def test_a_second_ctrl_c_ends_the_engine_at_once(bundle: Path, tmp_path: Path):
    run = tmp_path / "run"
    process = start_and_wait_for_steps(bundle, run, "deaf")
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert errors.splitlines()[-1].startswith("Error: The run was ended at once. The log is in ")
    assert records(run)[-1]["type"] == "step", "the engine was not left running to its end"


def test_an_engine_that_is_no_program_is_named(bundle: Path, tmp_path: Path):
    done = subprocess.run(
        command(bundle, "--steps", 1),
        env=environment(MESP_ENGINE="/nowhere/mesp-engine"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr == "Error: MESP_ENGINE names /nowhere/mesp-engine, which is not a program.\n"


# Finding and building the engine, in a stand-in checkout with a stand-in compiler.

SWIFT = """#!/bin/sh
echo "$MESP_HOST_MLX $*" >> "$CHECKOUT/calls"
echo "[1/2] Compiling MeSPCore"
[ -e "$CHECKOUT/broken" ] && { echo "error: no such module"; exit 1; }
mkdir -p "$CHECKOUT/.build/release" && cp "$CHECKOUT/engine" "$CHECKOUT/.build/release/mesp-engine"
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "checkout"
    (folder / "ios").mkdir(parents=True)
    (folder / "ios" / "Core.swift").touch()
    (folder / "Package.swift").touch()
    (folder / "engine").write_bytes(FAKE_ENGINE.read_bytes())
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "swift").write_text(SWIFT)
    (programs / "swift").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("CHECKOUT", str(folder))
    monkeypatch.delenv("MESP_ENGINE", raising=False)
    monkeypatch.delenv("MESP_HOST_MLX", raising=False)
    return folder


def find(checkout: Path) -> subprocess.CompletedProcess:
    program = "import sys, pathlib, mesp.engine, mesp.errors\n"
    program += "try: print(mesp.engine.find_engine(pathlib.Path(sys.argv[1])))\n"
    program += "except mesp.errors.MespError as error: sys.exit(error.format_message())\n"
    return subprocess.run([sys.executable, "-c", program, checkout], capture_output=True, text=True)


def test_a_missing_engine_is_built_against_the_installed_mlx(checkout: Path):
    found = find(checkout)
    engine = checkout / ".build" / "release" / "mesp-engine"
    assert found.stdout.strip() == str(engine), found.stderr
    assert engine.exists()
    mlx, *arguments = (checkout / "calls").read_text().split()
    assert (Path(mlx) / "include").is_dir()
    assert arguments == [
        "build",
        "-c",
        "release",
        "--product",
        "mesp-engine",
        "--package-path",
        str(checkout),
    ]


def test_an_engine_is_built_again_only_when_a_source_is_newer(checkout: Path):
    find(checkout)
    find(checkout)
    assert len((checkout / "calls").read_text().splitlines()) == 1
    later = time.time() + 60
    os.utime(checkout / "ios" / "Core.swift", (later, later))
    find(checkout)
    assert len((checkout / "calls").read_text().splitlines()) == 2


def test_a_failed_build_shows_what_the_compiler_said(checkout: Path):
    (checkout / "broken").touch()
    found = find(checkout)
    assert found.returncode == 1
    assert "error: no such module" in found.stderr
    assert found.stderr.splitlines()[-1].startswith("mesp-engine could not be built")


def test_a_missing_compiler_is_named(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "install Swift 6 from https://swift.org/install" in find(checkout).stderr


def test_without_a_checkout_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MESP_ENGINE", raising=False)
    assert "set MESP_ENGINE" in find(tmp_path).stderr
