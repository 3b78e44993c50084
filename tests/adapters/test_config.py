import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.lora import CONFIG_DEFAULTS

from helpers.adapters import RANK, SCALE, exported, write_adapters, write_peft
from helpers.commands import call
from helpers.models import FAMILIES
from mesp.adapters import config
from mesp.adapters.config import FIELDS
from mesp.adapters.load import read_adapters
from mesp.adapters.weighted import weigh
from mesp.bundle.reader import Bundle
from mesp.engine.process import generate
from mesp.errors import MespError

PLAIN = "which is not supported; train plain LoRA adapters"
PEFT, MLX = "adapter_model.safetensors", "adapters.safetensors"


@pytest.fixture(scope="module", params=["qwen2", "granitemoehybrid", "lfm2_moe", "qwen3_5"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    return with_adapters(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return with_adapters("qwen2", tmp_path_factory.mktemp("qwen"))


def with_adapters(name: str, folder: Path) -> tuple[Path, Path]:
    bundle = exported(folder, FAMILIES[name])
    adapters = write_adapters(folder / "adapters", bundle)
    write_peft(adapters / "peft", bundle, adapters)
    return bundle, adapters


@pytest.fixture
def copy(qwen: tuple[Path, Path], tmp_path: Path) -> Path:
    return shutil.copytree(qwen[1], tmp_path / "adapters")


def change(folder: Path, **values: Any) -> None:
    path = folder / config.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict], dict]) -> None:
    (file,) = folder.glob("*.safetensors")
    weights = mx.load(str(file))
    mx.eval(weights)
    mx.save_safetensors(str(file), change(weights))


def written(bundle: Path, adapters: Path) -> list[int]:
    records = generate(bundle, [5, 6], max_tokens=9, adapters=weigh(adapters))
    return [record["token"] for record in records if record["type"] == "token"]


def check_same(found: dict[str, tuple], expected: dict[str, tuple]) -> None:
    assert found.keys() == expected.keys()
    for path, pair in expected.items():
        for one, other in zip(pair, found[path], strict=True):
            assert mx.array_equal(one, other), path


def check_refused(bundle: Path, adapters: Path, said: str) -> None:
    expected = f"Cannot load the adapters in {adapters}: {said}."
    with pytest.raises(MespError) as error:
        read_adapters(adapters, Bundle(bundle).architecture)
    assert str(error.value) == expected
    with pytest.raises(MespError) as error:
        list(generate(bundle, [5, 6], max_tokens=1, adapters=weigh(adapters)))
    assert str(error.value) == expected


def test_a_key_is_in_one_part_of_the_table():
    for name, table in FIELDS.items():
        if name != "about":
            keys = [*table["used"], *table["ignored"], *table["required"]]
            assert len(keys) == len(set(keys))


def test_the_table_has_every_key_that_mlx_lm_writes():
    mlx = FIELDS["mlx"]
    assert {*mlx["used"], *mlx["ignored"], *mlx["required"]} >= CONFIG_DEFAULTS.keys()
    lora = FIELDS["lora_parameters"]
    assert {*lora["used"], *lora["ignored"]} >= CONFIG_DEFAULTS["lora_parameters"].keys()


REFUSED = {
    "alora_invocation_tokens": [[290, 291]],
    "arrow_config": [{"top_k": 2}],
    "bias": ["all", "lora_only"],
    "init_lora_weights": [
        *("pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "new"),
    ],
    "kasa_config": [{"beta": 1e-4}],
    "layer_replication": [[[0, 2], [1, 2]]],
    "layers_pattern": ["blocks"],
    "lora_bias": [True],
    "megatron_config": [{"tensor_model_parallel_size": 1}],
    "modules_to_save": [["lm_head"]],
    "monteclora_config": [{"num_samples": 8}],
    "peft_type": ["LOHA"],
    "task_type": ["SEQ_CLS"],
    "trainable_token_indices": [[1, 2], {"embed_tokens": [1]}],
    "use_bdlora": [{"nblocks": 2}],
    "use_dora": [1, "yes"],
    "use_qalora": [True],
    "velora_config": [{"num_groups": 64}],
    "a_key_of_tomorrow": [True, 0, {}, []],
}


def test_all_keys_that_must_have_a_value_are_tried():
    assert FIELDS["peft"]["required"].keys() == REFUSED.keys() - {"a_key_of_tomorrow"}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_plain_lora_is_refused_by_its_name(qwen, copy: Path, key: str):
    for value in REFUSED[key]:
        change(copy / "peft", **{key: value})
        said = f'{key} "{value}"' if isinstance(value, str) else key
        check_refused(qwen[0], copy / "peft", f"they use {said}, {PLAIN}")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rank_pattern": {"q_proj": 4}}, f"they use rank_pattern or alpha_pattern, {PLAIN}"),
        ({"alpha_pattern": {"q_proj": 4}}, f"they use rank_pattern or alpha_pattern, {PLAIN}"),
        ({"lora_alpha": 0}, f"{config.CONFIG} has a rank or scale that is not a positive number"),
        ({"r": 500}, "their rank, 500, is above the model's width of 128"),
        ({"r": None}, "adapter_config.json lacks r or lora_alpha"),
        ({"target_modules": "("}, f'{config.CONFIG} is not valid: "(" is no regular expression'),
        ({"target_modules": "(.*a)*b"}, f'they use the expression "(.*a)*b", {PLAIN}'),
    ],
    ids=lambda each: "" if isinstance(each, str) else "".join(each),
)
def test_ranks_that_are_not_one_are_refused(qwen, copy: Path, values: dict, said: str):
    change(copy / "peft", **values)
    check_refused(qwen[0], copy / "peft", said)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"fine_tune_type": "full"}, f'they use fine_tune_type "full", {PLAIN}'),
        ({"fine_tune_type": "dora"}, "model.layers.0.self_attn.q_proj.m is missing"),
        ({"use_dora": True}, f"they use use_dora, {PLAIN}"),
        ({"lora_parameters": {"rank": 2, "scale": 1, "alpha": 9}}, f"they use alpha, {PLAIN}"),
        ({"lora_parameters": None}, "adapter_config.json lacks lora_parameters"),
    ],
    ids=["full", "dora", "unknown", "alpha", "none"],
)
def test_what_mlx_lm_reads_in_another_way_is_refused(qwen, copy: Path, values: dict, said: str):
    change(copy, **values)
    check_refused(qwen[0], copy, said)


# With each of these settings, mlx-lm or PEFT would leave some matrix of the folder unused.
PLACES = {
    "a list": ("peft", {"target_modules": ["k_proj", "down_proj"]}, 0),
    "none": ("peft", {"target_modules": None}, 0),
    "an expression": ("peft", {"target_modules": r".*\.k_proj"}, 0),
    "a part of a name": ("peft", {"target_modules": "q_proj"}, 0),
    "an expression of others": ("peft", {"exclude_modules": r".*\.[qv]_proj"}, 0),
    "excluded": ("peft", {"exclude_modules": ["self_attn.q_proj"]}, 0),
    "a layer": ("peft", {"target_modules": ["q_proj"], "layers_to_transform": 0}, 1),
    "layers": (
        "peft",
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"},
        1,
    ),
    "keys": (".", {"lora_parameters": {"rank": RANK, "scale": 1, "keys": ["mlp.up_proj"]}}, 0),
    "the last layers": (".", {"num_layers": 1}, 0),
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_matrix_without_a_place_in_the_configuration_is_refused(qwen, copy: Path, kind: str):
    inside, values, layer = PLACES[kind]
    change(copy / inside, **values)
    name = f"model.layers.{layer}.self_attn.q_proj"
    name = f"base_model.model.{name}.lora_A.weight" if inside == "peft" else f"{name}.lora_a"
    keep_only(copy / inside, name)
    said = f"it holds {name}, which its adapter_config.json gives no place"
    check_refused(qwen[0], copy / inside, said)


def keep_only(folder: Path, name: str) -> None:
    names = {name, name.replace("lora_A", "lora_B").replace("lora_a", "lora_b")}
    change_weights(folder, lambda weights: {each: weights[each] for each in names})


@pytest.mark.parametrize(
    "values",
    [
        {"target_modules": [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)]},
        {"target_modules": r".*\.q_proj"},
        {"target_modules": r"(?!.*mlp).*\.(q|k)_proj", "exclude_modules": r".*\.k_proj"},
        {"target_modules": "all-linear"},
        {"alpha_pattern": {"nothing": 4, r"layers\.7\..*": 3}, "rank_pattern": {"lm_head": 2}},
        {"merge_weights": False, "fine_tune_type": "dora"},
        {"layers_to_transform": [1], "target_modules": ["self_attn.q_proj"]},
        {"layers_to_transform": []},
        {"exclude_modules": ["lm_head"]},
        *({"init_lora_weights": each} for each in (False, "gaussian", "eva", "orthogonal", "mica")),
        {"fan_in_fan_out": True, "lora_dropout": 0.5, "loftq_config": {"loftq_bits": 4}},
        {"a_key_of_tomorrow": None, "auto_mapping": {"parent_library": "x"}, "revision": "main"},
    ],
    ids=lambda each: " ".join(map(str, each.values()))[:20],
)
def test_what_changes_no_number_is_read(qwen, copy: Path, values: dict):
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    keep_only(copy / "peft", name)
    change(copy / "peft", **values)
    read = read_adapters(copy / "peft", Bundle(qwen[0]).architecture)
    assert read.matrices.keys() == {"model.layers.1.self_attn.q_proj"}
    expected = written(qwen[0], copy / "peft")
    keep_only(copy, "model.layers.1.self_attn.q_proj.lora_a")
    assert written(qwen[0], copy) == expected


def test_a_missing_alpha_is_pefts_default(qwen, copy: Path):
    path = copy / "peft" / config.CONFIG
    fields = json.loads(path.read_text())
    del fields["lora_alpha"]
    path.write_text(json.dumps(fields))
    assert read_adapters(copy / "peft", Bundle(qwen[0]).architecture).scale == 8 / RANK
    change(copy / "peft", lora_alpha=8)
    expected = written(qwen[0], copy / "peft")
    path.write_text(json.dumps(fields))
    assert written(qwen[0], copy / "peft") == expected


def test_all_keys_that_a_training_leaves_are_read(qwen, copy: Path):
    change(copy, **(CONFIG_DEFAULTS | {"lora_parameters": {"rank": RANK, "scale": SCALE}}))
    read = read_adapters(copy, Bundle(qwen[0]).architecture)
    assert read.scale == SCALE and read.matrices
    list(generate(qwen[0], [5, 6], max_tokens=1, adapters=weigh(copy)))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("inside", [".", "peft"])
def test_numbers_that_are_not_finite_are_refused(qwen, copy: Path, number: float, inside: str):
    (file,) = (copy / inside).glob("*.safetensors")
    weights = mx.load(str(file))
    name = min(name for name in weights if "lora_" in name)
    array = mx.array(weights[name])
    array[0, 0] = number
    change_weights(copy / inside, lambda weights: weights | {name: array})
    said = f"{name} has numbers that are not finite; train them again"
    check_refused(qwen[0], copy / inside, said)


@pytest.mark.parametrize("part", ["lora_magnitude_vector", "lora_B.bias", "lora_embedding_A"])
def test_a_tensor_that_nothing_uses_is_named(qwen, copy: Path, part: str):
    name = f"base_model.model.model.layers.0.self_attn.q_proj.{part}"
    change_weights(copy / "peft", lambda weights: weights | {name: mx.ones(3)})
    said = f"it holds {name}, which is not a LoRA matrix of one of this model's layers"
    check_refused(qwen[0], copy / "peft", said)


Q = "self_attn.q_proj"
MLX_Q, PEFT_Q = f"model.layers.1.{Q}", f"base_model.model.model.layers.1.{Q}"
VECTOR = f"{PEFT_Q}.lora_magnitude_vector"
DAMAGED_DORA = {
    "no m": (".", {f"{MLX_Q}.m": None}, f"{MLX_Q}.m is missing"),
    "no vector": ("peft", {VECTOR: None}, f"{VECTOR} is missing"),
    "m alone": (
        *("peft", {f"{PEFT_Q}.lora_A.weight": None, f"{PEFT_Q}.lora_B.weight": None}),
        f"{PEFT_Q}.lora_A.weight is missing",
    ),
    "a shorter m": (
        *(".", {f"{MLX_Q}.m": mx.ones(64)}),
        f"{MLX_Q}.m has the shape [64], where the model needs [128]",
    ),
    "a longer vector": (
        *("peft", {VECTOR: mx.ones((128, 1))}),
        f"{VECTOR} has the shape [128, 1], where the model needs [128]",
    ),
    "nan": (
        *(".", {f"{MLX_Q}.m": mx.array([float("nan")] * 128)}),
        f"{MLX_Q}.m has numbers that are not finite; train them again",
    ),
    "both names": (
        *("peft", {f"{VECTOR}.weight": mx.ones(128)}),
        f"it holds {VECTOR}, which is not a LoRA matrix of one of this model's layers",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED_DORA)
def test_magnitudes_that_do_not_fit_are_refused(qwen, tmp_path: Path, kind: str):
    inside, changed, said = DAMAGED_DORA[kind]
    folder = write_adapters(tmp_path / "dora", qwen[0], dora=True)
    write_peft(folder / "peft", qwen[0], folder)
    check_read(qwen[0], folder / inside)
    change_weights(
        folder / inside,
        lambda weights: {n: a for n, a in (weights | changed).items() if a is not None},
    )
    check_refused(qwen[0], folder / inside, said)


def check_read(bundle: Path, adapters: Path) -> None:
    assert read_adapters(adapters, Bundle(bundle).architecture).matrices
    assert list(generate(bundle, [5, 6], max_tokens=1, adapters=weigh(adapters)))


@pytest.mark.parametrize("form", [".", "peft"])
def test_dora_of_experts_is_refused(tmp_path: Path, form: str):
    bundle, adapters = with_adapters("lfm2_moe", tmp_path)
    dora = write_adapters(tmp_path / "dora", bundle, dora=True)
    write_peft(dora / "peft", bundle, dora)
    check_read(bundle, dora / form)
    (file,) = (adapters / form).glob("*.safetensors")
    experts = {
        name: array
        for name, array in mx.load(str(file)).items()
        if "expert" in name or "switch_mlp" in name
    }
    assert experts
    change_weights(dora / form, lambda weights: weights | experts)
    key = "target_parameters" if form == "peft" else "lora_parameters"
    change(dora / form, **{key: json.loads((adapters / form / config.CONFIG).read_text())[key]})
    check_refused(bundle, dora / form, f"they use DoRA for experts, {PLAIN}")


def test_adapters_in_pefts_form_are_the_same(family, tmp_path: Path):
    bundle, adapters = family
    arch = Bundle(bundle).architecture
    ours, theirs = (read_adapters(each, arch) for each in (adapters, adapters / "peft"))
    assert ours.scale == theirs.scale
    check_same(ours.matrices, theirs.matrices)
    options = ("--adapters", adapters / "peft", "--out", tmp_path / "fused", "--val-batches", 0)
    call("fuse", bundle, *options)


def test_the_text_of_several_modalities_may_have_been_trained_alone(tmp_path: Path):
    """AutoModelForCausalLM loads only the text model of Qwen3.5. The layer names of this text
    model do not contain `language_model`.
    """
    bundle, adapters = with_adapters("qwen3_5", tmp_path)
    weights = mx.load(str(adapters / "peft" / PEFT))
    there = "base_model.model.model.language_model.layers."
    assert all(name.startswith(there) for name in weights)
    change_weights(
        adapters / "peft",
        lambda weights: {name.replace(".language_model", ""): weights[name] for name in weights},
    )
    names = sorted({name.rpartition(".lora_")[0].rpartition(".")[2] for name in weights})
    change(adapters / "peft", target_modules=names)
    arch = Bundle(bundle).architecture
    ours, theirs = (read_adapters(each, arch) for each in (adapters, adapters / "peft"))
    assert ours.matrices.keys() == theirs.matrices.keys()
    assert written(bundle, adapters) == written(bundle, adapters / "peft")


@pytest.mark.parametrize("kept", ["gate_up_proj", "down_proj"])
def test_one_parameter_of_experts_may_have_adapters_alone(tmp_path: Path, kept: str):
    """If a single parameter of experts has adapters, PEFT's names do not contain `base_layer`."""
    bundle, adapters = with_adapters("lfm2_moe", tmp_path)
    inside = ".base_layer" if kept == "gate_up_proj" else ""
    place = f"feed_forward.experts{inside}.lora_"
    change_weights(
        adapters / "peft",
        lambda weights: {n.replace(".base_layer", ""): weights[n] for n in weights if place in n},
    )
    change(adapters / "peft", target_parameters=[f"experts.{kept}"])
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kept]
    arch = Bundle(bundle).architecture
    whole, read = (read_adapters(each, arch) for each in (adapters, adapters / "peft"))
    expected = {
        path: pair
        for path, pair in whole.matrices.items()
        if "switch_mlp" in path and path.endswith(parts)
    }
    check_same(read.matrices, expected)
    mlx = {
        f"{p}.lora_{x}": m for p, pair in expected.items() for x, m in zip("ab", pair, strict=True)
    }
    mx.save_safetensors(str(adapters / MLX), mlx)
    assert written(bundle, adapters) == written(bundle, adapters / "peft")
