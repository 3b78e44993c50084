import json
import shutil
import sys
from dataclasses import asdict
from importlib.metadata import version as version_of
from pathlib import Path

import pytest

import mesp
from helpers.commands import call, invoke, refused
from helpers.models import FAMILIES, random_tensors, write_mixed_model, write_model
from helpers.paths import DEMO_BUNDLE
from mesp.__main__ import main
from mesp.bundle.manifest import describe_files
from mesp.commands.check import CHECKS
from mesp.engine.build import find_engine


def engine_that_finds(folder: Path, **verdicts: str) -> dict[str, str]:
    found = [{"type": "start"}]
    for name, verdict in verdicts.items():
        found.append({"type": "check", "name": name, "verdict": verdict, "sentence": "It says so."})
    lines = "\n".join(map(json.dumps, [*found, {"type": "end"}]))
    engine = folder / "engine"
    version = f"mesp-engine {mesp.__version__} with MLX {version_of('mlx')}"
    start = f"#!/bin/sh\n[ $1 = --version ] && echo {version} && exit\n"
    engine.write_text(f"{start}cat <<'END'\n{lines}\nEND\n")
    engine.chmod(0o755)
    return {"MESP_ENGINE": str(engine)}


def test_a_bundle_that_trains_as_it_should(tmp_path: Path):
    engine = engine_that_finds(tmp_path, gradients="pass", time="note", metal="skipped")
    done = invoke(main, "mesp", "check", DEMO_BUNDLE, env=engine)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"The files of {DEMO_BUNDLE} are whole; none of 3 checks failed.\n"


def test_each_failure_is_a_sentence(tmp_path: Path):
    engine = engine_that_finds(tmp_path, gradients="fail", time="note", peaks="fail")
    done = invoke(main, "mesp", "check", DEMO_BUNDLE, env=engine)
    assert done.returncode == 1
    assert done.stdout == "gradients: It says so.\npeaks: It says so.\n"
    assert done.stderr == f"Error: 2 of 3 checks of {DEMO_BUNDLE} failed.\n"


@pytest.mark.parametrize("options", [(), ("--files",)])
def test_a_file_that_was_changed_is_named(tmp_path: Path, options: tuple[str, ...]):
    bundle = shutil.copytree(DEMO_BUNDLE, tmp_path / "demo.mesp")
    file = bundle / "blocks" / "01.bin"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    done = invoke(main, "mesp", "check", bundle, *options, env=engine_that_finds(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Error: {file} is damaged")


def test_files_alone_need_no_engine(tmp_path: Path):
    nowhere = {"MESP_ENGINE": str(tmp_path / "none")}
    done = invoke(main, "mesp", "check", DEMO_BUNDLE, "--files", env=nowhere)
    assert (done.returncode, done.stdout) == (0, f"The files of {DEMO_BUNDLE} are whole.\n")


def test_what_is_no_bundle_is_said(tmp_path: Path):
    done = invoke(main, "mesp", "check", tmp_path)
    assert done.returncode == 2 and "is not a bundle" in done.stderr


def export(model: Path, *options: object) -> Path:
    out = model.with_name("out.mesp")
    call("export", "--model", model, "--seq-len", 8, "--rank", 2, "--out", out, *options)
    return out


def change(config: Path, **entries: object) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | entries))


@pytest.mark.parametrize(
    "family",
    ["qwen2", "llama", "mistral", "gemma3", "gemma4", "granite-mamba", "lfm2", "qwen3_moe"],
)
def test_quantization_alone_tells_a_bundle_from_its_source(family: str, tmp_path: Path):
    config = FAMILIES[family]
    if "gemma" in family:  # bfloat16 rounds √192, but not √64
        config = config | {"hidden_size": 192}
    model = write_model(tmp_path / "model", config)
    bundle = export(model)
    lost, read, written, last = call("check", bundle, "--source", model).stdout.splitlines()
    assert lost.startswith("quantization  KL to the source 0.") and "perplexity" in lost
    for line in (read, written):
        assert float(line.partition("differ by ")[2].split()[0]) < 1e-5
    assert last == f"{bundle} computes what {model} does, except for quantization."


def test_a_source_that_is_quantized_loses_nothing(tmp_path: Path):
    model = write_mixed_model(tmp_path / "model", FAMILIES["qwen3"])
    bundle = export(model)
    assert "0.0000 nats" in call("check", bundle, "--source", model).stdout


def test_a_source_as_transformers_5_saves_it_has_its_rope_read(tmp_path: Path):
    config = dict(FAMILIES["qwen3"])
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    del config["rope_theta"]
    model = write_model(tmp_path / "model", config, random_tensors(config), tokenizer=False)
    assert call("check", export(model), "--source", model).stdout.count("in mlx-lm") == 2


def test_what_quantization_does_not_explain_is_said(tmp_path: Path):
    model = write_model(tmp_path / "model", FAMILIES["qwen2"])
    bundle = export(model)
    change(model / "config.json", rope_theta=500.0)
    done = invoke(main, "mesp", "check", bundle, "--source", model)
    said = refused(done)
    assert said.startswith("The bundle does not compute what its source does. With")
    assert "which quantization does not explain" in said and "alone" not in done.stdout


def test_a_config_of_the_bundle_that_is_of_another_model_is_said(tmp_path: Path):
    model = write_model(tmp_path / "model", FAMILIES["qwen2"])
    bundle = export(model)
    change(bundle / "config.json", rope_theta=500.0)
    listed = [asdict(each) for each in describe_files(bundle) if each.path != "manifest.json"]
    change(bundle / "manifest.json", files=listed)
    said = refused(invoke(main, "mesp", "check", bundle, "--source", model))
    assert "Its logits differ from those of its config.json in mlx-lm" in said


def test_a_source_of_other_shapes_is_refused(tmp_path: Path):
    model = write_model(tmp_path / "model", FAMILIES["qwen2"])
    for name, other in {
        "family": FAMILIES["llama"],
        "blocks": FAMILIES["qwen2"] | {"num_hidden_layers": 1},
        "width": FAMILIES["qwen2"] | {"intermediate_size": 192},
    }.items():
        bundle = export(model, "--overwrite")
        source = write_model(tmp_path / name, other)
        said = refused(invoke(main, "mesp", "check", bundle, "--source", source))
        assert said.startswith(f"{bundle} is not a bundle of {name}: ")


def test_a_source_runs_no_code(tmp_path: Path):
    model, harm = write_model(tmp_path / "model", FAMILIES["qwen2"]), tmp_path / "harm"
    bundle = export(model)
    (model / "code.py").write_text(f"import pathlib; pathlib.Path({str(harm)!r}).touch()")
    change(model / "config.json", model_file="code.py", auto_map={"AutoModel": "code.Model"})
    call("check", bundle, "--source", model)
    assert not harm.exists()


def test_a_source_that_mlx_lm_lacks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = write_model(tmp_path / "model", FAMILIES["lfm3"])
    bundle = export(model)
    monkeypatch.delitem(sys.modules, "mlx_lm.models.lfm3")
    said = refused(invoke(main, "mesp", "check", bundle, "--source", model))
    assert "mlx-lm cannot load model" in said


@pytest.mark.slow
def test_the_engine_knows_the_checks():
    find_engine()
    last = f"The files of {DEMO_BUNDLE} are whole; none of {len(CHECKS)} checks failed."
    assert call("check", DEMO_BUNDLE).stdout.splitlines()[-1] == last
