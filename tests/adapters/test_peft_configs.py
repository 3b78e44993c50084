"""Tests with random LoraConfigs of the PEFT library (`make test-slow`).

The trainer and `mesp fuse` must find PEFT's probabilities, or refuse the folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

pytestmark = pytest.mark.peft
pytest.importorskip("peft", reason="`make test-slow` installs peft")

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import ArrowConfig, BdLoraConfig, KasaConfig, VeloraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.commands import call
from helpers.models import FAMILIES, TEXT, write_model
from mesp.adapters.config import CONFIG, FIELDS, check_fields
from mesp.adapters.load import apply_adapters, read_adapters, stack_adapters
from mesp.adapters.weighted import weigh
from mesp.bundle.reader import Bundle
from mesp.engine.process import evaluator
from mesp.errors import MespError

CASES = int(os.environ.get("MESP_FUZZ_CASES", 200))  # for each model
# MeSP and PEFT compute in float32; with an unchanged LoraConfig they differ by 1e-6.
TOLERANCE = 1e-4
TOKENS = [5, 6, 7, 8, 9, 10, 11, 12]
MODELS = ["qwen2", "granitemoehybrid", "qwen3_moe"]
TARGETS = {
    "qwen2": ["q_proj", "k_proj", "o_proj", "self_attn.v_proj", "up_proj", "mlp.down_proj"],
    "granitemoehybrid": ["q_proj", "v_proj", "shared_mlp.input_linear", "output_linear"],
    "qwen3_moe": ["q_proj", "k_proj", "o_proj"],
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
WEIGHTS = "adapter_model.safetensors"

# PEFT refuses some combinations of them.
VALUES: dict[str, list[Any]] = {
    "alora_invocation_tokens": [[6, 7], [300, 301]],
    "alpha_pattern": [{"q_proj": 3}, {".*q_proj": 9}, {}, {"shared_mlp.input_linear": 8}],
    "arrow_config": [ArrowConfig(top_k=1)],
    "auto_mapping": [{"parent_library": "transformers"}],
    "bias": ["none", "all", "lora_only"],
    "corda_config": [None, {"corda_method": "kpm"}],
    "ensure_weight_tying": [True, False],
    "eva_config": [None, {"rho": 1.5}],
    "exclude_modules": [["q_proj"], ["layers.0.self_attn.q_proj"], r".*\.1\..*", [], ["lm_head"]],
    "fan_in_fan_out": [True, False],
    "inference_mode": [True, False],
    "init_lora_weights": [
        *(True, False, "gaussian", "olora", "pissa", "pissa_niter_2", "orthogonal", "mica")
    ],
    "kasa_config": [KasaConfig()],
    "layer_replication": [[[0, 1], [0, 2]], []],
    "layers_pattern": ["layers", ["layers"]],
    "layers_to_transform": [0, [1], [0, 1], []],
    "loftq_config": [{}, {"loftq_bits": 4}],
    "lora_bias": [True, False],
    "lora_dropout": [0.0, 0.3],
    "lora_ga_config": [None],
    "megatron_core": ["megatron.core", None],
    "modules_to_save": [["lm_head"], ["norm"], [], None],
    "qalora_group_size": [8],
    "rank_pattern": [{"q_proj": 3}, {".*q_proj": 1}, {}, {"shared_mlp.input_linear": 8}],
    "revision": ["main"],
    "target_parameters": [EXPERTS, EXPERTS[:1], EXPERTS[1:], ["experts.gate_up_proj"], []],
    "task_type": ["CAUSAL_LM", None, "FEATURE_EXTRACTION"],
    "trainable_token_indices": [[1, 6], {"embed_tokens": [7]}],
    "use_bdlora": [BdLoraConfig(target_modules_bd_a=["q_proj"], nblocks=2, match_strict=False)],
    "use_dora": [True, False],
    "use_qalora": [True, False],
    "use_rslora": [True, False],
    "velora_config": [VeloraConfig()],
}
# Changes to a saved adapter_config.json, as other programs or people make them.
EDITS: dict[str, list[Any]] = {
    "a_key_of_tomorrow": [None, True, {}],
    "exclude_modules": [["q_proj"], ["down_proj", "input_linear"]],
    "init_lora_weights": ["corda", "eva", "lora_ga", "loftq", None],
    "layers_to_transform": [0, [1]],
    "lora_alpha": [1, 7.5, 0, -3],
    "megatron_config": [{"hidden_size": 64}],
    "monteclora_config": [{"num_samples": 4}],
    "r": [1, 5],
    "runtime_config": [{"ephemeral_gpu_offload": True}],
    "target_modules": [["q_proj"], ["k_proj", "o_proj"], "all-linear", None],
    "target_parameters": [EXPERTS[1:], None],
    "use_rslora": [True],
}


def some(values: dict[str, list[Any]], most: int) -> st.SearchStrategy[dict[str, Any]]:
    names = st.lists(st.sampled_from(sorted(values)), max_size=most, unique=True)
    return names.flatmap(
        lambda each: st.fixed_dictionaries({name: st.sampled_from(values[name]) for name in each})
    )


def targets(model: str) -> st.SearchStrategy[Any]:
    names = TARGETS[model]
    whole = [f"model.layers.{i}.self_attn.{each}" for i in (0, 1) for each in ("q_proj", "k_proj")]
    some_names = st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True)
    others = [r".*\.(q_proj|v_proj)", r"model\.layers\.1\..*_proj", "all-linear", whole]
    others += [["q_proj", "lm_head"], ["embed_tokens", "k_proj"]]
    return some_names | some_names | some_names | st.sampled_from(others)


@pytest.fixture(scope="module", params=MODELS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, torch.nn.Module]:
    name, place = request.param, tmp_path_factory.mktemp(request.param)
    config = {k: v for k, v in FAMILIES[name].items() if k != "head_dim" or name == "qwen3_moe"}
    config |= {"mlp_only_layers": []} if name == "qwen3_moe" else {}
    folder = write_model(place / "model", config)
    (place / "text.txt").write_text(TEXT * 5)
    bundle = place / "b.mesp"
    call(
        *("export", "--model", folder, "--data", place / "text.txt", "--out", bundle),
        *("--seq-len", 16, "--bits", 8, "--head-bits", 8, "--quantize", "nearest"),
    )
    opened = Bundle(bundle)
    arch = opened.architecture
    tensors = dict(tree_flatten(dequantize_model(opened.to_mlx_lm()).parameters()))
    for theirs, parts in arch.hf_modules:
        for layer in (f"model.layers.{i}." for i in range(arch.num_hidden_layers)):
            held = [tensors.pop(f"{layer}{part}.weight", None) for part in parts]
            if held[0] is not None:
                suffix = "" if held[0].ndim == 3 else ".weight"
                tensors[f"{layer}{theirs}{suffix}"] = mx.concatenate(held, axis=-2)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().eval()
    arrays = {
        name: torch.from_numpy(np.array(array.astype(mx.float32)))
        for name, array in tensors.items()
    }
    missing, more = model.load_state_dict(arrays, strict=False)
    assert not more and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return name, bundle, model


def test_the_table_has_every_field_of_lora_config(tmp_path: Path):
    peft = FIELDS["peft"]
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert {*peft["used"], *peft["ignored"], *peft["required"]} == fields
    LoraConfig(target_modules=["q_proj"]).save_pretrained(tmp_path)
    check_fields(json.loads((tmp_path / CONFIG).read_text()), peft)
    tried = {"r", "lora_alpha", "target_modules", "peft_type", "base_model_name_or_path"}
    assert fields - {"peft_version"} <= tried | VALUES.keys() | EDITS.keys()


def probabilities(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS])).logits[0]
    return torch.log_softmax(logits.float(), -1).numpy()


def of_the_trainer(bundle: Path, folder: Path, vocabulary: int) -> np.ndarray:
    with evaluator(bundle, weigh(folder)) as engine:
        scores = engine.choices(TOKENS, [[token] for token in range(vocabulary)])
    return np.array([score.log_likelihood for score in scores])


def of_the_fusion(bundle: Path, folder: Path) -> np.ndarray:
    opened = Bundle(bundle)
    model = opened.to_mlx_lm()
    model.set_dtype(mx.float32)
    read = read_adapters(folder, opened.architecture)
    apply_adapters(model, stack_adapters([(read, 1.0)], model))
    return of_mlx(model)


def of_mlx(model: Any) -> np.ndarray:
    logits = model(mx.array([TOKENS]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def saved_by_peft(base: torch.nn.Module, folder: Path, fields: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    adapted = get_peft_model(deepcopy(base), LoraConfig(**deepcopy(fields)))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name or parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    adapted.save_pretrained(folder)


def edit(folder: Path, edits: dict[str, Any], tensor: str) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | edits))
    weights = load_file(folder / WEIGHTS)
    name = sorted(weights)[0]
    if tensor == "more":
        weights[name.rpartition(".lora_")[0] + ".lora_magnitude_vector"] = torch.ones(4)
    elif tensor == "fewer":
        del weights[name]
    elif tensor == "nan":
        weights[name].flatten()[0] = torch.nan
    elif tensor == "half":
        weights = {name: array.half() for name, array in weights.items()}
    if tensor != "as it is":
        save_file(weights, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_mesp_fuse_merges_as_peft_does(
    made: tuple[str, Path, torch.nn.Module], tmp_path: Path, dora: bool
):
    name, bundle, base = made
    fields = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": TARGETS[name]}
    fields |= {"target_parameters": EXPERTS} if name == "qwen3_moe" and not dora else {}
    fields |= {"use_dora": dora}
    saved_by_peft(base, tmp_path / "peft", fields, 0)
    done = call(
        *("fuse", bundle, "--adapters", tmp_path / "peft", "--out", tmp_path / "fused"),
        *("--bits", "bfloat16", "--val-batches", 0),
    )
    assert done.returncode == 0
    model, _ = mlx_lm.load(str(tmp_path / "fused"))
    model.set_dtype(mx.float32)
    adapted = PeftModel.from_pretrained(deepcopy(base), tmp_path / "peft").eval()
    expected = probabilities(adapted.merge_and_unload())
    assert error(of_mlx(model), expected) < 0.005
    assert error(probabilities(base), expected) > 0.1


@pytest.fixture(scope="module")
def figures() -> Iterator[Counter]:
    counts: Counter = Counter()
    yield counts
    print(f"\nLoraConfigs: {dict(counts)}; wrong 0 unless a test failed")


def test_adapters_of_any_lora_config_give_pefts_numbers_or_are_refused(
    made: tuple[str, Path, torch.nn.Module], tmp_path: Path, figures: Counter
):
    name, bundle, base = made
    plain, vocabulary = probabilities(base), base.config.vocab_size

    @settings(
        max_examples=CASES,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        rank=st.integers(1, 6),
        alpha=st.sampled_from([1, 2, 8, 12.5]),
        modules=targets(name),
        fields=some(VALUES, 3),
        edits=st.just({}) | st.just({}) | some(EDITS, 2),
        tensor=st.sampled_from(["as it is"] * 8 + ["more", "fewer", "nan", "half"]),
        seed=st.integers(0, 3),
    )
    def case(
        rank: int,
        alpha: float,
        modules: Any,
        fields: dict[str, Any],
        edits: dict[str, Any],
        tensor: str,
        seed: int,
    ) -> None:
        folder = tmp_path / "peft"
        shutil.rmtree(folder, ignore_errors=True)
        figures["tried"] += 1
        fields = {"task_type": "CAUSAL_LM"} | fields
        fields |= {"r": rank, "lora_alpha": alpha, "target_modules": modules}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                saved_by_peft(base, folder, fields, seed)
                edit(folder, edits, tensor)
            except Exception:  # any error means that PEFT does not have such adapters
                figures["PEFT saves none"] += 1
                return
            found: list[Any] = []
            for read in (
                lambda: of_the_fusion(bundle, folder),
                lambda: of_the_trainer(bundle, folder, vocabulary),
            ):
                try:
                    found.append(read())
                except MespError as said:
                    found.append(str(said))
            fused, trained = found
            if isinstance(fused, str):
                assert isinstance(trained, str), fused
                figures["refused"] += 1
                return
            assert not isinstance(trained, str), trained
            assert error(trained, fused[-1]) < TOLERANCE, "both readers find the same"
            try:
                adapted = PeftModel.from_pretrained(deepcopy(base), folder).eval()
                expected = probabilities(adapted)
            except Exception:
                figures["PEFT reads none"] += 1
                return
            assert error(fused, expected) < TOLERANCE
            figures["equal"] += 1
            figures["equal, and the adapters count"] += error(plain, expected) > 100 * TOLERANCE

    case()
