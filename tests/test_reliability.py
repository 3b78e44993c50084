import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from helpers.commands import HANG, call, command, finish, succeeded, wait_for, without_privileges
from helpers.models import TEXT, TINY, write_model
from helpers.paths import ROOT
from mesp.bundle.reader import Bundle
from mesp.engine.build import find_engine
from mesp.runs.log import RunLog

pytestmark = pytest.mark.slow
COLLECT = ROOT / "tools" / "collect.py"
SMALL = {**TINY, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
STEPS = 12
EVAL_EVERY = 4
GREEDY = {"adapters": [], "temperature": 0.0, "top_p": 1.0, "seed": 0}


def refused(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 2, (done.returncode, done.stderr)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr.strip()


def ended(process: subprocess.Popen) -> subprocess.CompletedProcess:
    _, errors = process.communicate(timeout=HANG)
    return subprocess.CompletedProcess(process.args, process.returncode, "", errors)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("models") / "small", SMALL)
    (folder / "text.txt").write_text(TEXT)
    return folder


def export_options(model: Path, out: Path, seq_len: int = 8, *more: object) -> list[str]:
    options = ("--model", model, "--data", model / "text.txt", "--out", out, "--seq-len", seq_len)
    return list(map(str, (*options, *more)))


def export_command(*arguments: object) -> list[str]:
    return command("export", *export_options(*arguments))


def export_process(*arguments: object) -> BaseProcess:
    """Do not preload mlx_lm. Its import starts a thread of MLX, which a forked process
    would lack.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mesp.commands.export", "transformers"])
    program = f"from mesp.commands.export import main; main({export_options(*arguments)})"
    process = context.Process(target=exec, args=(program,))
    process.start()
    return process


@pytest.fixture(scope="module")
def bundle(model: Path) -> Path:
    out = model.parent / "small.mesp"
    call("export", *export_options(model, out))
    return out


@pytest.fixture(scope="module")
def settings(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    output = tmp_path_factory.mktemp("settings") / "run"
    options = ("--steps", 1, "--optimizer", "adamw", "--learning-rate", 0.01, "--val-batches", 2)
    call("train", bundle, *options, "--out", output)
    settings = json.loads((output / "settings.json").read_text())
    return settings | {"steps": STEPS, "eval_every": EVAL_EVERY}


class Engine:
    def __init__(self, folder: Path, settings: dict, **changes: object):
        self.output = folder / "run"
        self.file = folder / "settings.json"
        self.settings = settings | {"output": str(self.output)} | changes
        folder.mkdir(parents=True, exist_ok=True)

    def line(self) -> list[str]:
        resume = (self.output / "metrics.jsonl").exists()
        self.file.write_text(json.dumps(self.settings | {"resume": resume}))
        return [str(find_engine()), str(self.file)]

    def start(self, **options: object) -> subprocess.Popen:
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(self.line(), **(streams | options))

    def finish(self, **options: object) -> subprocess.CompletedProcess:
        return finish(self.line(), **options)

    def records(self) -> list[dict]:
        log = self.output / "metrics.jsonl"
        lines = log.read_text().split("\n") if log.exists() else []
        return [json.loads(line) for line in lines[:-1]]

    def losses(self) -> list[tuple]:
        kinds = ("step", "eval")
        return [(r["type"], r["step"], r["loss"]) for r in self.records() if r["type"] in kinds]

    def last_step(self) -> int:
        return max([step for kind, step, _ in self.losses() if kind == "step"], default=0)

    def saved_step(self) -> int:
        path = self.output / "state.safetensors"
        if not path.exists():
            return 0
        with safe_open(path, "numpy") as file:
            return json.loads(file.metadata()["state"])["step"]

    def start_to_step(self, step: int, **options: object) -> subprocess.Popen:
        process = self.start(**options)
        wait_for(lambda: self.last_step() >= step, process, pause=0.002)
        return process


@pytest.fixture(scope="module")
def whole(settings: dict, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    engine = Engine(tmp_path_factory.mktemp("whole"), settings)
    assert engine.finish().returncode == 0
    return engine


def adapters(engine: Engine) -> dict[str, bytes]:
    arrays = load_file(engine.output / "adapters" / "adapters.safetensors")
    return {name: array.tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize("save_every", [1, 2, 3])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    settings: dict, whole: Engine, tmp_path: Path, save_every: int
):
    generator = random.Random(save_every)
    started = time.monotonic()
    assert Engine(tmp_path / "timed", settings, save_every=save_every).finish().returncode == 0
    duration = time.monotonic() - started
    kills = number = 0
    while kills < 12:
        number += 1
        engine = Engine(tmp_path / str(number), settings, save_every=save_every)
        finished = False
        while not finished:
            process, before = engine.start(), engine.saved_step()
            kill_at_random(generator, process, duration, engine.output)
            _, errors = process.communicate(timeout=HANG)
            finished = process.returncode == 0
            stuck = engine.saved_step() == before  # other programs made it slower
            duration *= 0.8 if finished else 1.25 if stuck else 1
            kills += not finished
            assert process.returncode in (0, -signal.SIGKILL), errors
            assert engine.last_step() - engine.saved_step() <= save_every
            steps = [step for kind, step, _ in engine.losses() if kind == "step"]
            assert steps == list(range(1, len(steps) + 1)), "a gap, or a repeat"
            assert engine.losses() == whole.losses()[: len(engine.losses())]
            for file in engine.output.rglob("*.safetensors"):
                if not file.name.startswith("partial"):
                    load_file(file)
        assert engine.losses() == whole.losses()
        assert adapters(engine) == adapters(whole)
        assert engine.finish().returncode == 0, "a finished run can be finished again"


def kill_at_random(
    generator: random.Random, process: subprocess.Popen, duration: float, output: Path
) -> None:
    if generator.random() < 0.25:
        deadline = time.monotonic() + generator.uniform(0.2, 1) * duration
        while process.poll() is None and time.monotonic() < deadline:
            if any(output.rglob("*partial*")):
                break
    else:
        time.sleep(generator.uniform(0, duration))
    process.kill()


def test_a_killed_export_leaves_the_old_bundle_or_the_new(model: Path, tmp_path: Path):
    generator = random.Random(4)
    out = tmp_path / "out.mesp"
    unfinished = tmp_path / ".out.mesp.partial"
    lengths = [8]
    assert finish(export_command(model, out)).returncode == 0
    kills = -1
    took = 0.0
    while kills < 16:
        lengths.append(16 if lengths[-1] == 8 else 8)
        process = export_process(model, out, lengths[-1], "--overwrite")
        # An export mostly reads and computes, so it is killed only after it has begun to write.
        while not unfinished.exists() and process.is_alive():
            time.sleep(0.001)
        begun = time.monotonic()
        if kills >= 0:
            process.join(generator.uniform(0, took))
            process.kill()
        process.join(HANG)
        assert process.exitcode in (0, -signal.SIGKILL)
        killed = process.exitcode == -signal.SIGKILL
        took = took if killed else max(time.monotonic() - begun, 0.02)
        kills += killed or kills < 0
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["seq_lens"][0] in lengths[-2:]
        lengths.append(manifest["seq_lens"][0])
        Bundle(out).verify()
    assert finish(export_command(model, out, 8, "--overwrite")).returncode == 0
    Bundle(out).verify()
    assert [path.name for path in tmp_path.iterdir()] == ["out.mesp"], "nothing is left behind"


def test_killed_collecting_leaves_whole_runs(whole: Engine, tmp_path: Path):
    generator = random.Random(5)
    source, out = tmp_path / "runs", tmp_path / "out"
    for name in ("a", "b", "c"):
        shutil.copytree(whole.output, source / name)
    line = [sys.executable, str(COLLECT), "--from", str(source), "--out", str(out)]
    kills, took = -1, 0.0  # the first is not killed but timed
    while kills < 20:
        begun = time.monotonic()
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if kills >= 0:
            with contextlib.suppress(subprocess.TimeoutExpired):  # Python starts in the first third
                process.wait(generator.uniform(took / 3, took))
            process.kill()
        killed = process.wait() == -signal.SIGKILL
        assert killed or process.returncode == 0
        took = took if killed else time.monotonic() - begun
        kills += killed or kills < 0
        for name in ("a", "b", "c"):
            assert (out / name / "metrics.jsonl").read_bytes() == (
                whole.output / "metrics.jsonl"
            ).read_bytes()
            load_file(out / name / "adapters" / "adapters.safetensors")
    assert finish(line).returncode == 0
    assert sorted(path.name for path in out.iterdir()) == ["a", "b", "c"]


def test_a_second_run_in_the_same_folder_is_refused(settings: dict, whole: Engine, tmp_path: Path):
    engine = Engine(tmp_path, settings, steps=100_000)
    process = engine.start_to_step(1)
    before = (engine.output / "settings.json").exists()
    sentence = refused(engine.finish())
    assert f"Process {process.pid} on {os.uname().nodename} is writing" in sentence
    train = command("train", "--resume", "--out", engine.output)
    (engine.output / "settings.json").write_text(json.dumps(engine.settings))
    assert f"Process {process.pid} on" in refused(finish(train)) and not before
    process.kill()
    process.wait()
    engine.settings["steps"] = engine.last_step() + 1
    assert engine.finish().returncode == 0, "the lock of a dead process is free"


def test_a_second_export_into_the_same_folder_is_refused(model: Path, tmp_path: Path):
    out = tmp_path / "out.mesp"
    assert finish(export_command(model, out)).returncode == 0
    process = subprocess.Popen(
        export_command(model, out, 8, "--overwrite"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for((tmp_path / ".out.mesp.partial").exists, process, pause=0.001)
    process.send_signal(signal.SIGSTOP)
    sentence = refused(finish(export_command(model, out, 16, "--overwrite")))
    assert "Another mesp-export" in sentence
    if sys.platform == "linux":
        assert f"process {process.pid} on {os.uname().nodename}" in sentence
    process.kill()
    process.wait()
    assert finish(export_command(model, out, 16, "--overwrite")).returncode == 0
    assert Bundle(out).manifest.seq_lens == (16,)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_stops(settings: dict, whole: Engine, tmp_path: Path, number: int):
    engine = Engine(tmp_path, settings, save_every=0)
    process = engine.start_to_step(2)
    process.send_signal(number)
    assert not succeeded(ended(process)).stderr
    assert engine.records()[-1]["reason"] in ("stopped", "finished")
    assert engine.finish().returncode == 0
    assert engine.losses() == whole.losses()


def test_a_memory_warning_makes_the_plan_cheaper_once(settings: dict, tmp_path: Path):
    engine = Engine(tmp_path, settings, steps=300, eval_every=0)
    process = engine.start_to_step(2)
    process.send_signal(signal.SIGUSR1)
    assert not succeeded(ended(process)).stderr
    events = [record["event"] for record in engine.records() if record["type"] == "event"]
    assert events == ["cheaper_plan", "resumed"]


def test_a_run_whose_reader_is_gone_is_saved(settings: dict, whole: Engine, tmp_path: Path):
    engine = Engine(tmp_path, settings, save_every=0)
    process = engine.start_to_step(2, stdout=subprocess.PIPE)
    process.stdout.close()
    process.stdout = None
    assert not succeeded(ended(process)).stderr
    assert engine.finish().returncode == 0
    assert engine.losses() == whole.losses()


def export_to(model: Path, bundle: Path, folder: Path) -> list[str]:
    return export_command(model, folder / "out.mesp")


def fuse_to(model: Path, bundle: Path, folder: Path) -> list[str]:
    adapters = folder.parent / "run" / "adapters"
    if not adapters.exists():
        call("train", bundle, "--steps", 1, "--out", adapters.parent)
    return command("fuse", bundle, "--adapters", adapters, "--out", folder / "fused")


def evaluate_to(model: Path, bundle: Path, folder: Path) -> list[str]:
    texts = folder.parent / "texts.jsonl"
    texts.write_text(json.dumps({"text": TEXT}) + "\n")
    return command("evaluate", bundle, texts, "--out", folder / "out.json")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda each: each.name)
@pytest.mark.parametrize("line", [export_to, fuse_to, evaluate_to])
def test_a_command_that_is_ended_leaves_nothing(
    model: Path, bundle: Path, tmp_path: Path, number: int, line: Callable
):
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    for folder in (out, temporary):
        folder.mkdir()
    engine, begun = tmp_path / "engine", tmp_path / "begun"
    engine.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {find_engine()} --version\n'
        f"echo $$ > {begun}.partial\nmv {begun}.partial {begun}\nexec sleep 600\n"
    )
    engine.chmod(0o755)
    started = subprocess.Popen(
        line(model, bundle, out),
        env=os.environ | {"TMPDIR": str(temporary), "MESP_ENGINE": str(engine)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for(lambda: begun.exists() or list(out.iterdir()), started, pause=0.001)
    started.send_signal(number)
    done = ended(started)
    assert (done.returncode, done.stderr) == (128 + number, "")
    assert not list(out.iterdir()) and not list(temporary.iterdir())
    assert not begun.exists() or not Path("/proc", begun.read_text().strip()).exists()


def test_an_ended_engine_computes_nothing_more(bundle: Path, large: Path, tmp_path: Path):
    """A signal may arrive while MLX's threads compute."""
    prompt = GREEDY | {"prompt": [5] * 40, "max_tokens": 1000}
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"bundle": str(large), **prompt, "stop": []}))
    for number in range(20):
        process = subprocess.Popen(
            [find_engine(), "generate", settings], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        process.stdout.readline()
        time.sleep(0.003 * number)
        process.terminate()
        done = ended(process)
        assert (done.returncode, done.stderr) == (0, b"")


def test_a_clock_that_is_set_back_changes_no_run(
    settings: dict, whole: Engine, tmp_path: Path, clock_set_back: dict
):
    begun = time.monotonic()
    engine = Engine(tmp_path, settings, save_every=1)
    process = engine.start_to_step(3, env=clock_set_back)
    process.terminate()
    ended(process)
    assert engine.finish(env=clock_set_back).returncode == 0
    assert engine.losses() == whole.losses()
    assert adapters(engine) == adapters(whole)
    times = [record["time"] for record in engine.records()]
    assert times[0] > times[1] > times[2], "it was set back"
    took = [record["seconds"] for record in engine.records() if "seconds" in record]
    assert took and all(0 <= each <= time.monotonic() - begun for each in took)


def test_a_clock_that_is_set_back_changes_no_measured_time(
    bundle: Path, tmp_path: Path, clock_set_back: dict
):
    def record(command: str, **settings: object) -> dict:
        file = tmp_path / f"{command}.json"
        file.write_text(json.dumps({"bundle": str(bundle), **settings}))
        done = succeeded(finish([find_engine(), command, file], env=clock_set_back))
        return json.loads(done.stdout.splitlines()[-1])

    text = GREEDY | {"prompt": [5, 6], "max_tokens": 5}
    begun = time.monotonic()
    end = record("generate", **text, stop=[])
    assert 0 < end["prompt_seconds"] <= time.monotonic() - begun
    assert 0 < end["seconds"] <= time.monotonic() - begun
    checks = ["eval.empty", "repeats", "time.8"]
    end = record("self-check", seconds=0.05, repeats=2, checks=checks)
    assert 0 < end["seconds"] <= time.monotonic() - begun


@pytest.mark.parametrize("limit", [100, 4_000, 40_000])
def test_a_full_disk_is_one_sentence(settings: dict, whole: Engine, tmp_path: Path, limit: int):
    engine = Engine(tmp_path, settings, save_every=1)
    done = engine.finish(
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    assert "Cannot" in refused(done)
    assert not list(engine.output.rglob("*.safetensors"))
    assert engine.finish().returncode == 0, "with room it goes on"
    assert engine.losses() == whole.losses()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can limit a process that runs")
def test_a_disk_that_becomes_full_leaves_the_last_state(
    settings: dict, whole: Engine, tmp_path: Path
):
    engine = Engine(tmp_path, settings, save_every=1)
    process = engine.start_to_step(2)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, 1000))
    refused(ended(process))
    assert engine.finish().returncode == 0
    assert engine.losses() == whole.losses()


@pytest.mark.parametrize("kind", ["full", "crash", "power"])
def test_a_run_goes_on_from_whichever_call_failed(
    settings: dict, faults: Path, tmp_path: Path, kind: str
):
    steps = settings | {"steps": 3, "eval_every": 0, "save_every": 1}

    def environment(engine: Engine, **more: object) -> dict[str, str]:
        under = {"LD_PRELOAD": str(faults), "FAULTS_UNDER": str(engine.output)}
        return os.environ | under | {name: str(value) for name, value in more.items()}

    whole = Engine(tmp_path / "whole", steps)
    count = tmp_path / "count"
    assert whole.finish(env=environment(whole, FAULTS_COUNT=count)).returncode == 0
    calls = int(count.read_text())
    first = ("full", "crash", "power").index(kind)  # the calls differ between the kinds
    for number in (1 + (3 * each + first) * (calls - 1) // 60 for each in range(20)):
        engine = Engine(tmp_path / f"{kind}-{number}", steps)
        done = engine.finish(env=environment(engine, FAULTS_KIND=kind, FAULTS_AT=number))
        if kind == "full":
            assert "space" in refused(done)
        else:
            assert done.returncode == -signal.SIGKILL, done.stderr
        for file in engine.output.rglob("*.safetensors"):
            load_file(file)
        for file in engine.output.rglob("adapter_config.json"):
            json.loads(file.read_text())
        succeeded(engine.finish())
        assert engine.losses() == whole.losses(), number
        assert adapters(engine) == adapters(whole), number
        assert RunLog.load(engine.output).state() == "finished"
        assert not [r for r in engine.records() if r.get("event") == "log_cut_off"], number
        shutil.rmtree(tmp_path / f"{kind}-{number}")


@pytest.mark.skipif(sys.platform != "linux" and os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_read_only_is_one_sentence(
    settings: dict, model: Path, whole: Engine, tmp_path: Path
):
    tmp_path.joinpath("closed").mkdir(mode=0o555)
    engine = Engine(tmp_path, settings)
    engine.settings["output"] = str(tmp_path / "closed" / "run")
    sentence = refused(engine.finish(preexec_fn=without_privileges))
    assert "Cannot make the folder" in sentence and "closed/run" in sentence
    line = export_command(model, tmp_path / "closed" / "out.mesp")
    assert "Cannot write" in refused(finish(line, preexec_fn=without_privileges))
    line = [sys.executable, str(COLLECT), "--from", str(whole.output.parent), "--out"]
    done = finish([*line, str(tmp_path / "closed" / "runs")], preexec_fn=without_privileges)
    assert "Cannot copy" in refused(done)


@pytest.mark.skipif(sys.platform != "linux" and os.geteuid() == 0, reason="root may write anywhere")
def test_a_bundle_that_is_read_only_is_used(bundle: Path, model: Path, tmp_path: Path):
    closed = tmp_path / "closed"
    copy = shutil.copytree(bundle, closed / "small.mesp")
    call("train", copy, "--steps", 1, "--out", closed / "run")
    adapters, data = closed / "run" / "adapters", closed / "d.jsonl"
    data.write_text('{"text": "A fox."}\n' * 2)
    for path in (closed, *closed.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)

    def done(module: str, *options: object) -> subprocess.CompletedProcess:
        homes = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "HF_HOME"), str(closed))
        environment = os.environ | homes | {"MPLCONFIGDIR": str(tmp_path)}
        line = command(module, *options)
        return finish(line, preexec_fn=without_privileges, env=environment)

    out = tmp_path / "out"
    for options in (
        ("train", copy, "--steps", 1, "--out", out / "run", "--adapters", adapters),
        ("generate", copy, "--prompt", "a", "--max-tokens", 2, "--adapters", adapters),
        ("evaluate", copy, data, "--out", out / "run" / "figures.json"),
        ("check", copy),
        ("fuse", copy, "--adapters", adapters, "--out", out / "fused"),
        ("export", "--from", copy, "--out", out / "new.mesp"),
        ("data", out / "new.mesp", "--data", data),
        ("report", adapters.parent, "--out", out / "report.html"),
    ):
        assert done(*options).returncode == 0, (options, done(*options).stderr)
    for options in (
        ("data", copy, "--data", data),
        ("train", "--resume", "--steps", 2, "--out", adapters.parent),
        ("evaluate", copy, data, "--out", closed / "figures.json"),
        ("fuse", copy, "--adapters", adapters, "--out", closed / "fused"),
        ("export", *export_options(model, copy, 8, "--overwrite")),
        ("report", adapters.parent, "--out", closed / "report.html"),
    ):
        assert "annot" in refused(done(*options)), options
    for path in (closed, *closed.rglob("*")):
        path.chmod(0o755)
    left = sorted(each.name for each in closed.iterdir())
    assert left == ["d.jsonl", "run", "small.mesp"]


@pytest.mark.skipif(sys.platform != "linux" and os.geteuid() == 0, reason="root may read anything")
def test_a_file_that_may_not_be_read_is_named(bundle: Path, settings: dict, tmp_path: Path):
    copy = shutil.copytree(bundle, tmp_path / "small.mesp")
    run = tmp_path / "run"
    call("train", copy, "--steps", 1, "--out", run)
    (copy / "blocks" / "01.bin").chmod(0)
    for options in (
        ("train", copy, "--steps", 1, "--out", tmp_path / "new"),
        ("generate", copy, "--prompt", "a"),
        ("fuse", copy, "--adapters", run / "adapters", "--out", tmp_path / "fused"),
    ):
        said = refused(finish(command(*options), preexec_fn=without_privileges))
        assert "blocks/01.bin" in said and "cannot be read" in said, said
        assert "Permission denied" in said
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "small.mesp"]


def truncate(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(os.urandom(16))


@pytest.mark.parametrize("change", [truncate, overwrite, Path.unlink])
@pytest.mark.parametrize("file", ["blocks/01.bin", "embedding.bin"])
def test_a_file_that_changes_in_use_is_one_sentence(
    settings: dict, bundle: Path, tmp_path: Path, change: Callable[[Path], None], file: str
):
    copy = shutil.copytree(bundle, tmp_path / "copy.mesp")
    engine = Engine(tmp_path, settings, save_every=1, steps=100_000, bundle=str(copy))
    process = engine.start_to_step(2)
    change(copy / file)
    refused(ended(process))
    shutil.rmtree(copy)
    shutil.copytree(bundle, copy)
    engine.settings["steps"] = engine.last_step() + 1
    assert engine.finish().returncode == 0, "the last state stands"


def test_a_lost_page_is_one_sentence(settings: dict, tmp_path: Path):
    engine = Engine(tmp_path, settings, save_every=1, steps=100_000)
    process = engine.start_to_step(2)
    process.send_signal(signal.SIGBUS)
    assert "The last saved state is kept" in refused(ended(process))
    engine.settings["steps"] = engine.last_step() + 1
    assert engine.finish().returncode == 0


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("large") / "large.mesp"
    options = ("--random-weights", "--layers", 2, "--seq-len", 64, "--quantize", "nearest")
    call("export", "--model", "Qwen2.5-0.5B", *options, "--out", out)
    return out


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a limit that can be set")
def test_a_hard_limit_is_kept_or_refused(settings: dict, large: Path, tmp_path: Path):
    changes = {"bundle": str(large), "seq_len": 64, "steps": 2, "val_batches": 0, "eval_every": 0}

    def limited(name: str, limit: int, **more: object) -> subprocess.CompletedProcess:
        engine = Engine(tmp_path / name, settings, **(changes | {"optimizer": "sgd"} | more))
        limits = (int(limit), int(limit))
        return engine.finish(
            # The number of buffers that several threads take at once depends on other programs.
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, limits),
        )

    predicted = json.loads(limited("free", 10**10, dry_run=True).stdout)["predicted_peak_bytes"]
    for limit in range(100_000_000, 10**9, 5_000_000):
        # Limits that are too small for the system's libraries give another message.
        refusal = limited("none", limit, dry_run=True).stderr
        said = re.search(r"allows this process (\d+) MB", refusal)
        if said and int(said[1]) > 0:
            reserved = limit - int(said[1]) * 1_000_000
            break
    done = succeeded(limited("enough", reserved + 1.15 * predicted))
    assert "finished" in done.stdout
    sentence = refused(limited("half", reserved + 0.575 * predicted))
    assert "The system allows" in sentence and "need at least" in sentence
    assert not (tmp_path / "half" / "run").exists()
