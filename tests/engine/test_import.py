from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mesp
from helpers.commands import HANG, call, without_privileges
from helpers.damage import changed, damaged, texts
from helpers.exports import content
from helpers.mlx_models import (
    CONFIGS,
    add_terms,
    config_of,
    with_few_values,
    write_mlx_model,
    write_variation,
)
from helpers.models import FAMILIES, TEXT, published, random_tensors, write_model
from mesp.bundle.reader import Bundle
from mesp.engine.build import find_engine
from mesp.errors import MespError
from mesp.models import families
from mesp.runs.log import RunLog

pytestmark = pytest.mark.slow
SEEDS = 4
ENGINE = cache(find_engine)
# Each of these cases imports and exports a hostile folder, which takes longer than other cases.
FEWER_CASES = settings(max_examples=max(settings.default.max_examples // 4, 1))


class Done(NamedTuple):
    status: int
    records: list[dict[str, Any]]
    said: str

    @property
    def end(self) -> dict[str, Any]:
        assert (self.status, self.said) == (0, ""), self
        return self.records[-1]

    @property
    def sentence(self) -> str:
        assert self.status == 2 and self.said.count("\n") == 1, self
        return self.said.strip()


def run_import(
    model: Path, bundle: Path, environment: dict[str, object] | None = None, /, **given: Any
) -> Done:
    before = given.pop("preexec_fn", None)
    file = bundle.with_name(f"{bundle.name}.json")
    file.write_text(json.dumps({"model": str(model), "bundle": str(bundle), **given}))
    done = subprocess.run(
        [ENGINE(), "import", file],
        capture_output=True,
        text=True,
        timeout=HANG,
        preexec_fn=before,
        env=os.environ | {name: str(value) for name, value in (environment or {}).items()},
    )
    return Done(done.returncode, [*map(json.loads, done.stdout.splitlines())], done.stderr)


def partial(bundle: Path) -> Path:
    return bundle.with_name(f".importing-{bundle.name}")


def state(folder: Path) -> dict[str, tuple]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def weights(bundle: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(bundle).items() if name.endswith(".bin")}


def manifest_of(bundle: Path) -> dict[str, Any]:
    return json.loads((bundle / "manifest.json").read_text())


def write_config(model: Path, config: dict[str, Any]) -> None:
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))


def described(bundle: Path) -> dict[str, Any]:
    manifest = manifest_of(bundle)
    for key in ("seq_lens", "ranks", "files", "data", "source"):
        manifest.pop(key, None)
    for group in manifest["blocks"]:
        for kind in ("functions", "plain_functions", "packed_functions"):
            group.pop(kind, None)
    return manifest


def others(bundle: Path) -> dict[str, Any]:
    files = {
        file.name: file.read_bytes()
        for file in bundle.iterdir()
        if file.is_file() and file.suffix not in (".bin", ".mlxfn") and file.name != "manifest.json"
    }
    configs = ("config.json", "tokenizer_config.json", "generation_config.json")
    return {name: json.loads(data) if name in configs else data for name, data in files.items()}


def reason(sentence: str) -> str:
    not_valid = "The model's config.json is not valid ("
    if sentence.startswith(not_valid):
        return not_valid
    if sentence.startswith("The architecture "):
        return "".join(sentence.partition(" is not supported")[1:])
    return sentence if sentence.startswith("The model's config.json ") else ""


def compare(
    model: Path, folder: Path, *, in_the_same_words: bool = True, **options: str
) -> str | None:
    """Imports a model to ``imported.mesp``, exports it to ``exported.mesp``, and compares both.

    Either both accept the model, and the bundles are equal except for the parts that `described`
    leaves out. Or both refuse the model, and the import leaves nothing. With `in_the_same_words`,
    both give the same `reason`. Returns the import's refusal, or None.

    Only the import refuses a model that is not quantized. Only the exporter reports faults of a
    tokenizer, because an import copies it without reading it.
    """
    imported, exported = folder / "imported.mesp", folder / "exported.mesp"
    for bundle in (imported, exported, partial(imported)):
        shutil.rmtree(bundle, ignore_errors=True)
    before = state(model)
    done = run_import(model, imported, **options)
    assert state(model) == before
    if "is not quantized; take one of mlx-community" in done.said:
        return done.sentence
    # LongRoPE's frequencies depend on the longest length.
    longest = manifest_of(imported)["seq_lens"][-1] if done.status == 0 else 64
    refused = None
    try:
        mesp.export(model, exported, seq_len=longest, **options)
    except MespError as error:
        refused = error.message
    if refused is not None and refused.startswith("The tokenizer "):
        return None
    if done.status or refused is not None:
        assert refused is not None, f"only the import refuses: {done}"
        assert done.status, f"only the exporter refuses: {refused}"
        assert done.status == 2 and done.said
        if in_the_same_words:
            assert reason(done.sentence) == reason(refused)
        assert not imported.exists() and not partial(imported).exists()
        return done.said
    assert weights(imported) == weights(exported)
    assert described(imported) == described(exported)
    assert others(imported) == others(exported)
    Bundle(imported).verify()
    size = sum(map(len, weights(imported).values()))
    assert done.end["bytes"] == done.records[0]["bytes"] == size
    counts = [record["bytes"] for record in done.records if record["type"] == "progress"]
    assert counts == sorted(counts) and counts[-1] == done.end["bytes"]
    return None


def test_every_plain_family_has_a_checkpoint_here():
    plain = {name for name, family in families.FAMILIES.items() if family.is_plain}
    assert plain == {config["model_type"] for config in CONFIGS.values()}


@pytest.mark.parametrize("family", CONFIGS)
def test_an_import_is_the_export(family: str, tmp_path: Path):
    model = write_mlx_model(tmp_path / "model", CONFIGS[family])
    add_terms(model)
    assert compare(model, tmp_path) is None
    manifest = manifest_of(tmp_path / "imported.mesp")
    assert all(each["functions"] == each["plain_functions"] == {} for each in manifest["blocks"])
    longest = config_of(model).get("max_position_embeddings", 2048)
    assert manifest["seq_lens"] == [n for n in manifest["seq_lens"] if n <= longest]
    assert manifest["ranks"] == [4, 8, 16, 32, 64]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_variation_is_imported_as_exported(family: str, tmp_path: Path):
    accepted = 0
    for seed in range(SEEDS):
        model = write_variation(tmp_path / f"model-{seed}", family, seed)
        accepted += compare(model, tmp_path) is None
    assert accepted >= 2


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_model_of_few_bits_is_imported_as_exported(bits: int, group: int, tmp_path: Path):
    """Codes of 1 bit become codes of 2 bits, as a notice says."""
    config = CONFIGS["qwen3"] | {"tie_word_embeddings": False}
    tensors = with_few_values(random_tensors(config), bits, group)
    config["quantization"] = config["quantization_config"] = {"bits": bits, "group_size": group}
    model = write_model(tmp_path / "model", config, tensors)
    assert compare(model, tmp_path) is None
    bundle = tmp_path / "imported.mesp"
    written = json.loads((bundle / "config.json").read_text())
    of_2_bits = {"bits": 2, "group_size": group}
    assert written["quantization"] == written["quantization_config"] == of_2_bits
    done = run_import(model, tmp_path / "again.mesp")
    assert len(done.records[0]["notices"]) == (bits == 1)
    assert all("codes of 1 bit" in notice for notice in done.records[0]["notices"])


@pytest.mark.parametrize(
    ("family", "text", "others"),
    [
        ("gemma3", "language_model.model.", ("vision_tower", "multi_modal_projector")),
        ("smolvlm", "model.text_model.", ("model.vision_model", "model.connector")),
    ],
)
def test_what_an_import_says(family: str, text: str, others: tuple[str, ...], tmp_path: Path):
    def edit(tensors: dict) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", text, 1)] = tensors.pop(name)
        tensors |= {f"{name}.a.weight": mx.ones(4) for name in others}

    model = write_mlx_model(tmp_path / "model", CONFIGS[family], dtype="float16", edit=edit)
    name = {"id": "mlx-community/Tiny-4bit", "revision": "5f0b02c75b57c5855da9ae460ce51323ea669d8a"}
    done = run_import(model, tmp_path / "a.mesp", **name)
    kinds = [record["type"] for record in done.records]
    assert kinds[0] == "model" and kinds[-1] == "end" and set(kinds[1:-1]) == {"progress"}
    first = done.records[0]
    assert (first["name"], first["model_type"]) == ("Tiny-4bit", family)
    left_out, *of_images = first["notices"]
    assert left_out.startswith("2 tensors are left out")
    assert ["own vision tower" in each for each in of_images] == [True] * (family == "smolvlm")
    assert done.end["kept_bytes"] == 0 and done.end["seconds"] > 0
    assert 0 < done.end["footprint_peak_bytes"] < 50e6
    manifest = manifest_of(tmp_path / "a.mesp")
    assert manifest["name"] == "Tiny-4bit"
    assert manifest["model"] == {**name, "license": None}


@pytest.mark.parametrize(
    "card",
    [
        "---\nlicense: apache-2.0\n---\n",
        "---\nlicense: other\nlicense_name: 'a: b'\nlicense_link: LICENSE\n---\nlicense: mit\n",
        '---\nlicense: "gemma" # as Google has it\nlicense_name: a#b\n---\n',
        "---\nbase_model: x/y\nlicense:\n- mit\n- apache-2.0\n---\n",
        "---\nlicense: null\nlicense_name: 3\nlicense_link: ''\n---\n",
        "---\nlicense: 1.0\nlicense_name: yes\nlicense_link: 2024-01-02\n---\n",
        "---\nmodel-index:\n  license: mit\n  license_name: inner\nlicense: llama3.2\n---\n",
        "---\nlicense: mit\nlicense: bsd\n---\n",
        "---\nlicense: [broken\n---\n",
        "license: mit\n",
        "\n---\nlicense: mit\n---\n",
        "---\r\nlicense: mit\r\n---\r\n",
        "---\nlicense: a\x1bb\n---\n",
        "---\nlicense: Lizenz für alle\n---\n",
        "---\n",
        "",
    ],
)
def test_the_licence_is_the_card_s(card: str, tmp_path: Path):
    model = write_mlx_model(tmp_path / "model", CONFIGS["llama"] | {"num_hidden_layers": 1})
    (model / "README.md").write_bytes(card.encode())
    assert compare(model, tmp_path) is None


def test_the_terms_go_with_the_bundle(tmp_path: Path):
    model = write_mlx_model(tmp_path / "model", CONFIGS["llama"])
    terms = add_terms(model)
    assert compare(model, tmp_path) is None
    bundle = tmp_path / "imported.mesp"
    for name in terms:
        assert (bundle / name).read_bytes() == (model / name).read_bytes()
    assert not list(bundle.rglob("*.py"))
    assert manifest_of(bundle)["model"] == {
        "id": "model",
        "revision": None,
        "license": "other",
        "license_name": "a-licence",
        "license_link": "https://example.org/licence",
    }


def test_a_snapshot_in_the_cache_of_the_hub(tmp_path: Path):
    root = tmp_path / "models--owner--tiny"
    snapshot, blobs = root / "snapshots" / ("a" * 40), root / "blobs"
    source = write_mlx_model(tmp_path / "model", CONFIGS["qwen3"], shards=2)
    add_terms(source)
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert compare(snapshot, tmp_path) is None
    (tmp_path / "secret").write_text("{}")
    (snapshot / "LICENSE").unlink()
    (snapshot / "LICENSE").symlink_to(tmp_path / "secret")
    bundle = tmp_path / "imported.mesp"
    shutil.rmtree(bundle)
    assert "leads out of its folder" in run_import(snapshot, bundle).sentence
    assert not bundle.exists()


def test_ranks_end_at_the_largest_of_the_model_s_matrices(tmp_path: Path):
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    model = write_mlx_model(tmp_path / "model", CONFIGS["llama"] | sizes, group_size=32)
    assert run_import(model, tmp_path / "bundle").end
    assert manifest_of(tmp_path / "bundle")["ranks"] == [4, 8, 16, 32]
    assert Bundle(tmp_path / "bundle").architecture.largest_rank == 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mlx") / "model"
    config = CONFIGS["llama"] | {"tie_word_embeddings": False, "num_hidden_layers": 3}
    add_terms(write_mlx_model(folder, config, shards=3))
    return folder


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_training_is_that_of_the_exporter_s_bundle(family: str, tmp_path: Path):
    model = write_mlx_model(tmp_path / "model", CONFIGS[family])
    (tmp_path / "text.txt").write_text(TEXT * 4)
    losses, adapters = [], []
    for name in ("imported", "exported"):
        bundle, run = tmp_path / f"{name}.mesp", tmp_path / name
        if name == "imported":
            assert run_import(model, bundle).end
            manifest = manifest_of(bundle)
        else:
            lengths, ranks = manifest["seq_lens"], manifest["ranks"]
            mesp.export(model, bundle, seq_len=lengths, rank=ranks)
        call("data", bundle, "--data", tmp_path / "text.txt")
        options = ("--steps", 2, "--seq-len", 64, "--rank", 8, "--val-batches", 1)
        call("train", bundle, *options, "--out", run)
        losses.append(RunLog.load(run).losses)
        adapters.append((run / "adapters" / "adapters.safetensors").read_bytes())
    assert len(losses[0]) == 2 and losses[0] == losses[1]
    assert adapters[0] == adapters[1]


def test_a_bundle_is_checked_and_written_again_with_functions(model: Path, tmp_path: Path):
    bundle, again, exported = (tmp_path / f"{name}.mesp" for name in ("a", "b", "c"))
    assert run_import(model, bundle).end
    assert "none of" in call("check", bundle).stdout
    length = ("--seq-len", 64, "--rank", 8)
    call("export", "--from", bundle, "--out", again, *length)
    call("export", "--model", model, "--out", exported, *length)
    assert weights(again) == weights(exported)
    assert described(again) == described(exported)
    assert others(again) == others(exported)
    Bundle(again).verify()


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
def test_affine_arrays_of_another_mode_are_refused(mode: str, tmp_path: Path):
    bits = {"mxfp4": 4, "mxfp8": 8}[mode]
    model = write_mlx_model(tmp_path / "model", CONFIGS["llama"], bits=bits, group_size=32)
    config = config_of(model)
    for key in ("quantization", "quantization_config"):
        config[key] = {"bits": bits, "group_size": 32, "mode": mode}
    write_config(model, config)
    sentence = run_import(model, tmp_path / "a.mesp").sentence
    assert f"has biases in the files, but config.json gives it the mode {mode}" in sentence
    with pytest.raises(MespError, match=f"has biases in the files, .* the mode {mode}, which"):
        mesp.export(model, tmp_path / "b.mesp", seq_len=64)


@pytest.mark.parametrize(
    "family",
    [name for name in FAMILIES if not families.FAMILIES[FAMILIES[name]["model_type"]].is_plain],
)
def test_a_family_that_is_not_plain_is_refused_by_name(family: str, tmp_path: Path):
    model = tmp_path / "model"
    config, _ = published(FAMILIES[family], {})
    write_config(model, config)
    sentence = run_import(model, tmp_path / "a.mesp").sentence
    assert f"model is a {config['model_type']} model, which " in sentence
    assert sentence.endswith(f"mesp-export --model {model}")
    assert [each.name for each in tmp_path.glob("*.mesp")] == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "olmo2"}, "norm only the outputs"),
        ({"model_type": "prism_hadamard_qwen35"}, "that a Hadamard transform rotates"),
        ({"model_type": "bitnet"}, "its activation is a squared ReLU"),
        ({"model_type": "new", "num_experts": 4}, "its mixture of experts is of another kind"),
        ({"model_type": "new", "text_config": {}}, "it has several modalities"),
        ({"model_type": "new"}, "'new' is not supported"),
        ({}, "supported are qwen2, "),
        ({"model_type": None}, "supported are qwen2, "),
    ],
)
def test_an_unknown_family_is_refused_as_the_exporter_does(config: dict, said: str, tmp_path: Path):
    model = tmp_path / "model"
    write_config(model, config)
    (model / "model.safetensors").touch()
    assert said in (compare(model, tmp_path) or "")


def test_a_model_that_is_not_quantized_is_refused(tmp_path: Path):
    model = write_model(tmp_path / "model", FAMILIES["qwen3"])
    sentence = run_import(model, tmp_path / "a.mesp").sentence
    assert "is not quantized" in sentence and f"mesp-export --model {model}" in sentence


def by(method: object) -> Callable[[dict], None]:
    return lambda config: config.update(quantization_config=method)


def beside(**more: object) -> Callable[[dict], None]:
    return lambda config: config["quantization"].update(more)


def of_the_text_alone(config: dict[str, Any]) -> None:
    """mlx-lm ignores such settings."""
    config["text_config"]["quantization"] = config.pop("quantization")
    config.pop("quantization_config", None)


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("llama", by({"quant_method": "gptq"}), "is quantized by gptq, which is not supported"),
        ("llama", by({"quant_method": "mxfp4", "group_size": 32}), "is quantized by mxfp4"),
        ("llama", by("gptq"), "its quantization_config cannot be used"),
        ("llama", by({"quant_method": "bitnet"}), "whose activations are not rounded here"),
        ("llama", by({"rotation": {"r1": True}}), '_config\'s rotation to {"r1": true}'),
        ("llama", by({"lm_head": {"bits": 2, "hadamard": 128}}), "'s hadamard of lm_head to 128"),
        ("llama", beside(rotation=True), "quantization's rotation to true"),
        ("llama", beside(global_scale=True, a=None), "quantization's global_scale to true"),
        (
            "llama", beside(**{"model.layers.0.mlp.up_proj": {"bits": 4, "signs": [1]}}),
            "signs of model.layers.0.mlp",
        ),
        ("llama", beside(**{"vision_tower.a": False}, rotation=None, lm_head=True), ""),
        ("gemma3", of_the_text_alone, "sets quantization to {"),
    ],
)  # fmt: skip
def test_another_quantization_is_refused_as_the_exporter_does(
    family: str, change: Callable[[dict], None], said: str, tmp_path: Path
):
    model = write_mlx_model(tmp_path / "model", CONFIGS[family])
    config = config_of(model)
    change(config)
    write_config(model, config)
    found = compare(model, tmp_path)
    assert said in (found or "") and bool(said) == bool(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("no folder", "is not a Hugging Face model"),
        ("no config", "is not a Hugging Face model"),
        ("no weights", "holds no weights"),
        ("no shard", "which is not in the folder; add that file"),
        ("no tensors", "lack model."),
        ("a shard twice", "twice"),
        ("a pipe", "cannot be read"),
        ("a pipe as config", "cannot be read as a JSON object"),
        ("a broken tokenizer_config", "cannot be read as a JSON object"),
        ("a link as licence", "leads out of its folder"),
    ],
)
def test_what_is_missing_is_named(change: str, said: str, model: Path, tmp_path: Path):
    copy = shutil.copytree(model, tmp_path / "copy")
    shards = sorted(copy.glob("*.safetensors"))
    index = copy / "model.safetensors.index.json"
    match change:
        case "no folder":
            copy = tmp_path / "nowhere"
        case "no config":
            (copy / "config.json").unlink()
        case "no weights":
            for file in (*shards, index):
                file.unlink()
        case "no shard":
            shards[1].unlink()
        case "no tensors":
            shards[1].unlink()
            index.unlink()
        case "a shard twice":
            shutil.copy(shards[0], copy / "model-again.safetensors")
            index.unlink()
        case "a pipe":
            shards[1].unlink()
            os.mkfifo(shards[1])
        case "a pipe as config":
            (copy / "config.json").unlink()
            os.mkfifo(copy / "config.json")
        case "a broken tokenizer_config":
            (copy / "tokenizer_config.json").write_text("{")
        case "a link as licence":
            (copy / "LICENSE").unlink()
            (copy / "LICENSE").symlink_to(model / "LICENSE")
    assert said in run_import(copy, tmp_path / "a.mesp").sentence
    assert not list(tmp_path.glob("*.mesp")) and not list(tmp_path.glob(".importing*"))


def test_a_bundle_that_is_there_stays(model: Path, tmp_path: Path):
    bundle = tmp_path / "a.mesp"
    assert run_import(model, bundle).end
    before = state(bundle)
    assert "already" in run_import(model, bundle).sentence
    assert state(bundle) == before


@pytest.mark.parametrize("given", [{"id": 3}, {"model": None}, {"bundle": None}])
def test_settings_that_cannot_be_used_are_refused(given: dict, model: Path, tmp_path: Path):
    assert run_import(model, tmp_path / "a.mesp", **given).sentence
    assert not list(tmp_path.glob("*.mesp"))


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("victims")
    small = {"num_hidden_layers": 1, "vocab_size": 260}
    names = ("llama", "qwen3", "gemma3", "mistral3", "phi3")
    return {
        name: write_mlx_model(folder / name, CONFIGS[name] | small, bits=3, shards=2)
        for name in names
    }


def no_number(text: bytes) -> bool:
    return any(word in text for word in (b"NaN", b"Infinity"))


def compare_changed(model: Path, name: str, content: bytes, folder: Path) -> None:
    file = model / name
    before = file.read_bytes()
    try:
        file.write_bytes(content)
        compare(model, folder, in_the_same_words=False)
    finally:
        file.write_bytes(before)


KEYS = (
    *("attention_bias", "hidden_act", "hidden_size", "intermediate_size", "layer_types"),
    *("max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads"),
    *("num_hidden_layers", "num_key_value_heads", "partial_rotary_factor", "quantization_config"),
    *("query_pre_attn_scalar", "rms_norm_eps", "rope_parameters"),
    *("rope_scaling", "rope_theta", "sliding_window", "tie_word_embeddings", "vocab_size"),
    *("head_dim", "use_sliding_window", "final_logit_softcapping", "rope_local_base_freq"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3.0, 0.5, 1 << 40, 1e300, "x", "32", [], [1], {}, {"a": 1}),
    *({"rope_type": "default"}, {"rope_type": "ntk"}, {"rope_type": "linear", "a": 2}),
    *(["full_attention"], ["sliding_attention"], ["conv"], ["full_attention"] * 2),
)


@pytest.mark.parametrize("key", KEYS)
def test_one_value_is_refused_in_the_same_words(key: str, victims: dict[str, Path], tmp_path: Path):
    refused = 0
    for number, (family, value) in enumerate(product(victims, (..., *VALUES))):
        if (number + KEYS.index(key)) % 11:
            continue
        model = shutil.copytree(victims[family], tmp_path / str(number))
        config = config_of(model)
        text = config.get("text_config", config)
        text[key] = value
        if value is ...:
            del text[key]
        write_config(model, config)
        refused += compare(model, tmp_path) is not None
    assert refused


@FEWER_CASES
@given(data=st.data())
def test_configs_are_refused_alike(victims: dict[str, Path], tmp_path: Path, data: st.DataObject):
    model = data.draw(st.sampled_from(sorted(victims)).map(victims.get))
    text = data.draw(texts((model / "config.json").read_bytes()).filter(lambda t: not no_number(t)))
    compare_changed(model, "config.json", text, tmp_path)


@FEWER_CASES
@given(data=st.data())
def test_headers_of_weights_are_refused_alike(
    victims: dict[str, Path], tmp_path: Path, data: st.DataObject
):
    model = data.draw(st.sampled_from(sorted(victims)).map(victims.get))
    (file, *_) = sorted(model.glob("*.safetensors"))
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(data.draw(changed(json.loads(content[8:start])))).encode()
    relabelled = struct.pack("<Q", len(header)) + header + content[start:]
    compare_changed(model, file.name, data.draw(st.just(relabelled) | damaged(content)), tmp_path)


@FEWER_CASES
@given(data=st.data())
def test_indices_and_other_files_are_refused_alike(
    victims: dict[str, Path], tmp_path: Path, data: st.DataObject
):
    model = data.draw(st.sampled_from(sorted(victims)).map(victims.get))
    name = data.draw(st.sampled_from(["model.safetensors.index.json", "tokenizer_config.json"]))
    compare_changed(model, name, data.draw(texts((model / name).read_bytes())), tmp_path)


def whole_files(folder: Path) -> dict[tuple, int]:
    found = [(file.name, file.stat()) for file in folder.rglob("*.bin")]
    return {(name, each.st_ino, each.st_mtime_ns): each.st_size for name, each in found}


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bundle = tmp_path_factory.mktemp("whole") / "whole.mesp"
    assert run_import(model, bundle).end
    return bundle


@pytest.fixture(scope="module")
def calls(model: Path, faults: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    folder = tmp_path_factory.mktemp("calls")
    count = folder / "count"
    under = {"LD_PRELOAD": faults, "FAULTS_UNDER": folder, "FAULTS_COUNT": count}
    assert run_import(model, folder / "a.mesp", under).end
    return int(count.read_text())


@pytest.fixture
def interrupt(faults: Path, calls: int, tmp_path: Path) -> Callable[[Path], Path]:
    """Imports half of a model."""

    def interrupted(model: Path) -> Path:
        bundle = tmp_path / "a.mesp"
        under = {"LD_PRELOAD": faults, "FAULTS_UNDER": tmp_path}
        failing = {"FAULTS_KIND": "crash", "FAULTS_AT": calls // 2}
        assert run_import(model, bundle, under | failing).status == -signal.SIGKILL
        return bundle

    return interrupted


@pytest.mark.parametrize("kind", ["crash", "power", "interrupt", "full"])
def test_an_import_goes_on_where_it_was_interrupted(
    kind: str, model: Path, whole: Path, faults: Path, calls: int, tmp_path: Path
):
    before = state(model)
    some = 0
    for number in range(1 + ("crash", "power", "interrupt", "full").index(kind), calls + 1, 6):
        bundle = tmp_path / f"{number}" / "a.mesp"
        bundle.parent.mkdir()
        under = {"LD_PRELOAD": faults, "FAULTS_UNDER": bundle.parent}
        failing = {"FAULTS_KIND": kind, "FAULTS_AT": number}
        done = run_import(model, bundle, under | failing)
        if kind in ("crash", "power"):
            assert done.status == -signal.SIGKILL
        elif done.status:
            said = {"full": "space", "interrupt": "was stopped"}[kind]
            assert said in done.sentence
        if not bundle.exists():
            left = whole_files(partial(bundle))
            again = run_import(model, bundle).end
            kept = whole_files(bundle)
            kept = {file: kept[file] for file in left.keys() & kept.keys()}
            assert again["kept_bytes"] == sum(kept.values()), number
            assert len(kept) >= len(left) - 1, number
            some += len(kept)
        assert content(bundle) == content(whole), number
        assert [each.name for each in bundle.parent.iterdir()] in (
            [["a.mesp", "a.mesp.json"], ["a.mesp.json", "a.mesp"]]
        )
        shutil.rmtree(bundle.parent)
    assert some > 0
    assert state(model) == before


@pytest.mark.parametrize("change", ["time", "weights", "config", "id"])
def test_an_import_of_another_source_keeps_only_files_that_are_the_same(
    change: str, model: Path, interrupt: Callable[[Path], Path], tmp_path: Path
):
    copy, given = shutil.copytree(model, tmp_path / "model"), {}
    bundle = interrupt(copy)
    assert whole_files(partial(bundle))
    shard = sorted(copy.glob("*.safetensors"))[0]
    match change:
        case "time":
            os.utime(shard)
        case "weights":
            data = bytearray(shard.read_bytes())
            data[-1] ^= 1
            shard.write_bytes(data)
        case "config":
            write_config(copy, config_of(copy) | {"rms_norm_eps": 1e-4})
        case _:
            given |= {"id": "owner/other"}
    kept = run_import(copy, bundle, **given).end["kept_bytes"]
    fresh = tmp_path / "fresh.mesp"
    whole = run_import(copy, fresh, **given).end
    every = sum(map(len, weights(fresh).values()))
    assert whole and 0 < kept <= every and (kept < every) == (change == "weights")
    assert content(bundle) == content(fresh)


def test_a_kept_file_that_is_shorter_is_found(model: Path, interrupt: Callable[[Path], Path]):
    bundle = interrupt(model)
    first, *others = sorted(partial(bundle).rglob("*.bin"))
    os.truncate(first, 100)
    size = sum(file.stat().st_size for file in others)
    assert run_import(model, bundle).end["kept_bytes"] <= size
    Bundle(bundle).verify()


@pytest.mark.parametrize("what", ["a byte", "all weights", "a whole bundle"])
def test_what_is_kept_is_what_would_be_written(
    what: str, model: Path, whole: Path, interrupt: Callable[[Path], Path]
):
    bundle = interrupt(model)
    if what == "a whole bundle":
        for file in whole.rglob("*"):
            if file.is_file():
                shutil.copy(file, partial(bundle) / file.relative_to(whole))
    for file in partial(bundle).rglob("*.bin"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data if what == "a byte" else bytes(len(data)))
    assert run_import(model, bundle).end["kept_bytes"] == 0
    assert content(bundle) == content(whole)


@pytest.mark.parametrize("place", [".", "blocks", ".lock", "manifest.json.partial", "config.json"])
@pytest.mark.parametrize("kind", ["symbolic", "hard"])
def test_an_import_writes_through_no_link(
    place: str, kind: str, model: Path, whole: Path, tmp_path: Path
):
    victim, bundle = tmp_path / "victim", tmp_path / "a.mesp"
    victim.mkdir()
    (victim / "embedding.bin").write_text("private")
    link = partial(bundle) / place
    if place != ".":
        partial(bundle).mkdir()
    if kind == "symbolic":
        link.symlink_to(victim if place in (".", "blocks") else victim / "embedding.bin")
    elif place in (".", "blocks"):
        return  # folders have no hard links
    else:
        os.link(victim / "embedding.bin", link)
    done = run_import(model, bundle)
    assert (victim / "embedding.bin").read_text() == "private"
    assert [file.name for file in victim.iterdir()] == ["embedding.bin"]
    if done.status:
        assert str(partial(bundle)) in done.sentence or str(bundle) in done.sentence
    else:
        assert not bundle.is_symlink() and content(bundle) == content(whole)


def test_a_terms_file_has_a_bound(model: Path, tmp_path: Path):
    copy = shutil.copytree(model, tmp_path / "model")
    (copy / "LICENSE").touch()
    os.truncate(copy / "LICENSE", (4 << 20) + 1)
    assert compare(copy, tmp_path)
    os.truncate(copy / "LICENSE", 3 << 30)
    done = run_import(copy, tmp_path / "a.mesp")
    assert done.sentence == f"{copy / 'LICENSE'} has more than 4 MiB; take a smaller one."
    with pytest.raises(MespError, match="has more than 4 MiB"):
        mesp.export(copy, tmp_path / "b.mesp")


def test_the_files_of_terms_have_a_bound(model: Path, tmp_path: Path):
    copy = shutil.copytree(model, tmp_path / "model")
    for number in range(65):
        (copy / f"LICENSE{number}").touch()
    assert "has more than 64 files" in compare(copy, tmp_path)


@pytest.mark.parametrize("name", ["a\tb", "a\x1b]0;b", "a\u202eb", "a\u2028b", "\ud7fb"])
def test_a_name_that_cannot_be_shown_is_refused(name: str, model: Path, tmp_path: Path):
    copy = shutil.copytree(model, tmp_path / name)
    (copy / "LICENSE\u202e").touch()
    refused = compare(copy, tmp_path)
    assert (refused is None) == name.isprintable()
    if refused is None:
        assert not (tmp_path / "imported.mesp" / "LICENSE\u202e").exists()


@pytest.mark.parametrize("name", ["config.json", "README.md", "model.safetensors"])
def test_a_link_in_a_model_stays_in_its_folder(name: str, model: Path, tmp_path: Path):
    copy = shutil.copytree(model, tmp_path / "model")
    (copy / "README.md").write_text("---\nlicense: mit\n---\n")
    name = name if (copy / name).exists() else sorted(copy.glob("*.safetensors"))[0].name
    (copy / name).rename(tmp_path / name)
    (copy / name).symlink_to(tmp_path / name)
    done = run_import(copy, tmp_path / "a.mesp")
    said = f"{copy / name} is a link that leads out of its folder; put the file there."
    assert done.sentence == said
    assert not partial(tmp_path / "a.mesp").exists()


EXTREMES = (
    *("1e999", "-1e999", "1e308", "1e300", "1e-300", "5e-324", "1e19", "9.3e18", "9.2e18"),
    *("1.1754943508222875e-38", "1.17e-38", "16777217", "4096", "4097", "1048576", "1048577"),
    *("2147483648", "9223372036854775807", "-0.0", "[" * 63 + "]" * 63, "[" * 90 + "]" * 90),
    *('{"a": 1e999}', '"\\u202e"'),
)
MORE_KEYS = (
    *("unread", "num_experts", "logits_scaling", "embedding_multiplier", "attention_multiplier"),
    *("residual_multiplier",),
    *("attn_logit_softcapping", "rope_scaling.factor", "rope_scaling.beta_fast"),
    *("rope_scaling.attention_factor", "rope_scaling.mscale", "rope_scaling.mscale_all_dim"),
    *("rope_scaling.original_max_position_embeddings", "rope_scaling.unread"),
)


@pytest.mark.parametrize("key", sorted({*KEYS, *MORE_KEYS}))
def test_an_extreme_value_is_refused_alike(key: str, victims: dict[str, Path], tmp_path: Path):
    for number, (family, value) in enumerate(product(victims, EXTREMES)):
        if (number + len(key)) % 5:
            continue
        model = shutil.copytree(victims[family], tmp_path / str(number))
        config = config_of(model)
        text = config.get("text_config", config)
        outer, _, inner = key.partition(".")
        text[outer] = "VALUE" if not inner else {"rope_type": "yarn", "factor": 4.0, inner: "VALUE"}
        (model / "config.json").write_text(json.dumps(config).replace('"VALUE"', value))
        compare(model, tmp_path, in_the_same_words=False)
        for file in (tmp_path / "imported.mesp").glob("*.json"):
            json.loads(file.read_text(), parse_constant=pytest.fail)
        shutil.rmtree(model)


@pytest.mark.parametrize("limit", [100, 4_000, 40_000])
def test_a_file_for_which_there_is_no_room(limit: int, model: Path, whole: Path, tmp_path: Path):
    bundle = tmp_path / "a.mesp"

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    sentence = run_import(model, bundle, preexec_fn=limited).sentence
    assert sentence.startswith(f"Cannot write {bundle}")
    assert not bundle.exists()
    assert run_import(model, bundle).end
    assert content(bundle) == content(whole)


def test_a_disk_is_asked_first(model: Path, faults: Path, whole: Path, tmp_path: Path):
    bundle = tmp_path / "a.mesp"
    under = {"LD_PRELOAD": faults, "FAULTS_UNDER": tmp_path}
    size = sum(map(len, weights(whole).values()))
    done = run_import(model, bundle, under | {"FAULTS_FREE": size // 2})
    found = re.fullmatch(r".* takes ([0-9.]+) MB, and .* has ([0-9.]+) MB free; .*", done.sentence)
    assert float(found[1]) > float(found[2])
    assert not partial(bundle).exists()
    assert run_import(model, bundle, under | {"FAULTS_FREE": size + 4096}).end


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="there are no rights")
def test_a_folder_that_is_read_only_is_one_sentence(model: Path, tmp_path: Path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    given = {"bundle": str(closed / "a.mesp"), "preexec_fn": without_privileges}
    assert str(closed) in run_import(model, tmp_path / "a.mesp", **given).sentence
    assert not list(closed.iterdir())


def test_a_model_that_is_read_only_is_imported(model: Path, whole: Path, tmp_path: Path):
    copy = shutil.copytree(model, tmp_path / "model")
    for path in (copy, *copy.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert run_import(copy, tmp_path / "a.mesp", preexec_fn=without_privileges).end
    assert weights(tmp_path / "a.mesp") == weights(whole)
    copy.chmod(0o755)
