import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import generate
from helpers.commands import HANG, command, refused, succeeded, wait_for
from helpers.commands import run as run_command
from helpers.models import FAMILIES, TINY
from helpers.paths import FAKE_ENGINE
from mesp.bundle.manifest import FORMAT
from mesp.commands.progress_bars import TrainingProgress
from mesp.models.architecture import Architecture
from mesp.runs.log import Speed

MANIFEST = {"format": FORMAT, "name": "demo"}
MANIFEST |= {"seq_lens": [128, 256, 512], "ranks": [8, 16], "files": []}
MANIFEST |= {"model": {"id": "demo", "revision": None, "license": None}}
ARCHITECTURE = Architecture.from_config({**TINY, "num_hidden_layers": 4})
MANIFEST |= {"architecture": ARCHITECTURE.to_manifest()}
MANIFEST |= {"quantization": {"bits": 4, "group_size": 64, "mode": "affine"}}
NO_TABLE = {"file": "embedding.bin", "words": 0, "arrays": []}
MANIFEST |= {"blocks": [], "embedding": NO_TABLE, "head": NO_TABLE}
SPLIT = {"file": "data/train.bin", "tokens": 5000}
MANIFEST |= {"data": {split: SPLIT for split in ("train", "valid", "test")}}
OWN = {"reward": None, "dp_delta": 1e-5, "replay_text": None, "general_text": None}
OWN |= {"optimizer": "adamw8bit", "learning_rate": 0.007 / ARCHITECTURE.hidden_size**0.5}
OTHERS_WRITE = {"data", "epochs", "first_step", "proximal_mu", "stop", "replay", "general", "order"}
# tests/project/test_generated.py compares the declared defaults with the document.
DEFAULTS = {
    each.key: each.default
    for each in generate.list_properties()
    if not each.is_needed and each.key not in OTHERS_WRITE
} | OWN


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    folder = tmp_path / "demo.mesp"
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(MANIFEST))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def environment(how: str = "", **more: str) -> dict[str, str]:
    return {"MESP_ENGINE": str(FAKE_ENGINE), "FAKE_ENGINE": how, **more}


def train(
    *arguments: object, how: str = "", cwd: Path | None = None
) -> subprocess.CompletedProcess:
    return run_command("train", *arguments, env=environment(how), cwd=cwd)


def trained(*arguments: object, **others: Path) -> subprocess.CompletedProcess:
    return succeeded(train(*arguments, **others))


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def settings(run: Path) -> dict:
    return json.loads((run / "settings.json").read_text())


def test_writes_every_setting_and_reports_the_run(bundle: Path, run: Path):
    done = trained(bundle, "--steps", 20, "--out", run)
    where = {"bundle": str(bundle), "output": str(run), "steps": 20}
    assert settings(run) == DEFAULTS | where
    assert records(run)[0]["settings"] == settings(run)
    assert done.stdout.splitlines() == [
        "Finished after 20 steps in 10 s: 512 tokens/s (128 in the loss), peak footprint 45.6 MB.",
        "Held-out loss 4.500 before, 3.800 after (nats a token).",
        f"Adapters: {run / 'adapters'}",
        f"Log:      {run / 'metrics.jsonl'}",
    ]


@pytest.mark.parametrize(
    ("arguments", "optimizer", "rate"),
    [
        (["--optimizer", "sgd"], "sgd", 0.1),
        (["--method", "mezo"], "sgd", 1e-4),
        (["--paper"], "sgd", 1e-4),
        (["--paper", "--optimizer", "sgd", "--seed", 3], "sgd", 1e-4),
        (["--learning-rate", 1e-5], "adamw8bit", 1e-5),
        (["--optimizer", "adamw", "--learning-rate", 1e-5], "adamw", 1e-5),
    ],
)
def test_the_update_goes_by_the_method_unless_it_is_given(
    bundle: Path, run: Path, arguments: list, optimizer: str, rate: float
):
    trained(bundle, "--steps", 1, *arguments, "--out", run)
    taken = settings(run)
    assert (taken["optimizer"], taken["learning_rate"]) == (optimizer, rate)


SGD = {"steps": 3, "seq-len": 128, "rank": 16, "alpha": 32.0, "seed": 7, "learning-rate": 0.5}
SGD |= {"optimizer": "sgd", "momentum": 0.5, "weight-decay": 0.25, "schedule": "linear"}
SGD |= {"batch-size": 2, "grad-accumulation-steps": 3, "max-grad-norm": 1.5, "num-layers": 2}
SGD |= {"val-batches": 2, "eval-every": 1, "early-stopping": 4, "save-every": 2, "warmup": 2}
SGD |= {"lora-dtype": "bfloat16", "offload": "all", "memory-limit": 60.0, "dropout": 0.1}
ADAMW = {"steps": 3, "method": "mezo", "mezo-epsilon": 0.01, "optimizer": "adamw", "beta1": 0.5}
ADAMW |= {"learning-rate": 0.25, "beta2": 0.75, "epsilon": 1e-3, "schedule": "cosine"}
ADAMW |= {"loraplus-lr-ratio": 16.0}


def typed(options: dict) -> list:
    return [text for name, value in options.items() for text in (f"--{name}", value)]


def passed_on(options: dict) -> dict:
    named = {name.replace("-", "_"): value for name, value in options.items()}
    if "memory_limit" in named:
        named["memory_limit_mb"] = named.pop("memory_limit")
    return named


@pytest.mark.parametrize("options", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_options_reach_the_engine(bundle: Path, run: Path, options: dict):
    flags = ["--rslora", "--test", "--projections", "v,q", "--adapters", run.parent]
    trained(bundle, *typed(options), *flags, "--out", run)
    others = {"rslora": True, "test": True, "projections": ["q", "v"], "adapters": str(run.parent)}
    where = {"bundle": str(bundle), "output": str(run)}
    assert settings(run) == DEFAULTS | where | others | passed_on(options)


@pytest.mark.parametrize(
    ("arguments", "config", "written"),
    [
        (["--lora-dropout", 0.25], "", '"dropout": 0.25,'),
        ([], "lora_dropout: 0.25", '"dropout": 0.25,'),
        (["--dora"], "", '"dora": true,'),
        (["--use-dora"], "", '"dora": true,'),
        (["--fine-tune-type", "dora"], "", '"dora": true,'),
        ([], "fine_tune_type: dora", '"dora": true,'),
        (["--fine-tune-type", "lora"], "", '"dora": false,'),
    ],
)
def test_options_have_the_names_of_other_trainers_too(
    bundle: Path, run: Path, arguments: list, config: str, written: str
):
    (run.parent / "run.yaml").write_text(config)
    arguments = ["--config", "run.yaml", "--steps", 1, "--out", "run", *arguments]
    trained(bundle, *arguments, cwd=run.parent)
    assert written in (run / "settings.json").read_text()


def test_fused_modules_are_trained_as_one(bundle: Path, run: Path):
    phi3 = Architecture.from_config(FAMILIES["phi3"]).to_manifest()
    (bundle / "manifest.json").write_text(json.dumps(MANIFEST | {"architecture": phi3}))
    trained(bundle, "--steps", 1, "--projections", "gate_up,qkv", "--out", run)
    assert settings(run)["projections"] == ["qkv", "gate_up"]
    done = train(bundle, "--steps", 1, "--projections", "q", "--out", run.with_name("other"))
    said = "--projections q is not in the model's blocks; they have qkv, o, gate_up, down."
    assert refused(done) == said


@pytest.mark.parametrize("options", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_a_config_file_says_the_same_as_the_command_line(
    bundle: Path, tmp_path: Path, options: dict
):
    lines = [f"{name.replace('-', '_')}: {value}" for name, value in options.items()]
    lines += ["rslora: true", "test: yes", "projections: [q, v]", "num_layers: null"]
    config = tmp_path / "run.yaml"
    config.write_text("\n".join([f"bundle: {bundle}", "# a comment", *lines[:-1]]))
    trained("--config", config, "--out", tmp_path / "a")
    flags = ["--rslora", "--test", "--projections", "q,v"]
    trained(bundle, *typed(options), *flags, "--out", tmp_path / "b")
    expected = settings(tmp_path / "b") | {"output": str(tmp_path / "a")}
    assert settings(tmp_path / "a") == expected


def test_the_command_line_counts_more_than_the_config(bundle: Path, run: Path):
    config = run.with_name("run.yaml")
    config.write_text("steps: 5\nrank: 16\nlearning-rate: 1e-3\nmomentum: null\n")
    trained(bundle, "--rank", 8, "--config", config, "--out", run)
    taken = settings(run)
    assert (taken["steps"], taken["rank"], taken["learning_rate"]) == (5, 8, 1e-3)


def test_the_settings_of_a_run_are_a_config(bundle: Path, run: Path):
    again = run.with_name("again")
    trained(bundle, *typed(SGD), "--out", run)
    trained("--config", run / "settings.json", "--out", again)
    assert settings(again) == settings(run) | {"output": str(again)}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("stepz: 5", "sets stepz, which is not an option; `mesp-train --help` lists what"),
        ("config: other.yaml", "sets config, which is not an option; `mesp-train --help` lists"),
        ("steps: 2.5", "sets steps to 2.5: '2.5' is not a valid integer range."),
        ("steps: true", "sets steps to True: 'True' is not a valid integer range."),
        ("steps: -1", "sets steps to -1: -1 is not in the range 1<=x<=1000000."),
        ("rank: [8, 16]", "sets rank to [8, 16]: '8,16' is not a valid integer range."),
        ("rslora: perhaps", "sets rslora to perhaps: 'perhaps' is not a valid boolean."),
        ("schedule: {name: linear}", "sets schedule to {'name': 'linear'}, which must be a plain"),
        ("projections: [q, z]", "sets projections to ['q', 'z']: 'z' is not one of q, k, v, qkv"),
        ("learning_rate: .nan", "sets learning_rate to nan: nan is not a finite number."),
        ("steps: [", ", line 1 is not valid YAML: "),
        ("steps: 5\n rank: 8", ", line 2 is not valid YAML: "),
        ("- steps", "must be a list of options, one `name: value` a line."),
        ("\0", "is not valid YAML: it is not a text file."),
    ],
)
def test_a_bad_config_is_one_sentence(bundle: Path, tmp_path: Path, text: str, sentence: str):
    config = tmp_path / "run.yaml"
    config.write_text(text)
    done = train(bundle, "--config", config, "--steps", 5, cwd=tmp_path)
    assert done.stdout == ""
    assert refused(done).removeprefix(f"{config}").removeprefix(" ").startswith(sentence)
    assert sorted(tmp_path.iterdir()) == [bundle, config]


def test_a_config_that_is_not_there_is_named(bundle: Path, tmp_path: Path):
    done = train(bundle, "--config", tmp_path / "no.yaml", cwd=tmp_path)
    assert done.stderr == f"Error: Cannot read {tmp_path / 'no.yaml'}: No such file or directory.\n"


@pytest.mark.parametrize("arguments", [["--fine-tune-type", "full"], ["--config", "run.yaml"]])
def test_training_all_weights_is_refused_by_name(bundle: Path, tmp_path: Path, arguments: list):
    (tmp_path / "run.yaml").write_text("fine_tune_type: full\n")
    said = refused(train(bundle, "--steps", 5, *arguments, cwd=tmp_path))
    assert said.startswith("--fine-tune-type full ") and "weights are frozen" in said
    assert sorted(tmp_path.iterdir()) == [bundle, tmp_path / "run.yaml"]


DROPOUT = ["--dropout", 0.1]


def apart(first: list, *others: object) -> tuple[list, str]:
    named = " ".join(each for each in others if isinstance(each, str))
    said = f"{named} does not go together with {first[0]}: leave out one of them."
    return [*first, *others], said


def useless(*options: object, without: str) -> tuple[list, str]:
    return [*options], f"{options[-2]} has no use without {without}: leave it out."


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        useless("--momentum", 0.9, without="--optimizer sgd"),
        useless("--optimizer", "sgd", "--beta2", 0.9, without="--optimizer adamw8bit or adamw"),
        useless("--paper", "--epsilon", 1e-3, without="--optimizer adamw8bit or adamw"),
        (
            ["--paper", "--learning-rate", 1e-3],
            "--paper has --learning-rate 0.0001, not 0.001: leave out one of them.",
        ),
        apart(DROPOUT, "--method", "mezo"),
        apart(DROPOUT, "--method", "mebp"),
        apart(DROPOUT, "--objective", "dpo"),
        apart(DROPOUT, "--objective", "kto"),
        (
            [*DROPOUT, "--reward", "exact"],
            "--reward does not go together with --dropout: leave out one of them.",
        ),
        apart(["--dora"], "--method", "mebp"),
        apart(["--dora"], "--freeze-a"),
        (
            ["--dora", "--max-forgetting", 5],
            "--max-forgetting does not go together with --dora: leave out one of them.",
        ),
        useless("--mezo-epsilon", 1, without="--method mezo"),
        (
            ["--freeze-a", "--loraplus-lr-ratio", 2],
            "--loraplus-lr-ratio has no use with --freeze-a, which trains each B only: set "
            "--learning-rate.",
        ),
        (["--warmup", 5], "--warmup 5 does not end within --steps 5."),
        (["--num-layers", 5], "--num-layers 5 is more than the 4 blocks."),
        (
            ["--projections", "v,qkv"],
            "--projections qkv is not in the model's blocks; they have q, k, v, o, gate, up, down.",
        ),
        (
            ["--early-stopping", 2],
            "--early-stopping needs evaluations during the run: --eval-every and --val-batches "
            "above 0, and a bundle with held-out data.",
        ),
        (
            ["--test", "--val-batches", 0],
            "--test needs --val-batches above 0, the number of test sequences.",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    bundle: Path, tmp_path: Path, arguments: list, sentence: str
):
    done = train(bundle, "--steps", 5, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (2, f"Error: {sentence}\n", "")
    assert list(tmp_path.iterdir()) == [bundle]


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        (("--test",), "--test needs test data, and the bundle has none: export it with some."),
        (("--eval-every", 1), "--eval-every needs evaluations: --val-batches above 0, and a"),
        (("--eval-every", 1, "--early-stopping", 2), "--eval-every needs evaluations: "),
        (("--early-stopping", 2), "--early-stopping needs evaluations during the run: "),
        (("--max-forgetting", 3), "--max-forgetting needs evaluations: "),
    ],
)
def test_what_needs_held_out_data_says_so(bundle: Path, tmp_path: Path, options: tuple, needs: str):
    manifest = MANIFEST | {"data": {"train": SPLIT}}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    said = refused(train(bundle, "--steps", 5, *options, cwd=tmp_path))
    assert said.startswith(needs) and said.endswith(("held-out data.", "export it with some."))
    assert list(tmp_path.iterdir()) == [bundle]


def test_the_best_and_the_test_are_reported(bundle: Path, run: Path):
    done = trained(bundle, "--steps", 2, "--eval-every", 1, "--test", "--out", run)
    assert "step 2: test loss 3.900, perplexity 49.40" in done.stderr.splitlines()
    assert done.stdout.splitlines()[1:-1] == [
        "Held-out loss 4.500 before, 3.800 after (nats a token).",
        "Test loss 3.900, perplexity 49.40.",
        f"Adapters: {run / 'adapters'}",
        f"Best:     {run / 'best'} (step 2, held-out loss 3.800)",
    ]


def test_a_run_goes_on_with_its_settings(bundle: Path, run: Path):
    options = {"steps": 4, "rank": 16, "optimizer": "adamw", "beta1": 0.5}
    trained(bundle, *typed(options), "--out", run)
    before = settings(run)
    done = trained("--resume", "--steps", 6, "--memory-limit", 50, "--out", run)
    assert settings(run) == before | {"resume": True, "steps": 6, "memory_limit_mb": 50.0}
    assert [each["step"] for each in records(run) if each["type"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert done.stdout.startswith("Finished after 6 steps")
    assert "Held-out loss 4.500 before, 3.800 after" in done.stdout


def test_a_run_begun_with_other_defaults_goes_on_with_them(bundle: Path, run: Path):
    trained(bundle, "--steps", 4, "--paper", "--out", run)
    before = settings(run)
    trained("--resume", "--steps", 6, "--out", run)
    assert settings(run) == before | {"resume": True, "steps": 6}
    other = run.with_name("other")
    trained(bundle, "--steps", 4, "--out", other)
    said = refused(train("--resume", "--paper", "--steps", 6, "--out", other))
    assert said == "--paper has --optimizer sgd, not adamw8bit: leave out one of them."


def test_a_run_goes_on_from_what_was_saved_last(bundle: Path, run: Path):
    options = {"steps": 5, "save-every": 2}
    assert train(bundle, *typed(options), "--out", run, how="crash").returncode == 1
    done = trained(bundle, *typed(options), "--resume", "--out", run)
    assert [each["step"] for each in records(run) if each["type"] == "step"] == [1, 2, 3, 4, 5]
    assert done.stderr.splitlines()[0] == "resumed: after step 2"
    assert done.stdout.startswith("Finished after 5 steps")


def test_a_run_that_the_engine_refuses_keeps_its_settings(bundle: Path, run: Path):
    other = shutil.copytree(bundle, run.with_name("other.mesp"))
    trained(bundle, "--steps", 2, "--out", run)
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    done = train(other, "--resume", "--steps", 4, "--out", run, how="refuse")
    assert done.returncode == 2 and "blocks/00.bin is damaged" in done.stderr
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before
    trained("--resume", "--steps", 4, "--out", run)
    assert settings(run)["bundle"] == str(bundle)


def test_a_run_goes_on_without_the_adapters_that_it_began_with(bundle: Path, run: Path):
    adapters = run.with_name("adapters")
    adapters.mkdir()
    trained(bundle, "--steps", 2, "--adapters", adapters, "--out", run)
    before = settings(run)
    adapters.rmdir()
    trained("--resume", "--steps", 4, "--out", run)
    assert settings(run) == before | {"resume": True, "steps": 4}
    (run / "settings.json").write_text(json.dumps(before | {"adapters": 5}))
    assert "is not the settings of a run" in train("--resume", "--out", run).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rank", 16], "--rank is 8 and cannot become 16."),
        (["--projections", "q"], "--projections is not set and cannot become ['q']."),
    ],
)
def test_a_run_that_goes_on_keeps_its_settings(bundle: Path, run: Path, arguments: list, said: str):
    trained(bundle, "--steps", 2, "--out", run)
    before = (run / "settings.json").read_bytes()
    sentence = refused(train("--resume", "--out", run, *arguments))
    assert sentence == f"A resumed run keeps its settings: {said}"
    assert (run / "settings.json").read_bytes() == before


def test_resuming_where_there_is_no_run_is_refused(bundle: Path, run: Path):
    said = refused(train("--resume", "--out", run))
    assert said == f"{run} holds no run to resume; start one without --resume."
    assert refused(train("--resume")) == "Name the folder of the run to resume with --out."
    trained(bundle, "--steps", 2, "--out", run)
    good = settings(run)
    for bad in ({}, good | {"projections": 5}, good | {"projections": "q,v"}):
        (run / "settings.json").write_text(json.dumps(bad))
        said = refused(train("--resume", "--out", run))
        assert said == f"{run / 'settings.json'} is not the settings of a run; start a new one."


@pytest.mark.parametrize("missing", ["BUNDLE", "--steps"])
def test_what_is_missing_is_named(bundle: Path, tmp_path: Path, missing: str):
    arguments = ["--steps", 5] if missing == "BUNDLE" else [bundle]
    done = train(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("Error: Missing ")
    assert missing in done.stderr.splitlines()[-1]


def test_a_peak_that_the_limit_raises_is_explained(bundle: Path, run: Path):
    done = train(bundle, "--steps", 4, "--out", run, how="kept")
    assert done.stderr.splitlines()[1] == (
        "Room below the memory limit is used for speed: the intermediates of 6 blocks are kept. A "
        "lower --memory-limit keeps fewer."
    )


def test_without_a_terminal_the_first_step_and_the_last_are_lines(bundle: Path, run: Path):
    lines = train(bundle, "--steps", 40, "--out", run).stderr.splitlines()
    assert lines == [
        "started, with a predicted peak of 45.2 MB",
        "step 0: held-out loss 4.500, perplexity 90.02",
        "step 1/40  loss 3.990  512 tok/s (128 in the loss)  30.0 MB  20 s left",
        "step 40/40  loss 3.645  512 tok/s (128 in the loss)  30.0 MB  0 s left",
        "step 40: held-out loss 3.800, perplexity 44.70",
    ]


@pytest.mark.parametrize(("seconds", "steps"), [(0.5, 2000), (2.3, 400), (90, 20)])
def test_without_a_terminal_lines_come_by_time(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int
):
    now = 100.0
    monkeypatch.setattr("mesp.commands.progress_bars.time.monotonic", lambda: now)
    record = {"type": "step", "loss": 2.0, "seconds": seconds, "footprint_bytes": 1}
    record |= {"tokens": 10, "input_tokens": 40}
    with TrainingProgress("mesp", steps) as progress:
        for step in range(1, steps + 1):
            now += seconds
            progress.show(record | {"step": step})
    lines = capsys.readouterr().err.splitlines()
    shown = [int(line.split()[1].partition("/")[0]) for line in lines]
    assert shown[0] == 1 and shown[-1] == steps
    gaps = np.diff(shown) * seconds
    assert gaps.max() <= max(30 + seconds, seconds)
    assert gaps[0] <= max(10 + seconds, seconds)
    assert len(shown) <= 60


def test_the_tokens_in_the_loss_are_said_where_they_are_fewer():
    step = {"seconds": 2.0, "tokens": 30}
    assert Speed.of([step | {"input_tokens": 200}] * 3).words("tok/s") == (
        "100 tok/s (15 in the loss)"
    )
    assert Speed.of([step | {"input_tokens": 30}]).words("tok/s") == "15 tok/s"
    assert Speed.of([step]).words("tok/s") == "15 tok/s", "a log of an older version"
    assert Speed.of([]).words("tok/s") == "- tok/s"


def test_on_a_terminal_a_bar_shows_where_the_run_is(bundle: Path, run: Path):
    master, slave = pty.openpty()
    arguments = command("train", bundle, "--steps", 50, "--out", run)
    shown = os.environ | environment("slow", TERM="xterm", COLUMNS="100")
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
    assert "50/50  loss 3.545  512 tok/s (128 in the loss)  30.0 MB" in text
    assert "━" in text
    assert text.count("/50  loss") > 3, "the bar moves while the run goes on"


def test_default_output_names_bundle_method_and_time(bundle: Path, tmp_path: Path):
    assert train(bundle, "--steps", 1, "--method", "mebp", cwd=tmp_path).returncode == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.match("demo-mebp-20??????T??????Z")
    assert (run / "metrics.jsonl").exists()


INVALID = "Invalid value for "


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", 0], f"{INVALID}'--steps': 0 is not in the range 1<=x<=1000000."),
        (["--rank", 0], f"{INVALID}'--rank': 0 is not in the range x>=1."),
        (
            ["--rank", 129],
            "The model's matrices have at most rank 128, and --rank names 129; take a --rank up to "
            "128.",
        ),
        (
            ["--learning-rate", -1e-4],
            f"{INVALID}'--learning-rate': -0.0001 is not in the range x>0.",
        ),
        (["--learning-rate", "nan"], f"{INVALID}'--learning-rate': nan is not a finite number."),
        (
            ["--dropout", 1],
            f"{INVALID}'--dropout' / '--lora-dropout': 1.0 is not in the range 0<=x<1.",
        ),
        (["--alpha", "inf"], f"{INVALID}'--alpha': inf is not a finite number."),
        (["--method", "sft"], f"{INVALID}'--method': 'sft' is not one of 'mesp', 'mebp', 'mezo'."),
        (["--out", "/proc/run"], "Cannot write the run to /proc/run: No such file or directory."),
    ],
)
def test_a_bad_option_is_one_sentence(bundle: Path, tmp_path: Path, arguments: list, sentence: str):
    done = train(bundle, "--steps", 5, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"Error: {sentence}"
    assert list(tmp_path.iterdir()) == [bundle]


def test_a_missing_bundle_is_one_sentence(tmp_path: Path):
    assert "none.mesp" in refused(train(tmp_path / "none.mesp", "--steps", 5, cwd=tmp_path))
    assert not list(tmp_path.iterdir())


def test_an_output_that_holds_a_run_is_refused(bundle: Path, run: Path):
    trained(bundle, "--steps", 2, "--out", run)
    before = (run / "metrics.jsonl").read_bytes()
    assert refused(train(bundle, "--steps", 2, "--out", run)) == (
        f"{run} already holds a run: name another folder with --out, or resume it with --resume."
    )
    assert (run / "metrics.jsonl").read_bytes() == before


def test_what_the_engine_refuses_is_said_and_nothing_is_left(bundle: Path, tmp_path: Path):
    done = train(bundle, "--steps", 5, "--out", tmp_path / "deep" / "run", how="refuse")
    assert refused(done) == "blocks/00.bin is damaged; write the bundle again."
    assert list(tmp_path.iterdir()) == [bundle]


@pytest.mark.parametrize(
    ("options", "how", "status", "said", "saved"),
    [
        ((), "fail", 2, "There is no space left on the disk", "no adapters had been saved"),
        (
            *(("--save-every", 2), "crash", 1, "mesp-engine was ended by SIGSEGV after step 3"),
            "the adapters last saved are in {}",
        ),
    ],
)
def test_a_failure_on_the_way_says_what_is_left(
    bundle: Path, run: Path, options: tuple, how: str, status: int, said: str, saved: str
):
    done = train(bundle, "--steps", 5, *options, "--out", run, how=how)
    assert done.returncode == status
    assert done.stderr.splitlines()[-1] == (
        f"Error: {said}. The log is in {run / 'metrics.jsonl'}; "
        f"{saved.format(run / 'adapters')}. Continue the run with --resume and --out {run}."
    )


def test_what_else_the_engine_prints_is_passed_on(bundle: Path, run: Path):
    done = train(bundle, "--steps", 5, "--out", run, how="noisy")
    assert done.returncode == 0
    assert "a library says hello" in done.stderr
    assert done.stderr.endswith("The bundle was exported for the CPU.\n")


def start_and_wait_for_steps(bundle: Path, run: Path, how: str) -> subprocess.Popen:
    arguments = command("train", bundle, "--steps", 5000, "--out", run)
    process = subprocess.Popen(
        arguments,
        env=os.environ | environment(how),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_for_lines(run / "metrics.jsonl", 5, process)
    return process


def wait_for_lines(file: Path, count: int, process: subprocess.Popen) -> None:
    wait_for(lambda: file.exists() and len(file.read_text().splitlines()) >= count, process)


@pytest.mark.parametrize(
    "whole_group", [True, False], ids=["typed on the terminal", "sent to mesp-train alone"]
)
def test_ctrl_c_stops_cleanly_and_reaches_the_engine_once(
    bundle: Path, tmp_path: Path, whole_group: bool
):
    run = tmp_path / "a run"
    process = start_and_wait_for_steps(bundle, run, "slow")
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=HANG)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert (run / "signals").read_text() == "SIGINT\n"
    assert records(run)[-1]["reason"] == "stopped"
    assert output.startswith(f"Stopped after {records(run)[-1]['step']} steps")
    assert output.endswith(f"\nTo resume: mesp train --resume --out {shlex.quote(str(run))}\n")
    assert "Traceback" not in errors
    assert (run / "adapters" / "adapters.safetensors").exists()


def test_a_signal_that_is_ignored_stays_so(bundle: Path, run: Path):
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = start_and_wait_for_steps(bundle, run, "slow")
    finally:
        signal.signal(signal.SIGINT, previous)
    process.send_signal(signal.SIGINT)
    wait_for_lines(run / "metrics.jsonl", len(records(run)) + 5, process)
    process.terminate()
    process.communicate(timeout=HANG)
    assert process.returncode == 128 + signal.SIGTERM
    assert (run / "signals").read_text() == "SIGTERM\n"


def test_a_second_ctrl_c_ends_the_engine_at_once(bundle: Path, run: Path):
    process = start_and_wait_for_steps(bundle, run, "deaf")
    process.send_signal(signal.SIGINT)
    wait_for_lines(run / "signals", 1, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("Error: The run was ended at once. The log is in ")
    assert records(run)[-1]["type"] == "step", "the engine was not left running to its end"
