import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from helpers import commands
from helpers.adapters import RANK, write_adapters
from helpers.commands import call, command, finish, run, succeeded, without_privileges
from helpers.models import TEXT, TINY, write_model
from mesp.bundle.manifest import describe_files
from mesp.bundle.reader import Bundle
from mesp.engine.build import find_engine
from mesp.files import read_json

HARM = "import pathlib; pathlib.Path({!r}).touch()\nfrom transformers import {} as Base\n"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("security")
    write_model(folder / "model", TINY)
    (folder / "text.txt").write_text(TEXT)
    size = ("--seq-len", 8, "--rank", 2, "--data", folder / "text.txt")
    call("export", "--model", folder / "model", *size, "--out", folder / "exported.mesp")
    return folder / "exported.mesp"


@pytest.fixture
def bundle(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "bundle.mesp"))


def change(file: Path, **entries: object) -> None:
    value = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(value | entries))


def list_again(bundle: Path) -> None:
    listed = [asdict(each) for each in describe_files(bundle) if each.path != "manifest.json"]
    change(bundle / "manifest.json", files=listed)


@contextmanager
def another_tokenizer(bundle: Path) -> Iterator[dict]:
    file = bundle / "tokenizer.json"
    value = json.loads(file.read_text())
    yield value
    file.write_text(json.dumps(value))
    list_again(bundle)


def name_code(folder: Path, harm: Path) -> None:
    (folder / "code.py").write_text(
        HARM.format(str(harm), "PreTrainedTokenizerFast") + "class Tokenizer(Base): pass\n"
    )
    code = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}}
    change(folder / "tokenizer_config.json", **code)
    code = {"auto_map": {"AutoConfig": "code.Config"}, "model_file": "code.py"}
    change(folder / "config.json", **code)


@pytest.mark.parametrize("module", ["generate", "data", "evaluate"])
def test_a_bundle_runs_no_python(bundle: Path, tmp_path: Path, module: str):
    """transformers would ask on standard input whether to run the code."""
    harm = tmp_path / "harm"
    name_code(bundle, harm)
    # For known model types, transformers uses its own tokenizer class.
    change(bundle / "config.json", model_type="custom")
    list_again(bundle)
    arguments = {
        "generate": ["--prompt", "-"],
        "data": ["--data", tmp_path / "text.txt"],
        "evaluate": [tmp_path / "questions.jsonl"],
    }
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "questions.jsonl").write_text('{"text": "a dog"}\n')
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache")}
    line = command(module, bundle, *arguments[module])
    done = finish(line, input="y\ny\n", env=environment)
    assert not harm.exists()
    assert done.returncode == 2
    assert "it is Python code, which is not run" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


BYTES_AND_FUSE = [{"type": "ByteFallback"}, {"type": "Fuse"}]
TOKENIZERS = {
    "a panic": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "text as a number": {"model_max_length": "1"},
    "a template that fails": {"chat_template": "{{ 1 // 0 }}"},
    "a template that refuses": {"chat_template": "{{ raise_exception('no\x1b[2J') }}"},
}


@pytest.mark.parametrize("what", TOKENIZERS)
def test_a_tokenizer_that_is_not_in_order_is_a_sentence(
    bundle: Path, capfd: pytest.CaptureFixture, what: str
):
    entries = TOKENIZERS[what]
    if "normalizer" in entries:
        with another_tokenizer(bundle) as tokenizer:
            tokenizer |= entries
    else:
        change(bundle / "tokenizer_config.json", **entries)
        list_again(bundle)
    said = refused("generate", bundle, "--prompt", "a")
    assert "cannot be tokenized: " in said or "cannot be loaded: " in said
    assert "\x1b" not in said


@pytest.mark.parametrize("entries", [{"num_hidden_layers": 1 << 65}, {"num_labels": 1 << 40}])
def test_a_tokenizer_takes_no_memory_by_the_sizes_of_its_model(bundle: Path, entries: dict):
    change(bundle / "config.json", **entries)
    list_again(bundle)
    succeeded(finish(command("generate", bundle, "--prompt", "a", "--max-tokens", 1)))


def test_a_tokenizer_takes_no_memory_by_the_ids_of_its_tokens(bundle: Path):
    with another_tokenizer(bundle) as tokenizer:
        tokenizer["model"]["vocab"]["far"] = 4_000_000_000
    succeeded(finish(command("generate", bundle, "--prompt", "far", "--max-tokens", 1)))


def test_a_token_that_the_tokenizer_lacks_is_a_sentence(bundle: Path):
    pieces = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
    with another_tokenizer(bundle) as tokenizer:
        tokenizer["decoder"] = {"type": "Sequence", "decoders": [*pieces, *BYTES_AND_FUSE]}
        tokenizer["model"] |= {"vocab": {"a": 0}, "merges": []}
    said = refused("generate", bundle, "--prompt", "a", "--max-tokens", 9, "--temp", 9, "--no-chat")
    assert "is not in the tokenizer's vocabulary" in said


@pytest.mark.parametrize("name", ["chat_template.jinja", "special_tokens_map.json", "vocab.txt"])
@pytest.mark.parametrize("what", ["a link", "a device", "a pipe"])
def test_what_a_tokenizer_reads_lies_in_the_bundle(
    bundle: Path, tmp_path: Path, name: str, what: str
):
    """transformers would also open files that the manifest does not list."""
    file, secret = bundle / name, tmp_path / "secret"
    file.unlink(missing_ok=True)
    secret.write_text("{}")
    if what == "a pipe":
        os.mkfifo(file)
    else:
        file.symlink_to(secret if what == "a link" else "/dev/zero")
    for arguments in (("generate", bundle, "--prompt", "a"), ("data", bundle, "--data", secret)):
        said = refused(*arguments)
        assert f"{name} is not a regular file" in said or "outside of it" in said


def test_what_a_model_writes_does_not_control_a_terminal(bundle: Path):
    escape = chr(256 + 27)  # the escape character in byte-level BPE's alphabet
    with another_tokenizer(bundle) as tokenizer:
        names = tokenizer["model"]["vocab"].items()
        vocabulary = {name if name == "a" else name + escape: number for name, number in names}
        tokenizer["model"] |= {"vocab": vocabulary, "merges": []}
    arguments = command("generate", bundle, "--prompt", "a", "--max-tokens", 4, "--no-chat")
    done = subprocess.run(arguments, capture_output=True, check=True)
    assert b"\x1b" in done.stdout
    ours, theirs = os.openpty()
    subprocess.run(arguments, stdout=theirs, stdin=theirs, stderr=subprocess.DEVNULL, check=True)
    assert b"\x1b" not in os.read(ours, 1 << 16)
    os.close(ours), os.close(theirs)


@pytest.fixture(scope="module")
def trained(exported: Path) -> Path:
    return write_adapters(exported.parent / "adapters", exported)


@pytest.fixture
def adapters(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "adapters"))


def refused(*arguments: object) -> str:
    return commands.refused(run(*arguments))


def fuse(bundle: Path, adapters: Path) -> tuple[object, ...]:
    return "fuse", bundle, "--adapters", adapters, "--out", bundle.with_name("fused")


def rewritten(header: dict, **fields: object) -> bytes:
    first = next(iter(header))
    text = json.dumps(header | {first: header[first] | fields}).encode()
    ends = [entry["data_offsets"][1] for entry in header.values()]
    return struct.pack("<Q", len(text)) + text + bytes(max(ends))


def header_of(file: Path) -> dict:
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    del header["__metadata__"]
    return header


@pytest.mark.parametrize(
    "what", ["half", "far", "overlap", "text", "rank", "not finite", "more", "fifo"]
)
def test_adapters_that_lie_are_refused(bundle: Path, adapters: Path, what: str):
    file = adapters / "adapters.safetensors"
    data, header = file.read_bytes(), header_of(file)
    said = "adapters.safetensors is damaged"
    if what == "half":
        file.write_bytes(data[: len(data) // 2])
    elif what == "far":
        size = header[next(iter(header))]["data_offsets"][1]
        file.write_bytes(rewritten(header, data_offsets=[1 << 40, (1 << 40) + size]))
    elif what == "overlap":
        file.write_bytes(rewritten(header, data_offsets=header[[*header][-1]]["data_offsets"]))
    elif what == "text":
        file.write_text("no adapters")
    elif what == "rank":
        module = "model.layers.0.self_attn.k_proj"
        pair = {"lora_a": mx.zeros((128, 200_000)), "lora_b": mx.zeros((200_000, 64))}
        mx.save_safetensors(str(file), {f"{module}.{name}": m for name, m in pair.items()})
        change(adapters / "adapter_config.json", lora_parameters={"rank": 200_000, "scale": 1})
        said = "their rank, 200000, is above the model's width of 128"
    elif what == "not finite":
        matrices = mx.load(str(file))
        mx.save_safetensors(str(file), {name: m / 0 for name, m in matrices.items()})
        said = "that are not finite"
    elif what == "more":
        matrices = mx.load(str(file))
        mx.eval(matrices)  # reads the arrays before the file is overwritten
        path = min(matrices).rpartition(".")[0]
        mx.save_safetensors(str(file), {**matrices, f"{path}.m": mx.ones(64)})
        said = f"it holds {path}.m, which is not a LoRA matrix"
    else:
        file.unlink()
        os.mkfifo(file)
        said = "adapters.safetensors is not a regular file"
    assert said in refused(*fuse(bundle, adapters))
    assert not bundle.with_name("fused").exists()


@pytest.mark.parametrize("scale", [float("nan"), 1e400, -1, "3", None, [1], True])
def test_a_scale_that_is_none_is_refused(bundle: Path, adapters: Path, scale: object):
    change(adapters / "adapter_config.json", lora_parameters={"rank": RANK, "scale": scale})
    assert "has a rank or scale that is not a positive number" in refused(*fuse(bundle, adapters))


def test_a_low_limit_of_open_files_is_no_error(bundle: Path, adapters: Path, tmp_path: Path):
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
        without_privileges()

    options = ("--adapters", adapters, "--out", tmp_path / "fused")
    succeeded(finish(command("fuse", bundle, *options), preexec_fn=limited))


def test_an_import_that_fails_is_a_sentence(bundle: Path, adapters: Path, tmp_path: Path):
    (tmp_path / "mlx_lm.py").write_text("raise ValueError('not here\\nand not there')\n")
    asked = command("fuse", bundle, "--adapters", adapters, "--out", tmp_path / "fused")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    assert commands.refused(finish(asked, env=environment)) == (
        "mlx-lm cannot be imported (not here); install this package again, with its dependencies."
    )
    assert not (tmp_path / "fused").exists()


def test_only_json_is_written(exported: Path, tmp_path: Path):
    model = write_model(tmp_path / "model", TINY)
    text = json.dumps(json.loads((model / "config.json").read_text()) | {"unread": [0, 5e5, "W"]})
    (model / "config.json").write_text(text.replace("500000.0", "-Infinity").replace('"W"', "NaN"))
    call("export", "--model", model, "--seq-len", 8, "--out", tmp_path / "a.mesp")
    written = (tmp_path / "a.mesp" / "config.json").read_text()
    config = json.loads(written, parse_constant=pytest.fail)
    assert config["unread"] == [0, {"__float__": "-Infinity"}, {"__float__": "NaN"}]
    opened = Bundle(tmp_path / "a.mesp")
    opened.to_mlx_lm()
    assert opened.config()["unread"][:2] == [0, float("-inf")]


@pytest.mark.parametrize("number", ["1e999", "-1e400"])
def test_a_number_that_no_float_holds_is_refused(tmp_path: Path, number: str):
    model = write_model(tmp_path / "model", TINY)
    text = json.dumps(json.loads((model / "config.json").read_text()) | {"unread": "W"})
    (model / "config.json").write_text(text.replace('"W"', number))
    said = refused("export", "--model", model, "--seq-len", 8, "--out", tmp_path / "a.mesp")
    assert said == f"{model / 'config.json'} cannot be read as a JSON object."


@pytest.mark.parametrize("weight", ["1e-320", "1e-46", "1e39"])
def test_a_weight_that_the_engine_has_no_room_for_is_named(
    bundle: Path, adapters: Path, weight: str
):
    said = refused("generate", bundle, "--prompt", "a", "--adapters", adapters, "--weights", weight)
    is_high = weight == "1e39"
    rule = "; give numbers from 0 to 10." if is_high else ", which is 0 in float32; give 0."
    assert said == f"--weights has {float(weight):g}{rule}"


def test_a_damaged_bundle_is_not_fused(bundle: Path, adapters: Path):
    weights = bundle / "blocks" / "00.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert "00.bin is damaged" in refused(*fuse(bundle, adapters))


def assert_names_no_code(folder: Path) -> None:
    assert not list(folder.rglob("*.py"))
    configs = [*folder.glob("*config.json")]
    assert len(configs) >= 2 and not any("code" in each.read_text() for each in configs)


def test_a_fused_model_holds_no_code(bundle: Path, adapters: Path, tmp_path: Path):
    """mlx-lm runs a config.json's model_file without asking, so a fused model must not name one."""
    harm, secret = tmp_path / "harm", tmp_path / "secret"
    secret.write_text("secret")
    name_code(bundle, harm)
    for name in ("LICENSE", "LICENSE.txt", "LICENSE.py", "modeling.py", "notes.txt"):
        (bundle / name).write_text(f"import pathlib; pathlib.Path({str(harm)!r}).touch()")
    list_again(bundle)
    (bundle / "merges.txt").symlink_to(secret)  # the manifest does not list it
    call(*fuse(bundle, adapters), "--val-batches", 0)
    fused = bundle.with_name("fused")
    assert {path.name for path in fused.iterdir()} == {
        "LICENSE", "LICENSE.txt", "config.json", "generation_config.json", "model.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert_names_no_code(fused)
    mlx_lm.load(str(fused))
    assert not harm.exists()


def test_a_bundle_of_a_model_with_code_has_none(exported: Path, tmp_path: Path):
    model = Path(shutil.copytree(exported.parent / "model", tmp_path / "model"))
    name_code(model, tmp_path / "harm")
    (model / "LICENSE.py").write_text("")
    (model / "LICENSE").write_text("")
    out = tmp_path / "out.mesp"
    call("export", "--model", model, "--seq-len", 8, "--rank", 2, "--out", out)
    assert_names_no_code(out)
    assert (out / "LICENSE").exists()
    (model / "merges.txt").symlink_to("/etc/passwd")
    arguments = ("--seq-len", 8, "--out", tmp_path / "other.mesp")
    assert "merges.txt is not a regular file" in refused("export", "--model", model, *arguments)


def test_a_bundle_written_again_names_no_code(bundle: Path, tmp_path: Path):
    name_code(bundle, tmp_path / "harm")
    list_again(bundle)
    out = tmp_path / "again.mesp"
    call("export", "--from", bundle, "--out", out)
    Bundle(out).verify()
    assert_names_no_code(out)
    (bundle / "tokenizer_config.json").write_text("[]")
    list_again(bundle)
    arguments = ("--from", bundle, "--out", tmp_path / "other.mesp")
    assert "tokenizer_config.json cannot be read as a JSON object" in refused("export", *arguments)


@pytest.mark.parametrize(
    "entries",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": 64},
        {"model_type": "deepseek_v3"},
        {"rope_theta": "x"},
    ],
    ids=str,
)
def test_a_configuration_of_another_model_is_refused(bundle: Path, adapters: Path, entries: dict):
    change(bundle / "config.json", **entries)
    list_again(bundle)
    said = refused(*fuse(bundle, adapters), "--val-batches", 0)
    assert "does not describe the bundle's model" in said


@pytest.mark.parametrize("what", ["token", "example", "no target"])
def test_held_out_data_that_lies_is_refused(bundle: Path, adapters: Path, what: str):
    tokens = np.fromfile(bundle / "data" / "valid.bin", "<u4")
    manifest = json.loads((bundle / "manifest.json").read_text())
    if what == "token":
        tokens[3] = 2**32 - 1
        tokens.tofile(bundle / "data" / "valid.bin")
    else:
        examples = np.array([[0, 5], [len(tokens) - 2, 3]], "<u4")
        examples.tofile(bundle / "data" / "valid.examples.bin")
        entry = manifest["data"]["valid"]
        entry["examples"] = {"file": "data/valid.examples.bin", "count": 2}
        if what == "no target":
            np.zeros(len(tokens), np.uint8).tofile(bundle / "data" / "valid.mask.bin")
            entry["mask"] = "data/valid.mask.bin"
            examples[1, 0] -= 1
            examples.tofile(bundle / "data" / "valid.examples.bin")
        change(bundle / "manifest.json", data=manifest["data"])
    list_again(bundle)
    said = "nothing to predict" if what == "no target" else "valid data of"
    assert said in refused(*fuse(bundle, adapters))


def loop(path: Path) -> Path:
    path.symlink_to(path.name)
    return path


@pytest.mark.parametrize("what", ["long", "loop", "file"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "PATH", "--prompt", "a"),
        ("generate", "BUNDLE", "--prompt", "a", "--adapters", "PATH"),
        ("data", "PATH", "--data", "python-docs"),
        ("data", "BUNDLE", "--data", "PATH"),
        ("evaluate", "PATH", "x.jsonl"),
        ("evaluate", "BUNDLE", "PATH"),
        ("evaluate", "BUNDLE", "QUESTIONS", "--out", "PATH"),
        ("fuse", "PATH", "--adapters", "ADAPTERS", "--out", "fused"),
        ("fuse", "BUNDLE", "--adapters", "PATH", "--out", "fused"),
        ("fuse", "BUNDLE", "--adapters", "ADAPTERS", "--out", "PATH"),
        ("export", "--model", "PATH"),
        ("export", "--model", "demo", "--data", "PATH", "--out", "out.mesp"),
        ("export", "--model", "demo", "--out", "PATH"),
        ("export", "--from", "PATH", "--out", "out.mesp"),
        ("train", "PATH", "--steps", 1),
        ("train", "BUNDLE", "--steps", 1, "--out", "PATH"),
        ("train", "--config", "PATH"),
        ("train", "--resume", "--out", "PATH"),
    ],
    ids=lambda arguments: " ".join(map(str, arguments)),
)
def test_paths_that_lead_nowhere_are_refused(
    exported: Path, trained: Path, tmp_path: Path, what: str, arguments: tuple[object, ...]
):
    path = tmp_path / {"long": 5000 * "a"}.get(what, "path")
    if what == "loop":
        loop(path)
    elif what == "file":
        path.write_text("{")
        if arguments[-2:] == ("--out", "PATH") and arguments[0] == "evaluate":
            pytest.skip("mesp evaluate replaces a file, and so has nothing to refuse")
    (tmp_path / "questions.jsonl").write_text('{"text": "a dog"}\n')
    named = {"PATH": path, "BUNDLE": exported, "ADAPTERS": trained}
    named["QUESTIONS"] = tmp_path / "questions.jsonl"
    done = run(*(named.get(each, each) for each in arguments), cwd=tmp_path)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Error: "), done.stderr


def with_an_index(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")


DEEP = 50_000 * "["
BAD_JSON = {
    "deep": DEEP,
    "deep and whole": 900 * "[" + 900 * "]",
    "half a character": '{"name": "\\ud800"}',
    "long number": "[" + 5000 * "1" + "]",
    "bytes": b"\xff\xfe{",
    "large": " " * (5 << 20) + "{}",
    "list": "[]",
}


@pytest.mark.parametrize("what", BAD_JSON)
@pytest.mark.parametrize(
    "file",
    [
        "bundle.mesp/manifest.json", "bundle.mesp/config.json",
        "bundle.mesp/tokenizer_config.json", "bundle.mesp/generation_config.json",
        "adapters/adapter_config.json", "model/config.json", "model/model.safetensors.index.json",
        "run/settings.json", "train.jsonl",
    ],
)  # fmt: skip
def test_json_that_is_none_is_refused(
    exported: Path, bundle: Path, adapters: Path, tmp_path: Path, file: str, what: str
):
    model = Path(shutil.copytree(exported.parent / "model", tmp_path / "model"))
    with_an_index(model)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    path, data = tmp_path / file, BAD_JSON[what]
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    if path.parent == bundle and path.name != "manifest.json":
        list_again(bundle)
    out = tmp_path / "out.mesp"
    said = refused(
        *{
            "bundle.mesp": ("generate", bundle, "--prompt", "a"),
            "adapters": fuse(bundle, adapters),
            "model": ("export", "--model", model, "--seq-len", 8, "--out", out),
            "run": ("train", "--resume", "--out", tmp_path / "run"),
            "train.jsonl": ("data", bundle, "--data", path),
        }[Path(file).parts[0]]
    )
    assert len(said) < 500
    assert not out.exists() and not (tmp_path / "fused").exists()


@pytest.mark.parametrize("names", [["../x"], ["/etc/passwd"], [1], [None], [["a"]], [{}], ["a\0"]])
def test_an_index_that_names_no_file_beside_it_is_refused(
    exported: Path, tmp_path: Path, names: list
):
    model = Path(shutil.copytree(exported.parent / "model", tmp_path / "model"))
    with_an_index(model)
    weight_map = {str(i): name for i, name in enumerate(names)}
    change(model / "model.safetensors.index.json", weight_map=weight_map)
    said = refused("export", "--model", model, "--seq-len", 8, "--out", tmp_path / "out.mesp")
    assert "model.safetensors.index.json cannot be read; download the model again" in said


BAD_YAML = {
    "a date": "steps: 2001-99-99",
    "a tag": "steps: !!bool maybe",
    "deep": "steps: " + 5000 * "[",
    "flow": "steps: " + 200 * "[" + 200 * "]",
    "half a character": 'output: "\\ud800"',
    "growing": "a: &a [x, x]\n"
    + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in pairwise("abcdefghijklmnopqrstuvwxyz"))
    + "steps: *z",
    "itself": "steps: &a [*a]",
    "large": " " * (5 << 20),
    "code": "!!python/object/apply:os.mkdir [made]",
}


@pytest.mark.parametrize("what", BAD_YAML)
def test_yaml_that_is_none_is_refused(tmp_path: Path, what: str):
    (tmp_path / "config.yaml").write_text(BAD_YAML[what])
    said = commands.refused(run("train", "--config", "config.yaml", cwd=tmp_path))
    assert "config.yaml" in said and "is not valid YAML" in said and len(said) < 300
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("warmup", value) for value in ("1", [1], {}, 1.5, True, -1)),
        *(("alpha", value) for value in (1e39, 10**400, 10**20, -(10**20))),
    ],
)
def test_settings_of_other_types_are_refused(
    bundle: Path, tmp_path: Path, name: str, value: object
):
    change(tmp_path / "settings.json", bundle=str(bundle), steps=2, seq_len=8, **{name: value})
    (tmp_path / "metrics.jsonl").touch()
    assert "is not the settings of a run" in refused("train", "--resume", "--out", tmp_path)


@pytest.mark.parametrize("options", [(), ("--dry-run",)], ids=str)
@pytest.mark.parametrize("file", ["settings.json", "config.yaml"])
def test_a_file_names_no_code_to_run(bundle: Path, tmp_path: Path, file: str, options: tuple):
    harm, output, code = tmp_path / "harm", tmp_path / "runs" / "one", "runs.one.notes:go"
    output.mkdir(parents=True)
    (output / "notes.py").write_text(f"import pathlib; pathlib.Path({str(harm)!r}).touch()")
    if file == "config.yaml":
        (tmp_path / file).write_text(f"bundle: {bundle}\nsteps: 1\nreward: {code}\n")
        named: tuple = ("--config", file)
    else:
        settings = {"bundle": str(bundle), "steps": 2, "seq_len": 8, "reward": code}
        change(output / file, **settings)
        (output / "metrics.jsonl").touch()
        named = ("--resume", "--out", output)
    done = run("train", *named, *options, cwd=tmp_path)
    assert not harm.exists()
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"add --reward {code}" in done.stderr


def test_a_resumed_run_reads_no_text_that_its_settings_name(bundle: Path, tmp_path: Path):
    output, secret = tmp_path / "run", tmp_path / "secret"
    secret.write_text(TEXT)
    options = ("--steps", 1, "--seq-len", 8, "--max-forgetting", 3, "--out", output)
    call("train", bundle, *options)
    shutil.rmtree(output / "general")
    change(output / "settings.json", general_text=str(secret))
    said = refused("train", "--resume", "--steps", 2, "--out", output)
    assert "is missing" in said and not (output / "general").exists()


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("train", ("--steps", 1, "--learning-rate", "1e39")),
        ("train", ("--steps", 1, "--learning-rate", "1e-60")),
        ("train", ("--steps", 1, "--alpha", "1e300")),
        ("train", ("--steps", "12345678901234567890")),
        ("generate", ("--prompt", "a", "--top-p", "1e-300")),
        ("generate", ("--prompt", "a", "--max-tokens", "12345678901234567890")),
        ("generate", ("--prompt", "a", "--temp", "nan")),
    ],
    ids=lambda each: "" if isinstance(each, str) else each[-1],
)
def test_a_number_that_the_engine_has_no_room_for_is_named(
    bundle: Path, tmp_path: Path, command: str, options: tuple
):
    done = run(command, bundle, *options, cwd=tmp_path)
    assert done.returncode == 2 and "JSON" not in done.stderr and "Traceback" not in done.stderr
    name = {"--temp": "temperature"}.get(options[-2], options[-2].strip("-").replace("-", "_"))
    assert name in done.stderr or options[-2] in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", ["bundle", "out"])
def test_a_path_in_a_file_has_no_null_character(tmp_path: Path, name: str):
    (tmp_path / "config.yaml").write_text(f'{name}: "a\\0b"\n')
    assert "a null character" in refused("train", "--config", tmp_path / "config.yaml")
    change(tmp_path / "settings.json", **{"bundle": "b", "steps": 2, "seq_len": 8, name: "a\0b"})
    (tmp_path / "metrics.jsonl").touch()
    assert "is not the settings of a run" in refused("train", "--resume", "--out", tmp_path)


@pytest.mark.parametrize(
    "path",
    [
        *(5000 * "a", "/".join(2000 * "a"), "\ud800", "loop", "a\0b", "../out", "", "/etc/passwd"),
        *("../adapters/adapters.safetensors", "link/adapters.safetensors", "password"),
    ],
    ids=["long", "deep", "half", "loop", "nul", "up", "empty", "root", "beside", "through", "link"],
)
def test_a_manifest_names_files_in_its_bundle(bundle: Path, adapters: Path, path: str):
    loop(bundle / "loop")
    (bundle / "link").symlink_to(adapters)
    (bundle / "password").symlink_to("/etc/passwd")
    files = json.loads((bundle / "manifest.json").read_text())["files"]
    change(bundle / "manifest.json", files=[*files, {"path": path, "size": 1, "sha256": ""}])
    said = refused("generate", bundle, "--prompt", "a")
    assert ("cannot be read" if path == "\ud800" else "outside of it") in said
    assert len(said) < 1000


def test_sentences_do_not_control_a_terminal(bundle: Path):
    files = json.loads((bundle / "manifest.json").read_text())["files"]
    missing = {"path": "a\x1b]0;b\x07", "size": 1, "sha256": ""}
    change(bundle / "manifest.json", files=[*files, missing])
    said = refused("generate", bundle, "--prompt", "a")
    assert "is missing" in said and said.isprintable()


@pytest.mark.parametrize(
    "entries",
    [
        {"model": None},
        {"model": {"id": "a"}},
        {"model": {"id": "a", "revision": None, "license": "mit\n---\n# Another card"}},
        {"model": {"id": "a\nlicense: mit", "revision": "0", "license": None}},
        {"quantization": {"bits": 4, "group_size": 64, "mode": "\x1b[2J"}},
        {"data": {"\x1b[2J": {"file": "data/train.bin", "tokens": 1}}},
        {"name": "a\x1b]0;b\x07"},
        {"files": [{"path": "config.json", "size": 1}]},
        *({"files": [{"path": "config.json", "size": 1, "sha256": x}]} for x in (None, 1, [])),
    ],
)
def test_a_manifest_says_of_its_model_what_can_be_shown(
    bundle: Path, tmp_path: Path, entries: dict
):
    change(bundle / "manifest.json", **entries)
    said = refused("export", "--from", bundle, "--out", tmp_path / "out.mesp")
    assert "manifest.json is damaged" in said


def test_a_log_that_is_a_pipe_is_not_waited_for(tmp_path: Path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    code = "import pathlib, sys, mesp.runs.log as log; log.RunLog.load(pathlib.Path(sys.argv[1]))"
    line = [sys.executable, "-c", code, tmp_path]
    said = finish(line).stderr
    assert "MespError" in said and "is not a regular file" in said


def test_new_data_goes_through_no_link(bundle: Path, exported: Path, tmp_path: Path):
    other = Path(shutil.copytree(exported, tmp_path / "other.mesp"))
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    (bundle / "data.2").symlink_to(other / "data")
    call("data", bundle, "--data", "python-docs")
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    assert not (bundle / "data.2").is_symlink() and (bundle / "data.2" / "train.bin").exists()


def test_a_bundle_with_two_folders_of_data_is_refused(bundle: Path):
    shutil.copytree(bundle / "data", bundle / "data.2")
    list_again(bundle)
    assert "is damaged" in refused("data", bundle, "--data", "python-docs")


def test_an_unfinished_folder_that_is_a_link_is_not_followed(tmp_path: Path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (tmp_path / ".out.mesp.partial").symlink_to(kept)
    call("export", "--model", "demo", "--seq-len", 8, "--out", tmp_path / "out.mesp")
    assert [path.name for path in kept.iterdir()] == ["file"]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    file = tmp_path / "kept"
    file.write_text("kept")
    return file


@pytest.mark.parametrize("name", [".figures.json.partial", "figures.json"])
def test_figures_are_written_through_no_link(exported: Path, tmp_path: Path, kept: Path, name: str):
    (tmp_path / name).symlink_to(kept)
    (tmp_path / "questions.jsonl").write_text('{"text": "a dog"}\n')
    figures = tmp_path / "figures.json"
    call("evaluate", exported, tmp_path / "questions.jsonl", "--out", figures)
    assert kept.read_text() == "kept" and json.loads(figures.read_text())["results"]


@pytest.mark.parametrize("name", ["settings.json", ".settings.json.partial"])
def test_settings_are_written_through_no_link(bundle: Path, tmp_path: Path, kept: Path, name: str):
    output = tmp_path / "run"
    output.mkdir()
    (output / name).symlink_to(kept)
    call("train", bundle, "--steps", 1, "--seq-len", 8, "--out", output)
    assert kept.read_text() == "kept"


@pytest.mark.parametrize("name", ["adapters", "adapters/peft", "best", "general"])
def test_a_run_keeps_to_its_folder(bundle: Path, tmp_path: Path, name: str):
    output, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    options = ("--seq-len", 8, "--max-forgetting", 3, "--eval-every", 1, "--out", output)
    elsewhere.mkdir()
    link = output / name
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    assert f"{link} is a symbolic link" in refused("train", bundle, "--steps", 1, *options)
    link.unlink()
    call("train", bundle, "--steps", 1, *options)
    shutil.rmtree(link, ignore_errors=True)
    link.symlink_to(elsewhere)
    said = refused("train", "--resume", "--steps", 2, "--out", output)
    assert f"{link} is a symbolic link" in said
    assert not list(elsewhere.iterdir())


def test_the_engine_saves_no_adapters_through_a_link(bundle: Path, tmp_path: Path):
    output, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    call("train", bundle, "--steps", 1, "--seq-len", 8, "--out", output)
    settings = json.loads((output / "settings.json").read_text()) | {"resume": True, "steps": 2}
    shutil.rmtree(output / "adapters")
    elsewhere.mkdir()
    (output / "adapters").symlink_to(elsewhere)
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    done = finish([find_engine(), tmp_path / "settings.json"])
    assert done.returncode == 2 and "it is a symbolic link" in done.stdout + done.stderr
    assert not list(elsewhere.iterdir())


def test_a_pipe_in_place_of_a_manifest_is_refused(bundle: Path):
    (bundle / "manifest.json").unlink()
    os.mkfifo(bundle / "manifest.json")
    assert "cannot be read" in refused("generate", bundle, "--prompt", "a")


def test_a_large_manifest_takes_little_memory(bundle: Path):
    """Empty lists take far more memory than their two characters of JSON."""
    (bundle / "manifest.json").write_text("[" + ",".join(["[]"] * 350_000) + "]")
    tracemalloc.start()
    read_json(bundle / "manifest.json")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 30 << 20
    (bundle / "manifest.json").write_text(" " * (24 << 20) + "{}")
    assert "cannot be read" in refused("generate", bundle, "--prompt", "a")


@pytest.mark.parametrize(
    "entries",
    [
        {"num_hidden_layers": 10**10},
        {"head_dim": 10**10},
        {"num_attention_heads": 1, "hidden_size": 2**31 - 1},
        {"partial_rotary_factor": 1e10},
        {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 1e10}},
        {
            "model_type": "phi3",
            "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1e10},
        },
        {"num_hidden_layers": float("inf")},
        {"num_hidden_layers": -1},
    ],
    ids=str,
)
def test_a_model_of_absurd_size_is_refused_at_once(tmp_path: Path, entries: dict):
    (tmp_path / "model").mkdir()
    change(tmp_path / "model" / "config.json", **TINY | {"layer_types": None} | entries)
    arguments = ("--random-weights", "--seq-len", 8, "--out", tmp_path / "out.mesp")
    assert "config.json" in refused("export", "--model", tmp_path / "model", *arguments)
