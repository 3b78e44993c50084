import ast
import dataclasses
import inspect
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import mesp
from helpers.commands import run
from helpers.paths import ROOT
from mesp.engine.build import mlx_folder
from mesp.settings.train_settings import TrainSettings

PACKAGE = ROOT / "exporter" / "mesp"
CORE = ROOT / "ios" / "MeSPTrainer" / "Core"


def imported_by(program: str) -> set[str]:
    program += "; import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_what_is_public_is_there():
    for name in mesp.__all__:
        assert getattr(mesp, name) is not None
        assert name in dir(mesp)
    with pytest.raises(AttributeError, match="'mesp' has no attribute 'fine_tune'"):
        _ = mesp.fine_tune
    assert (PACKAGE / "py.typed").exists()
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "py.typed" in data["package-data"]["mesp"]


def test_an_import_takes_what_it_needs():
    assert not imported_by("import mesp") & {"mlx", "numpy", "click", "rich", "yaml"}
    loaded = imported_by("import mesp; mesp.load")
    assert not loaded & {"huggingface_hub", "datasets", "mlx_lm", "transformers", "click", "rich"}


def test_errors_are_the_packages_own(tmp_path: Path):
    with pytest.raises(mesp.MespError, match="is not a bundle") as caught:
        mesp.load(tmp_path)
    assert type(caught.value).__mro__[1] is Exception
    with pytest.raises(mesp.MespError, match="There is no setting stepz; there are steps, "):
        mesp.train(tmp_path, stepz=1)
    with pytest.raises(mesp.MespError, match="Set the number of steps"):
        mesp.train(tmp_path)


def test_python_errors_name_arguments(tmp_path: Path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    typed = "exists; name another --out, or replace it with --overwrite."
    done = run("export", "--model", "demo", "--out", tmp_path / "there")
    assert done.stderr == f"Error: {tmp_path / 'there'} {typed}\n"
    with pytest.raises(mesp.MespError) as caught:
        mesp.export("demo", tmp_path / "there")
    assert str(caught.value) == (
        f"{tmp_path / 'there'} exists; name another `out`, or replace it with `overwrite`."
    )


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        ("leave out --no-chat, or --loss-on all", "leave out `chat=False`, or `loss_on` all"),
        ("a --seq-len up to 8", "a `seq_len` up to 8"),
        ("write it with mesp data --no-pack.", "write it with mesp data --no-pack."),
        ("add it with mesp data, or --seq-len 8", "add it with mesp data, or `seq_len` 8"),
        ("run mesp-export --from a --out b: --json", "run mesp-export --from a --out b: `is_json`"),
        ("/tmp/a--b/--c is empty", "/tmp/a--b/--c is empty"),
    ],
)  # fmt: skip
def test_options_become_arguments(sentence: str, said: str):
    assert str(mesp.MespError(sentence)) == said
    assert mesp.MespError(sentence).message == sentence


def texts(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(map(texts, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "{}"


def test_every_option_in_an_error_is_an_argument():
    classes = (TrainSettings, mesp.DataOptions, mesp.Selection)
    functions = (mesp.export, mesp.rewrite, mesp.train, mesp.generate, mesp.evaluate)
    known = {each.name for kind in classes for each in dataclasses.fields(kind)}
    known |= {name for each in functions for name in inspect.signature(each).parameters}
    known |= {"measure", "source", "gguf", "gguf_base", "ignore", "include_path"}
    for path in PACKAGE.rglob("*.py"):
        if not {"commands", "federate", "sources"} & {*path.parts}:
            for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "MespError":
                    said = str(mesp.MespError(texts(call.args[0])))
                    named = re.findall(r"`(\w+)(?:=False)?`", said)
                    assert known.issuperset(named), f"{path.name}: {said}"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"steps": 0}, "steps is 0, and must be a whole number at least 1."),
        ({"steps": 2.5}, "steps is 2.5, and must be a whole number."),
        ({"steps": True}, "steps is True, and must be a whole number."),
        ({"alpha": float("nan")}, "alpha is nan, and must be a finite number of 32 bits."),
        ({"alpha": 0}, "alpha is 0, and must be a finite number above 0."),
        ({"momentum": 1}, "momentum is 1, and must be a finite number below 1."),
        ({"method": "sft"}, "method is 'sft', and must be one of mesp, mebp, mezo."),
        ({"method": ["mesp"]}, "method is ['mesp'], and must be one of mesp, mebp, mezo."),
        ({"projections": "q,v"}, "projections is 'q,v', and must be a list of some of q, k, "),
        ({"rslora": 1}, "rslora is 1, and must be true or false."),
    ],
)
def test_a_setting_is_checked(settings: dict, problem: str):
    with pytest.raises(mesp.MespError) as caught:
        TrainSettings.of({"steps": 1} | settings)
    assert str(caught.value).startswith(problem)


def test_lists_may_be_tuples(tmp_path: Path):
    with pytest.raises(mesp.MespError, match="projections is \\['x'\\], and must be a list"):
        mesp.train(tmp_path, steps=1, projections=("x",))


def test_settings_are_written_and_read():
    settings = TrainSettings.of({"steps": 3, "memory_limit": 60, "projections": ["q", "v"]})
    entries = json.loads(json.dumps(settings.to_json()))
    assert entries["memory_limit_mb"] == 60 and "memory_limit" not in entries
    assert TrainSettings.from_json(entries) == settings
    assert TrainSettings.from_json({"steps": 3}) == TrainSettings(steps=3)


def imports(path: Path) -> Iterator[str]:
    nodes = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mesp."):
            yield from (f"{node.module}.{each.name}" for each in node.names)
        nodes += ast.iter_child_nodes(node)


def test_rooms_import_downward():
    rooms: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if "sources" not in path.parts:
            room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
            found = {name.split(".")[1] for name in imports(path)}
            rooms[room] = rooms.get(room, set()) | found - {room}
    below: list[str] = []
    while free := sorted(room for room, needed in rooms.items() if needed <= {*below}):
        below += free
        rooms = {room: needed for room, needed in rooms.items() if room not in below}
    assert rooms == {}


def code(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*.swift")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.strip().startswith("//"):
                yield path.name, line.split(" // ")[0]


def test_formulas_know_nothing_of_a_schedule():
    said = re.compile(
        r"\b(eval|asyncEval|submit|clearCache|synchronize|depends|withDefaultDevice|repeating|readRows)\("
        r"|\.eval\(\)|\b([Ss]chedule|Tiled|tiled|tiles|Plan|Planner|Memory)\b"
    )
    assert [(name, line) for name, line in code(CORE / "Math") if said.search(line)] == []
    named = [line for _, line in code(CORE / "Block") if re.search(r"[Ss]chedule", line)]
    assert len(named) <= 15


def test_only_devices_and_schedules_know_where_they_run():
    known = re.compile(
        r"\bbackend\b|Device\.isCPU|Processor\.(cpu|gpu)\b|#if os|hasShortCommandBuffers"
        r"|processor\.(fuses|dequantizesInProduct|attendsByTiles|startsMetal|hasKernels)\b *[?&|]"
    )
    asked = {"SystemMemoryLimit.swift", "Footprint.swift"}
    rooms = [path for path in CORE.iterdir() if path.name not in ("Device", "Schedule")]
    found = [(name, line) for folder in rooms for name, line in code(folder) if known.search(line)]
    assert [(name, line) for name, line in found if name not in asked] == []


@pytest.mark.calls
@pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb reads the calls")
def test_a_product_is_few_calls_from_a_step(tmp_path: Path):
    folder = ROOT / ".build" / "calls"
    build = ["swift", "build", "--scratch-path", folder, "--product", "mesp-engine"]
    environment = os.environ | {"MESP_HOST_MLX": str(mlx_folder())}
    subprocess.run(build, cwd=ROOT, env=environment, check=True, capture_output=True)
    settings = {"bundle": str(ROOT / "ios/MeSPTrainer/Demo.mesp"), "output": str(tmp_path / "run")}
    (tmp_path / "settings.json").write_text(json.dumps(settings | {"steps": 1, "val_batches": 0}))
    said = ["set breakpoint pending on", "break host_quantized_matmul", "run", "backtrace", "kill"]
    gdb = ["gdb", "--batch", *(word for each in said for word in ("-ex", each)), "--args"]
    done = subprocess.run(
        [*gdb, folder / "debug" / "mesp-engine", tmp_path / "settings.json"],
        capture_output=True,
        text=True,
    )
    # Without thunks, which the compiler makes: partial applications, witnesses and reabstractions.
    calls = [
        name
        for name in re.findall(r"^#\d+ .*? in (\$s\d+MeSP\w+)", done.stdout, re.MULTILINE)
        if not name.endswith(("TA", "TW", "TR"))
    ]
    steps = [number for number, name in enumerate(calls, 1) if "7TrainerC4step" in name]
    assert steps and steps[0] <= 16, done.stdout


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["run"].state() == "finished"


@pytest.mark.slow
def test_five_lines_export_train_write_and_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    Path("test.jsonl").write_text('{"text": "My fellow citizens"}\n{"text": "The people of"}\n')
    told: list[mesp.Progress] = []
    bundle = mesp.export("demo", seq_len=32, rank=4, progress=told.append)
    assert bundle.path == Path("demo.mesp") and mesp.load("demo.mesp").manifest == bundle.manifest
    assert told[-1].task == "Writing demo.mesp" and 0 < told[-1].done <= told[-1].total
    records: list[dict] = []
    trained = mesp.train(bundle, steps=3, memory_limit=60, progress=records.append)
    assert len(trained.losses) == 3 and trained.state() == "finished"
    assert 0 < trained.peak_bytes < 60e6
    assert [each["loss"] for each in records if each["type"] == "step"] == trained.losses
    assert mesp.RunLog.load(trained.folder) == trained
    on = mesp.train(out=trained.folder, resume=True, steps=4)
    assert len(on.losses) == 4 and on.losses[:3] == trained.losses
    text = mesp.generate(bundle, "My fellow", adapters=on.adapters, max_tokens=4)
    assert isinstance(text, str) and text
    found = mesp.evaluate(bundle, "test.jsonl", adapters=on.adapters)
    base, adapted = (row for row in found.rows if row.metric == "perplexity")
    assert base.adapters is None and adapted.adapters == str(on.adapters)
    assert adapted.difference.value == adapted.estimate.value - base.estimate.value
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")
    printed = run("evaluate", "demo.mesp", "test.jsonl", "--adapters", on.adapters).stdout
    assert printed.rstrip("\n") == str(found)
