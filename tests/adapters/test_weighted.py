from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten

import mesp
from helpers.adapters import exported, with_weighted_sum, write_adapters
from helpers.commands import call, refused, run
from helpers.models import FAMILIES
from helpers.paths import FAKE_ENGINE
from mesp.adapters.load import apply_adapters, read_adapters, stack_adapters
from mesp.bundle.reader import Bundle
from mesp.errors import MespError

EXACT = 1e-5
BFLOAT16 = 2**-8  # the largest relative change by rounding to bfloat16
WEIGHTS = {"first": 0.7, "second": 0.3, "third": 2.0}
WITH_DORA = {"dora": 0.6, "second": 0.3, "small": 2.0}


def write_all(folder: Path, bundle: Path) -> None:
    write_adapters(folder / "dora", bundle, seed=4, without=("up_proj",), dora=True)
    without = ("q_proj", "out_proj")
    write_adapters(folder / "small", bundle, rank=1, scale=0.5, seed=5, without=without, dora=True)
    write_adapters(folder / "first", bundle, without=("v_proj", "gate_proj"))
    without = ("down_proj", "o_proj", "q_proj")
    write_adapters(folder / "second", bundle, rank=5, scale=0.5, seed=2, without=without)
    write_adapters(folder / "third", bundle, rank=1, scale=7.0, seed=3, without=("k_proj",))


@pytest.fixture(scope="module", params=["qwen3", "llama", "gemma2", "lfm2_moe"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_all(folder, exported(folder, FAMILIES[request.param]))
    return folder


def fused(folder: Path, out: Path, weights: dict[str, float], *options: object) -> Path:
    named = [word for name in weights for word in ("--adapters", folder / name)]
    named += ["--weights", ",".join(map(str, weights.values()))]
    call("fuse", folder / "bundle.mesp", *named, "--out", out, "--val-batches", 0, *options)
    return out


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def added(file: Path) -> dict[str, np.ndarray]:
    reader = gguf.GGUFReader(file)
    alpha = reader.get_field("adapter.lora.alpha").contents()
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    return {
        name.removesuffix(".lora_a"): alpha / a.shape[-2] * (tensors[f"{name[:-1]}b"] @ a)
        for name, a in tensors.items()
        if name.endswith(".lora_a")
    }


def test_adapters_for_llama_cpp_add_the_weighted_sum(family: Path, tmp_path: Path):
    parts = {
        name: added(fused(family, tmp_path / name, {name: 1.0}, "--gguf") / "adapters.gguf")
        for name in WEIGHTS
    }
    found = added(fused(family, tmp_path / "all", WEIGHTS, "--gguf") / "adapters.gguf")
    assert found.keys() == {module for part in parts.values() for module in part}
    assert all(found.keys() - part.keys() for part in parts.values())
    for module, matrix in found.items():
        having = [name for name in WEIGHTS if module in parts[name]]
        expected = sum(WEIGHTS[name] * parts[name][module] for name in having)
        assert relative_error(matrix, expected) <= EXACT, module


def with_sum(folder: Path, weights: dict[str, float]) -> nn.Module:
    named = {folder / name: weight for name, weight in weights.items()}
    return with_weighted_sum(folder / "bundle.mesp", named)


SUMS = [WEIGHTS, {"first": 0.5}, {"dora": 1.0}, {"dora": 0.5}, WITH_DORA]


@pytest.mark.parametrize("weights", SUMS, ids=lambda each: "+".join(each))
def test_a_stack_is_the_fused_sum(family: Path, weights: dict[str, float]):
    opened = Bundle(family / "bundle.mesp")
    tokens = mx.array(opened.tokens("train")[None, :6])
    expected = np.array(with_sum(family, weights)(tokens))
    model = opened.to_mlx_lm()
    model.set_dtype(mx.float32)
    base = np.array(model(tokens))
    read = [(read_adapters(family / name, opened.architecture), weights[name]) for name in weights]
    apply_adapters(model, stack_adapters(read, model))
    assert relative_error(np.array(model(tokens)), expected) <= EXACT
    assert relative_error(base, expected) > 0.1


@pytest.mark.parametrize("weights", [WEIGHTS, WITH_DORA], ids=["lora", "dora"])
def test_a_model_is_fused_with_the_weighted_sum(family: Path, tmp_path: Path, weights: dict):
    out = fused(family, tmp_path / "fused", weights, "--bits", "bfloat16")
    model, _ = mlx_lm.load(str(out))
    expected = dict(tree_flatten(with_sum(family, weights).parameters()))
    for name, array in tree_flatten(model.parameters()):
        whole = np.array(expected[name])
        error = np.abs(np.array(array.astype(mx.float32)) - whole)
        assert (error <= BFLOAT16 * np.abs(whole) + 1e-7).all(), name


@pytest.mark.parametrize(
    "weights", [{"first": 1.0}, {"first": 1.0, "second": 0.0}, {"second": 0.0, "first": 1.0}]
)
def test_one_whole_set_of_adapters_stays_what_it_is(family: Path, tmp_path: Path, weights: dict):
    options = ("--out", tmp_path / "plain", "--gguf", "--val-batches", 0)
    call("fuse", family / "bundle.mesp", "--adapters", family / "first", *options)
    fused(family, tmp_path / "weighted", weights, "--gguf")
    for name in ("model.safetensors", "adapters.gguf"):
        plain, weighted = ((tmp_path / each / name).read_bytes() for each in ("plain", "weighted"))
        assert plain == weighted


@pytest.fixture
def asked(working_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list]:
    for name in ("a", "b"):
        (working_folder / name).mkdir()
    notes = working_folder / "notes"
    monkeypatch.setenv("MESP_ENGINE", str(FAKE_ENGINE))
    monkeypatch.setenv("FAKE_ENGINE_NOTES", str(notes))

    def adapters() -> list:
        settings = [json.loads(line) for line in notes.read_text().splitlines()]
        notes.unlink()
        named = [each["adapters"] for each in settings]
        return [[(Path(each["folder"]).name, each["weight"]) for each in one] for one in named]

    return adapters


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("", []),
        ("--adapters a", [("a", 1)]),
        ("--adapters a --weights 0.5", [("a", 0.5)]),
        ("--adapters a,b", [("a", 1), ("b", 1)]),
        ("--adapters a,b --weights 0.7,0.3", [("a", 0.7), ("b", 0.3)]),
        ("--adapters a --adapters b --weights 0 --weights 10", [("a", 0), ("b", 10)]),
    ],
)
def test_the_engine_gets_each_folder_with_its_weight(bundle: Path, asked, typed: str, wanted: list):
    call("generate", bundle, "--prompt", "a", *typed.split())
    assert asked() == [wanted]


def test_the_library_takes_one_folder_or_several(bundle: Path, asked):
    mesp.generate(bundle, "a", adapters="a")
    both = [("a", 0.7), ("b", 0.3)]
    for weights in ([0.7, 0.3], np.array([0.7, 0.3])):
        mesp.generate(bundle, "a", adapters=["a", Path("b")], weights=weights)
    assert asked() == [[("a", 1)], both, both]


def perplexities(rows) -> dict[str | None, float]:
    return {row["adapters"]: row["value"] for row in rows if row["metric"] == "perplexity"}


def test_an_evaluation_measures_each_or_their_sum(bundle: Path, asked):
    Path("data.jsonl").write_text('{"text": "My fellow citizens"}\n')
    options = ("--adapters", "a,b", "--out", "found.json")
    call("evaluate", bundle, "data.jsonl", *options)
    first, second = [("a", 1)], [("b", 1)]
    assert asked() == [first, second, [], first, second]
    each = json.loads(Path("found.json").read_text())
    assert list(perplexities(each["results"])) == each["adapters"] == [None, "a", "b"]

    done = call("evaluate", bundle, "data.jsonl", *options, "--weights", "0.5,1")
    both = [("a", 0.5), ("b", 1)]
    assert asked() == [both, [], both]
    found = json.loads(Path("found.json").read_text())
    assert list(perplexities(found["results"])) == found["adapters"] == [None, "0.5 * a + b"]
    assert "0.5 * a + b" in done.stdout
    values = perplexities(found["results"])
    assert values["0.5 * a + b"] < values[None]

    weighted = {"adapters": ["a", "b"], "weights": [0.5, 1]}
    found = mesp.evaluate(bundle, "data.jsonl", **weighted, base=False)
    assert {row.adapters for row in found.rows} == {"0.5 * a + b"}
    assert asked() == [both]


COUNTS = "The number of --weights is {}, and that of --adapters {}; give a weight for each folder."
RANGE = "--weights has {}; give numbers from 0 to 10."
REFUSED = {
    "--weights 1": "--weights needs --adapters.",
    "--adapters a,b --weights 1": COUNTS.format(1, 2),
    "--adapters a --weights 1,2": COUNTS.format(2, 1),
    "--adapters a,b --weights 1,-0.5": RANGE.format(-0.5),
    "--adapters a,b --weights nan,1": RANGE.format("nan"),
    "--adapters a --weights inf": RANGE.format("inf"),
    "--adapters a --weights 10.5": RANGE.format(10.5),
    "--adapters ,": "--adapters has no value; give one, or leave it out.",
    "--adapters a --weights ,": "--weights has no value; give one, or leave it out.",
}


@pytest.mark.parametrize("typed", REFUSED)
@pytest.mark.parametrize("command", ["generate", "evaluate", "fuse"])
def test_weights_that_fit_no_adapters_are_refused(bundle: Path, asked, command: str, typed: str):
    if command == "fuse" and "--adapters" not in typed:
        return
    others = {"generate": ("--prompt", "a"), "evaluate": ("d.txt",), "fuse": ("--out", "fused")}
    Path("d.txt").write_text("My fellow citizens")
    assert refused(run(command, bundle, *others[command], *typed.split())) == REFUSED[typed]
    assert not Path("notes").exists() and not Path("fused").exists()


def test_the_library_refuses_weights_in_the_same_words(bundle: Path, asked):
    for function in (mesp.generate, mesp.evaluate):
        with pytest.raises(MespError, match=r"^`weights` has nan; give numbers from 0 to 10\.$"):
            function(bundle, "a", adapters=["a", "b"], weights=[1.0, float("nan")])
        with pytest.raises(MespError, match=r"^`weights` needs `adapters`\.$"):
            function(bundle, "a", weights=[1.0])


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("nowhere", "There is no folder {}; name one with adapters."),
        ("run", "{0} is a run's folder, with its adapters in another: name {0}/adapters."),
        ("another", "Cannot load the adapters in {}: it holds model.layers."),
        ("zero", "Every one of --weights is 0, which leaves nothing to fuse; raise one."),
        (
            "dora",
            "The adapters have DoRA's magnitudes, for which llama.cpp's files of adapters have no "
            "place; leave out --gguf, or write them into the weights with --gguf-base.",
        ),
    ],
)
def test_what_cannot_be_fused_is_named_and_nothing_is_left(
    family: Path, bundle: Path, tmp_path: Path, second: str, said: str
):
    if second == "another":
        write_adapters(tmp_path / "another", bundle)
    copied = {
        "run": ("second", "run/adapters"),
        "zero": ("second", "zero"),
        "dora": ("dora", "dora"),
    }
    if second in copied:
        name, place = copied[second]
        shutil.copytree(family / name, tmp_path / place)
    folders = f"{family / 'first'},{tmp_path / second}"
    weights = {"zero": "0,0", "dora": "1,1"}.get(second, "1,0")
    options = ("--adapters", folders, "--weights", weights, "--out", tmp_path / "fused", "--gguf")
    sentence = refused(run("fuse", family / "bundle.mesp", *options))
    assert sentence.startswith(said.format(tmp_path / second))
    assert not (tmp_path / "fused").exists()
