"""Tests the engine's adapters with the rules of mlx-swift-lm's loader, written in Python.

The rules come from github.com/ml-explore/mlx-swift-lm at 14414441fa44f45eee35a61e9fa0bab577cf9734
(22 August 2026), from these files below Libraries/:

- MLXLMCommon/Adapters/LoRA/LoRAContainer.swift, DoRA+Layers.swift and PEFTAdapter.swift
- MLXLLM/LLMModelFactory.swift and MLXVLM/VLMModelFactory.swift, for the `model_type`s
- in MLXLLM/Models and MLXVLM/Models, the file that the factory names for a `model_type`

`Module.update` is in mlx-swift, Source/MLXNN/Module.swift at
09051ed1986b6f2c69b6fda4e32ca42dd7dcdec3.
"""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest

from helpers.commands import call
from helpers.models import FAMILIES, TEXT, write_model
from helpers.paths import ROOT
from mesp.models import families
from mesp.models.architecture import Architecture

PAGE = ROOT / "docs" / "mlx-swift-lm.md"
RANK, ALPHA = 4, 12
CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"


class Model(NamedTuple):
    prefix: str
    linear: set[str]
    within: str = ""
    keeps_weights: bool = False


def named(module: str, *names: str) -> set[str]:
    return {f"{module}.{name}" for name in names}


# Prefixes of layer names.
WHOLE, TEXT_OF_SEVERAL, OF_SMOLVLM = "model", "language_model.model", "language_model"
ATTENTION = named("self_attn", "q_proj", "k_proj", "v_proj", "o_proj")
MLP = named("mlp", "gate_proj", "up_proj", "down_proj")
DENSE = ATTENTION | MLP
FUSED = named("self_attn", "qkv_proj", "o_proj") | named("mlp", "gate_up_proj", "down_proj")
DELTA_NET = named(
    *("linear_attn", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
)
SHARED_EXPERT = named("mlp.shared_expert", "gate_proj", "up_proj", "down_proj")
LFM2 = named("self_attn", "q_proj", "k_proj", "v_proj", "out_proj")
LFM2 |= named("conv", "in_proj", "out_proj")
GRANITE4 = DENSE | named("mamba", "in_proj", "out_proj")
GRANITE4 |= named("shared_mlp", "input_linear", "output_linear")
GEMMA4 = DENSE | {"per_layer_input_gate", "per_layer_projection"}

PLAIN = Model(WHOLE, DENSE)
PART = Model(TEXT_OF_SEVERAL, DENSE)
QWEN3_5 = DENSE | DELTA_NET
QWEN3_5_MOE = ATTENTION | DELTA_NET | SHARED_EXPERT
W1_TO_W3 = named("feed_forward", "w1", "w2", "w3")
FEED_FORWARD = named("feed_forward", "gate_proj", "up_proj", "down_proj")

# By `model_type`, the models of MLXLLM and of MLXVLM. Their experts are SwitchLinear, not `Linear`,
# and take no adapters.
MODELS: dict[str, dict[str, Model]] = {
    "qwen2": {"MLXLLM": PLAIN},
    "qwen2_5_vl": {"MLXVLM": PART},
    "qwen3": {"MLXLLM": PLAIN},
    "qwen3_vl": {"MLXVLM": PART},
    "qwen3_moe": {"MLXLLM": PLAIN},
    "qwen3_5": {
        "MLXLLM": Model(TEXT_OF_SEVERAL, QWEN3_5, keeps_weights=True),
        "MLXVLM": Model(TEXT_OF_SEVERAL, QWEN3_5),
    },
    "qwen3_5_text": {"MLXLLM": Model(WHOLE, QWEN3_5, keeps_weights=True)},
    "qwen3_5_moe": {
        "MLXLLM": Model(TEXT_OF_SEVERAL, QWEN3_5_MOE, keeps_weights=True),
        "MLXVLM": Model(TEXT_OF_SEVERAL, QWEN3_5_MOE),
    },
    "qwen3_5_moe_text": {},
    "llama": {"MLXLLM": PLAIN},
    "smolvlm": {"MLXVLM": Model(OF_SMOLVLM, DENSE)},
    "idefics3": {"MLXVLM": Model(OF_SMOLVLM, DENSE)},
    "smollm3": {"MLXLLM": PLAIN},
    "granite": {"MLXLLM": PLAIN},
    "granitemoehybrid": {"MLXLLM": Model(WHOLE, GRANITE4)},
    "minicpm": {"MLXLLM": PLAIN},
    "mistral": {"MLXLLM": PLAIN},
    "ministral3": {},
    "mistral3": {"MLXLLM": PLAIN, "MLXVLM": PART},
    "gemma2": {"MLXLLM": PLAIN},
    "gemma3_text": {"MLXLLM": PLAIN},
    "gemma3": {"MLXLLM": PLAIN, "MLXVLM": PART},
    "gemma4_text": {"MLXLLM": Model(WHOLE, GEMMA4, within="self_attn")},
    "gemma4": {
        "MLXLLM": Model(TEXT_OF_SEVERAL, GEMMA4, within="self_attn"),
        "MLXVLM": Model(TEXT_OF_SEVERAL, GEMMA4),
    },
    "lfm2": {"MLXLLM": Model(WHOLE, LFM2 | W1_TO_W3)},
    "lfm2_moe": {"MLXLLM": Model(WHOLE, LFM2 | FEED_FORWARD)},
    "lfm2_vl": {"MLXVLM": Model(TEXT_OF_SEVERAL, LFM2 | W1_TO_W3)},
    "lfm2-vl": {"MLXVLM": Model(TEXT_OF_SEVERAL, LFM2 | W1_TO_W3)},
    "lfm3": {},
    "phi3": {"MLXLLM": Model(WHOLE, FUSED)},
}
LOADS, FITTED, FIRST, NOT, LACKS = "yes", "fitted", "before the first token", "no", "none"


class Refused(Exception):
    """The loader throws an error, or would load the adapters wrongly."""


class Loaded(NamedTuple):
    """The matrices are A [in, rank], B [rank, out] and, with DoRA, m [out]."""

    scale: float
    matrices: dict[str, tuple[mx.array, ...]]


def decoded(holder: dict[str, Any], key: str, *kinds: type) -> Any:
    if not isinstance(value := holder.get(key), kinds) or isinstance(value, bool):
        raise Refused(f"{key} does not decode")
    return value


def load(folder: Path, model: Model, arch: Architecture, fit: bool = False) -> Loaded:
    """Raises Refused where they throw or would load the adapters wrongly. With `fit`, the matrices
    are first renamed as by the documentation page's `fitted(to:)`.
    """
    config = json.loads((folder / CONFIG).read_text())
    kind = decoded(config, "fine_tune_type", str)
    if kind not in ("lora", "dora"):
        raise Refused("fine_tune_type does not decode")
    lora = decoded(config, "lora_parameters", dict)
    rank, scale = decoded(lora, "rank", int), decoded(lora, "scale", float, int)
    if not 0 <= lora.get("dropout", 0) < 1:
        raise Refused("dropout does not decode")
    keys = decoded(lora, "keys", list) if lora.get("keys") is not None else None
    weights = mx.load(str(folder / WEIGHTS))
    if fit and model.prefix == WHOLE:
        weights = {name.removeprefix("language_model."): each for name, each in weights.items()}
    count = decoded(config, "num_layers", int)
    return put(kind, weights, keys, count, rank, scale, model, arch)


def put(
    kind: str,
    weights: dict[str, mx.array],
    keys: list[str] | None,
    num_layers: int,
    rank: int,
    scale: float,
    model: Model,
    arch: Architecture,
) -> Loaded:
    shapes = {}
    for i, block in list(enumerate(arch.blocks))[max(0, len(arch.blocks) - num_layers) :]:
        for name, (outputs, inputs) in block.sizes().items():
            is_below = name.startswith(f"{model.within}.") if model.within else True
            key = name.removeprefix(f"{model.within}.")
            if name in model.linear and is_below and (keys is None or key in keys):
                shapes[f"{model.prefix}.layers.{i}.{name}"] = {
                    "lora_a": (inputs, rank),
                    "lora_b": (rank, outputs),
                } | ({"m": (outputs,)} if kind == "dora" else {})
    matrices = {path: {} for path in shapes}
    for name, array in sorted(weights.items()):
        path, _, part = name.rpartition(".")
        if part not in shapes.get(path, ()):
            raise Refused(f"unhandled key {name}")
        # mlx-swift-lm accepts a matrix of another shape, and crashes at its first product.
        if array.shape != shapes[path][part]:
            raise Refused(f"{name} has the shape {array.shape}")
        matrices[path][part] = array
    # In mlx-swift-lm, a replaced layer keeps its initial matrices where the file has none. The
    # initial A is random.
    for path, parts in matrices.items():
        if parts.keys() != shapes[path].keys():
            raise Refused(f"{path} lacks a matrix")
    return Loaded(scale, {path: tuple(parts.values()) for path, parts in matrices.items()})


def load_peft(folder: Path, model: Model, arch: Architecture) -> Loaded:
    config = json.loads((folder / CONFIG).read_text())
    rank, alpha = decoded(config, "r", int), decoded(config, "lora_alpha", float, int)
    decoded(config, "target_modules", list)
    weights, keys = {}, set()
    for name, array in mx.load(str(folder / "adapter_model.safetensors")).items():
        found = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])\.weight", name)
        if found:
            weights[f"{found[1]}.lora_{found[2].lower()}"] = array.T
            keys |= set(re.findall(r"\.layers\.\d+\.(.+)", found[1]))
    blocks = {int(each) for name in weights for each in re.findall(r"\.layers\.(\d+)\.", name)}
    # Without this count, the loader would also give the blocks before the trained ones adapters.
    count = len(arch.blocks) - min(blocks)
    return put("lora", weights, sorted(keys), count, rank, alpha / rank, model, arch)


def config_of(name: str) -> dict:
    if name in FAMILIES:
        return FAMILIES[name]
    same = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "ministral3": "mistral3"}
    same |= {"smolvlm": "llama", "idefics3": "llama", "lfm2_vl": "lfm2", "lfm2-vl": "lfm2"}
    return FAMILIES[same.get(name, name.removesuffix("_text"))] | {"model_type": name}


TYPES = {each["model_type"] for each in FAMILIES.values()}
NAMES = [*FAMILIES, *sorted(families.FAMILIES.keys() - TYPES)]


class Trained(NamedTuple):
    adapters: Path
    arch: Architecture
    models: dict[str, Model]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Each family is exported once."""
    bundles: dict[str, Path] = {}

    @cache
    def trained(name: str, *options: object) -> Trained:
        folder, config = tmp_path_factory.mktemp(name), config_of(name)
        if name not in bundles:
            text, bundles[name] = folder / "text.txt", folder / "b.mesp"
            text.write_text(TEXT)
            source = write_model(folder / "model", config)
            size = ("--seq-len", 8, "--rank", RANK, "--quantize", "nearest", "--head-bits", 4)
            call("export", "--model", source, "--data", text, "--out", bundles[name], *size)
        run = ("--out", folder / "run", "--steps", 1, "--val-batches", 0, "--alpha", ALPHA)
        call("train", bundles[name], *run, *options)
        arch = Architecture.from_config(config)
        return Trained(folder / "run" / "adapters", arch, MODELS[config["model_type"]])

    return trained


def outcome(trained: Trained, model: Model) -> str:
    for fit, said in ((False, FIRST if model.keeps_weights else LOADS), (True, FITTED)):
        try:
            load(trained.adapters, model, trained.arch, fit)
        except Refused:
            continue
        return f"{said}, {FIRST}" if fit and model.keeps_weights else said
    return NOT


def test_every_model_type_that_is_exported_is_looked_up():
    assert MODELS.keys() == families.FAMILIES.keys()


def test_the_page_says_of_every_family_what_loads(train: Callable[..., Trained]):
    found: dict[str, tuple[str, str]] = {}
    for name in NAMES:
        trained = train(name)
        for library, model in trained.models.items():
            for fit in (False, True):
                try:
                    loaded = load(trained.adapters, model, trained.arch, fit)
                except Refused:
                    continue
                expected = {
                    f"{model.prefix}.layers.{i}.{each}"
                    for i, block in enumerate(trained.arch.blocks)
                    for each in block.modules
                }
                assert loaded.matrices.keys() == expected, (name, library)
                assert loaded.scale == ALPHA / RANK
        row = tuple(
            outcome(trained, trained.models[library]) if library in trained.models else LACKS
            for library in ("MLXLLM", "MLXVLM")
        )
        kind = config_of(name)["model_type"]
        assert found.setdefault(kind, row) == row, name

    (table,) = re.findall(r"<!-- families -->\n(.+?)<!-- /", PAGE.read_text("utf-8"), flags=re.S)
    said: dict[str, tuple[str, str]] = {}
    for line in table.splitlines()[2:]:
        kinds, llm, vlm = (cell.strip() for cell in line.strip("|").split("|"))
        said |= dict.fromkeys(re.findall(r"`([\w-]+)`", kinds), (llm, vlm))
    grouped = defaultdict(list)
    for kind, row in found.items():
        grouped[row].append(kind)
    assert said == found, dict(grouped)


def test_the_last_blocks_alone_load(train: Callable[..., Trained]):
    trained = train("qwen3", "--num-layers", 1, "--projections", "q,down")
    loaded = load(trained.adapters, trained.models["MLXLLM"], trained.arch)
    names = ("mlp.down_proj", "self_attn.q_proj")
    assert sorted(loaded.matrices) == [f"model.layers.1.{name}" for name in names]


def test_magnitudes_load(train: Callable[..., Trained]):
    trained = train("qwen3", "--dora", "--projections", "q,down")
    loaded = load(trained.adapters, trained.models["MLXLLM"], trained.arch)
    assert {len(matrices) for matrices in loaded.matrices.values()} == {3}
    weights = mx.load(str(trained.adapters / WEIGHTS))
    for path, (_, _, m) in loaded.matrices.items():
        assert mx.array_equal(m, weights[f"{path}.m"])


@pytest.mark.parametrize("name", [n for n in FAMILIES if config_of(n).get("num_experts")])
def test_adapters_of_experts_are_refused(name: str, train: Callable[..., Trained]):
    trained = train(name, "--projections", "experts")
    for model in trained.models.values():
        with pytest.raises(Refused, match=r"unhandled key .*switch_mlp"):
            load(trained.adapters, model, trained.arch)


def test_the_folder_of_peft_loads_where_the_page_says(train: Callable[..., Trained]):
    loading = set()
    for name in NAMES:
        trained = train(name)
        for model in trained.models.values():
            try:
                theirs = load_peft(trained.adapters / "peft", model, trained.arch)
            except Refused:
                continue
            loading.add(config_of(name)["model_type"])
            ours = load(trained.adapters, model, trained.arch, fit=True)
            assert theirs.scale == ours.scale and theirs.matrices.keys() == ours.matrices.keys()
            for path, pair in ours.matrices.items():
                assert all(map(mx.array_equal, pair, theirs.matrices[path])), path
    (said,) = re.findall(r"`fromPEFT` takes the folder `peft` of([^.]*)\.", PAGE.read_text("utf-8"))
    assert set(re.findall(r"`(\w+)`", said)) == loading, loading


def config(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        written = json.loads((folder / CONFIG).read_text())
        change(written)
        (folder / CONFIG).write_text(json.dumps(written))

    return fault


def weights(change: Callable[[str, mx.array], tuple[str, mx.array]]) -> Callable[[Path], None]:
    def fault(folder: Path) -> None:
        written = mx.load(str(folder / WEIGHTS))
        mx.eval(written)
        changed = dict(change(name, array) for name, array in written.items())
        mx.save_safetensors(str(folder / WEIGHTS), changed)

    return fault


FAULTS: dict[str, Callable[[Path], None]] = {
    "fewer layers": config(lambda c: c.update(num_layers=1)),
    "another type": config(lambda c: c.update(fine_tune_type="full")),
    "no scale": config(lambda c: c["lora_parameters"].pop("scale")),
    "another rank": config(lambda c: c["lora_parameters"].update(rank=RANK + 1)),
    "a key less": config(lambda c: c["lora_parameters"]["keys"].pop()),
    "another prefix": weights(lambda name, array: (f"language_model.{name}", array)),
    "turned matrices": weights(lambda name, array: (name, array.T)),
    "a matrix of the head": weights(
        lambda name, array: (name.replace("layers.1.mlp.up_proj", "lm_head"), array)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_rules_refuse_other_adapters(fault: str, train: Callable[..., Trained], tmp_path: Path):
    trained = train("qwen3")
    model, folder = trained.models["MLXLLM"], tmp_path / "adapters"
    shutil.copytree(trained.adapters, folder)
    load(folder, model, trained.arch)
    FAULTS[fault](folder)
    with pytest.raises(Refused):
        load(folder, model, trained.arch)
