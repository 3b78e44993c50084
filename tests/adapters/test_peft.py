"""Many tests dequantize the demo model into a Qwen2ForCausalLM. The engine and PEFT must find the
same held-out loss, both with the engine's adapters and with PEFT's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

pytestmark = pytest.mark.peft
pytest.importorskip("peft", reason="`make test-slow` installs peft")

import torch
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from bench import main as bench
from helpers.commands import call, invoke
from helpers.models import FAMILIES, TEXT, published, write_model
from mesp import reference
from mesp.bundle.reader import Bundle
from mesp.engine.build import find_engine
from mesp.models.tensor_names import CONVOLUTIONS
from mesp.runs.log import RunLog
from studies.in_peft.inputs import first_adapters
from studies.in_peft.inputs import write_model as write_dequantized

SEQ_LEN = 64
VAL_BATCHES = 8
# The engine and PEFT compute in float32. Another order of sums changes a loss near 5 by 1e-6.
TOLERANCE = 1e-4


def train(bundle: Path, output: Path, *options: object) -> RunLog:
    fixed = ("--steps", 20, "--optimizer", "adamw", "--learning-rate", 5e-3)
    fixed += ("--val-batches", VAL_BATCHES)
    call("train", bundle, *fixed, "--out", output, *options)
    return RunLog.load(output)


@pytest.fixture(scope="module")
def folder(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peft") / "dequantized"
    write_dequantized(Bundle(bundle), path)
    return path


@pytest.fixture
def model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def held_out_loss(model: torch.nn.Module, bundle: Path) -> float:
    tokens = Bundle(bundle).tokens("valid")[: VAL_BATCHES * SEQ_LEN + 1].astype(np.int64)
    inputs = torch.from_numpy(tokens[:-1].reshape(VAL_BATCHES, SEQ_LEN))
    targets = torch.from_numpy(tokens[1:])
    with torch.no_grad():
        logits = model(input_ids=inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets).item()


def here(name: str) -> str:
    name = name.removeprefix("base_model.model.").removesuffix(".default.weight")
    return name.replace("lora_A", "lora_a").replace("lora_B", "lora_b")


def lora_parameters(adapted: PeftModel) -> dict[str, np.ndarray]:
    return {
        name.replace("vector.default.weight", "vector").replace(".default", ""): (
            value.detach().numpy()
        )
        for name, value in adapted.named_parameters()
        if "lora_" in name
    }


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--projections", "q,v,down", "--num-layers", 2),
        ("--rslora", "--alpha", 8),
        ("--dora",),
        ("--dora", "--projections", "q,v,down", "--num-layers", 2),
    ],
    ids=["all", "some projections and blocks", "rank-stabilized", "dora", "some with dora"],
)
def test_peft_finds_the_loss_of_the_engine(
    bundle: Path, model: torch.nn.Module, tmp_path: Path, options: tuple
):
    run = train(bundle, tmp_path / "run", *options)
    before, after = run.held_out
    assert abs(after - before) > 0.05, "the adapters count"
    assert held_out_loss(model, bundle) == pytest.approx(before, abs=TOLERANCE)
    adapted = PeftModel.from_pretrained(model, tmp_path / "run" / "adapters" / "peft").eval()
    assert held_out_loss(adapted, bundle) == pytest.approx(after, abs=TOLERANCE)
    merged = adapted.merge_and_unload()
    assert held_out_loss(merged, bundle) == pytest.approx(after, abs=TOLERANCE)


def exported(folder: Path, config: dict[str, Any]) -> tuple[Path, Path]:
    model, text, bundle = (folder / name for name in ("model", "text.txt", "b.mesp"))
    write_model(model, config)
    text.write_text(TEXT * 5)
    call(
        "export", "--model", model, "--data", text, "--out", bundle, "--seq-len", SEQ_LEN,
        "--bits", 8, "--head-bits", 8, "--quantize", "nearest",
    )  # fmt: skip
    return model, bundle


def dequantized(bundle: Path) -> dict[str, mx.array]:
    model = dequantize_model(Bundle(bundle).to_mlx_lm())
    return {
        name: (a.swapaxes(1, 2) if name.endswith(CONVOLUTIONS) else a).astype(mx.float32)
        for name, a in tree_flatten(model.parameters())
    }


def check_run(
    model: torch.nn.Module, bundle: Path, out: Path, *options: object, least: float = 0.05
) -> tuple[float, torch.nn.Module, list[str]]:
    """Returns the loss before, `model` without adapters, and the saved tensors' names."""
    before, after = train(bundle, out, *options).held_out
    assert abs(after - before) > least, "the adapters count"
    assert held_out_loss(model, bundle) == pytest.approx(before, abs=TOLERANCE)
    written = out / "adapters" / "peft"
    adapted = PeftModel.from_pretrained(model, written)
    saved = mx.load(str(written / "adapter_model.safetensors"))
    assert saved.keys() == lora_parameters(adapted).keys()
    assert held_out_loss(adapted.eval(), bundle) == pytest.approx(after, abs=TOLERANCE)
    return before, adapted.unload(), list(saved)


def save_random(model: torch.nn.Module, config: LoraConfig, std: float, folder: Path) -> PeftModel:
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.parametrize("dora", [(), ("--dora",)], ids=["lora", "dora"])
def test_peft_has_a_matrix_for_every_tensor(
    bundle: Path, model: torch.nn.Module, tmp_path: Path, dora: tuple
):
    """PEFT only warns about unused tensors."""
    train(bundle, tmp_path / "run", "--num-layers", 2, "--projections", "o,gate", *dora)
    folder = tmp_path / "run" / "adapters" / "peft"
    adapted = PeftModel.from_pretrained(model, folder)
    saved = mx.load(str(folder / "adapter_model.safetensors"))
    parameters = lora_parameters(adapted)
    assert saved.keys() == parameters.keys() and len(saved) == 2 * 2 * (3 if dora else 2)
    for name, array in saved.items():
        assert np.array_equal(np.array(array), parameters[name]), name


def test_peft_has_the_adapters_of_a_text_among_several_modalities(tmp_path: Path):
    write_model(tmp_path / "model", FAMILIES["gemma3"])
    (tmp_path / "text.txt").write_text(TEXT)
    call(
        "export", "--model", tmp_path / "model", "--data", tmp_path / "text.txt",
        "--out", tmp_path / "bundle", "--seq-len", 24,
    )  # fmt: skip
    options = ("--steps", 2, "--num-layers", 1, "--projections", "q,v,down")
    call("train", tmp_path / "bundle", "--out", tmp_path / "run", *options)

    config = json.loads((tmp_path / "bundle" / "config.json").read_text())["text_config"]
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "head_dim")
    sizes += ("num_attention_heads", "num_key_value_heads")
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    model = Gemma3ForConditionalGeneration(
        Gemma3Config(text_config={size: config[size] for size in sizes}, vision_config=vision)
    )
    folder = tmp_path / "run" / "adapters" / "peft"
    saved = mx.load(str(folder / "adapter_model.safetensors"))
    parameters = lora_parameters(PeftModel.from_pretrained(model, folder))
    assert saved.keys() == parameters.keys() and len(saved) == 2 * 3
    for name, array in saved.items():
        assert np.array_equal(np.array(array), parameters[name]), name


@pytest.mark.parametrize(
    "options", [(), ("--dora",), ("--dora", "--projections", "gate")], ids=" ".join
)
@pytest.mark.parametrize(("name", "modules"), [("granitemoehybrid", 12), ("granite-mamba", 10)])
def test_peft_joins_what_mlx_lm_has_as_several_linear_layers(
    tmp_path: Path, name: str, modules: int, options: tuple
):
    config = {k: v for k, v in FAMILIES[name].items() if k != "head_dim"}
    folder, bundle = exported(tmp_path, config)
    _, tensors = published(config, dequantized(bundle))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    least = 0.02 if "gate" in options else 0.05
    before, model, saved = check_run(model, bundle, tmp_path / "run", *options, least=least)
    modules = 2 if "gate" in options else modules
    assert len(saved) == (3 if "--dora" in options else 2) * modules

    lora = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "input_linear"], use_dora="--dora" in options
    )
    torch.manual_seed(0)
    std = 0.9 if "--dora" in options else 0.3
    expected = held_out_loss(save_random(model, lora, std, tmp_path / "peft"), bundle)
    second = ("--adapters", tmp_path / "peft", "--projections", "q,gate,up", *options[:1])
    run = train(bundle, tmp_path / "second", *second)
    assert abs(expected - before) > 0.05
    assert run.held_out[0] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("name", ["qwen3_moe", "lfm2_moe"])
def test_peft_has_adapters_of_experts(tmp_path: Path, name: str):
    """transformers has two parameters of experts: one for gate and up, and one for down. PEFT 0.21
    treats the MLPs of Qwen3's layers without experts as experts, so the tested Qwen3 model has no
    layers without experts.
    """
    config = FAMILIES[name] | ({"mlp_only_layers": []} if name == "qwen3_moe" else {})
    folder, bundle = exported(tmp_path, config)
    arch, tensors = Bundle(bundle).architecture, dequantized(bundle)
    for theirs, parts in arch.hf_modules:
        for layer in (f"model.layers.{i}." for i in range(arch.num_hidden_layers)):
            held = [tensors.pop(f"{layer}{part}.weight", None) for part in parts]
            if held[0] is not None:
                suffix = "" if held[0].ndim == 3 else ".weight"
                tensors[f"{layer}{theirs}{suffix}"] = mx.concatenate(held, axis=-2)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().eval()
    arrays = {name: torch.from_numpy(np.array(array)) for name, array in tensors.items()}
    missing, more = model.load_state_dict(arrays, strict=False)
    assert not more and set(missing) <= {"lm_head.weight"}
    model.tie_weights()

    options = ("--projections", ",".join(arch.trainable))
    before, model, saved = check_run(model, bundle, tmp_path / "run", *options)
    assert any(".experts.base_layer.lora_A" in name for name in saved)

    parameters = [f"experts.{each}_proj" for each in ("gate_up", "down")]
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"], target_parameters=parameters)
    expected = held_out_loss(save_random(model, lora, 0.6, tmp_path / "peft"), bundle)
    options = ("--adapters", tmp_path / "peft", "--projections", "q,experts")
    run = train(bundle, tmp_path / "second", *options)
    assert abs(expected - before) > 0.05
    assert run.held_out[0] == pytest.approx(expected, abs=TOLERANCE)


def test_lfm3_is_that_of_transformers(tmp_path: Path):
    """The engine is compared with transformers, because mlx-lm does not have LFM3.

    The type of RoPE is "proportional", because with "default" transformers would rotate all pairs.
    """
    config = {k: v for k, v in FAMILIES["lfm3"].items() if k not in ("rms_norm_eps", "rope_theta")}
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config["rope_parameters"] = deepcopy(config["rope_parameters"])
    config["rope_parameters"]["full_attention"]["rope_type"] = "proportional"
    folder, bundle = exported(tmp_path, config)
    opened, file = Bundle(bundle), folder / "model.safetensors"
    mx.save_safetensors(str(file), dequantized(bundle), {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    _, model, saved = check_run(model, bundle, tmp_path / "run")
    assert len(saved) == 2 * (5 + 8 + 8)

    rate, steps = 0.5, 5
    options = ("--steps", steps, "--optimizer", "sgd", "--learning-rate", rate)
    train(bundle, tmp_path / "sgd", *options, "--val-batches", 0)
    modules = sorted({name.rpartition(".")[2] for name in opened.architecture.modules})
    lora = LoraConfig(r=RANK, lora_alpha=16, target_modules=modules)
    adapted = get_peft_model(model, lora).train()
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    first = first_adapters(opened, RANK, 0)
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.from_numpy(np.array(first[here(name)]).T))
    optimizer = torch.optim.SGD(parameters, lr=rate)
    tokens = opened.tokens("train").astype(np.int64)
    windows, expected = range(0, len(tokens) - SEQ_LEN, SEQ_LEN), []
    for step in range(steps):
        start = windows[reference.step_window(step, 0, len(windows))]
        ids = torch.from_numpy(tokens[start : start + SEQ_LEN + 1])
        logits = adapted(input_ids=ids[None, :-1]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, ids[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    found = [record["loss"] for record in RunLog.load(tmp_path / "sgd").steps]
    assert abs(expected[-1] - expected[0]) > 0.05
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("rslora", [False, True])
def test_the_engine_starts_from_what_peft_saved(
    bundle: Path, model: torch.nn.Module, tmp_path: Path, rslora: bool, dora: bool
):
    torch.manual_seed(0)
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        use_rslora=rslora,
        use_dora=dora,
        target_modules=["q_proj", "up_proj"],
        task_type="CAUSAL_LM",
    )
    adapted = save_random(model, config, 0.3, tmp_path / "peft")
    expected = held_out_loss(adapted, bundle)
    options = ["--projections", "q,up", *(["--rslora"] * rslora), *(["--dora"] * dora)]
    run = train(bundle, tmp_path / "run", "--adapters", tmp_path / "peft", *options)
    assert abs(expected - held_out_loss(adapted.unload(), bundle)) > 0.05
    assert run.held_out[0] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("method", ["torch-peft", "torch-peft-checkpoint"])
def test_the_benchmark_trains_with_peft_as_the_engine_does(
    bundle: Path, method: str, tmp_path: Path
):
    files = ("--work", tmp_path, "--json", tmp_path / "rows.json")
    size = ("--model", bundle, "--seq-len", SEQ_LEN)
    methods = ("--methods", f"mesp,{method}", "--peft", sys.executable)
    done = invoke(bench, "bench.py", *size, *methods, *files)
    assert done.returncode == 0, done.stderr
    engine, peft = json.loads((tmp_path / "rows.json").read_text())["rows"]
    # The engine and PEFT have the same adapters, windows and update, so their losses differ only by
    # float32's rounding.
    assert peft["losses"] == pytest.approx(engine["losses"], rel=1e-5)
    assert 0 < peft["baseline_bytes"] < peft["footprint_peak_bytes"]
    assert peft["seconds"] > 0 and peft["threads"] == engine["threads"]


KEY = bytes(range(32))
# The noise has about the norm of the clipped sum. A high learning rate makes a step large against
# the rounding of the parameters.
CLIP, MULTIPLIER, EXPECTED, RATE, RANK = 0.5, 0.003, 4, 10.0, 8


def test_a_private_step_is_that_of_opacus(tmp_path: Path):
    """With the same noise, the update agrees to 1e-5 too."""
    data = tmp_path / "records.jsonl"
    words = TEXT.split()
    texts = [" ".join(words[n % 5 : n % 5 + 3 + n % 7]) for n in range(12)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = tmp_path / "demo.mesp"
    size = ("--seq-len", SEQ_LEN, "--rank", RANK)
    call("export", "--model", "demo", "--data", data, "--no-pack", "--out", path, *size)
    first = tmp_path / "first"
    few = ("--steps", 5, "--learning-rate", 1e-3)
    train(path, first, "--rank", RANK, "--seq-len", SEQ_LEN, "--val-batches", 0, *few)
    for start in (None, first / "adapters"):
        output = tmp_path / ("zero" if start is None else "trained")
        output.mkdir()
        (output / "metrics.jsonl").touch()
        (output / "secret.key").write_bytes(KEY)
        settings = {"seq_len": SEQ_LEN, "rank": RANK, "steps": 1, "learning_rate": RATE}
        settings |= {"val_batches": 0, "resume": True, "batch_size": EXPECTED}
        settings |= {"bundle": str(path), "output": str(output)}
        settings |= {"dp_clip": CLIP, "dp_noise": MULTIPLIER}
        settings |= {"adapters": str(start)} if start else {}
        (output / "settings.json").write_text(json.dumps(settings))
        subprocess.run([find_engine(), output / "settings.json"], check=True, capture_output=True)
        before, after, norms, clipped = step_of_opacus(path, start)
        assert clipped > 0, "clipping counts"
        step = RunLog.load(output).steps[0]
        assert step["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-5)
        ours = mx.load(str(output / "adapters" / "adapters.safetensors"))
        assert ours.keys() == after.keys()
        way = sum(np.square(after[name] - before[name]).sum() for name in after) ** 0.5
        off = sum(np.square(after[name] - np.array(ours[name])).sum() for name in after) ** 0.5
        assert way > 0 and off < 1e-5 * way


def step_of_opacus(
    path: Path, start: Path | None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], list[float], int]:
    bundle = Bundle(path)
    folder = path.parent / f"dequantized-{start is None}"
    write_dequantized(bundle, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=RANK, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    first = first_adapters(bundle, RANK, 0)
    if start is not None:
        first = mx.load(str(start / "adapters.safetensors"))
    parameters = {}
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.from_numpy(np.array(first[here(name)]).T))
            parameters[here(name)] = parameter
    before = {name: p.detach().numpy().T.copy() for name, p in parameters.items()}
    private = GradSampleModule(adapted)
    order = list(parameters)
    optimizer = DPOptimizer(
        torch.optim.SGD([parameters[name] for name in order], lr=RATE),
        noise_multiplier=MULTIPLIER, max_grad_norm=CLIP, expected_batch_size=EXPECTED,
    )  # fmt: skip

    tokens, bounds = bundle.tokens("train").astype(np.int64), bundle.examples("train").tolist()
    drawn = reference.poisson_sample(KEY, 0, EXPECTED, len(bounds))
    assert len(drawn) > 1
    longest = max(bounds[index][1] for index in drawn)
    ids = np.zeros((len(drawn), longest), np.int64)
    labels = np.full_like(ids, -100)
    for row, index in enumerate(drawn):
        at, length = bounds[index]
        ids[row, :length] = labels[row, :length] = tokens[at : at + length]
    logits = private(input_ids=torch.from_numpy(ids)).logits[:, :-1]
    each = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), torch.from_numpy(labels[:, 1:]), reduction="none"
    )
    counted = torch.from_numpy(labels[:, 1:] >= 0).sum(1)
    # Opacus expects the mean loss of a batch, and multiplies by the batch size.
    (each.sum(1) / counted).mean().backward()
    squares = sum(p.grad_sample.square().flatten(1).sum(1) for p in parameters.values())
    norms = squares.sqrt().tolist()
    optimizer.clip_and_accumulate()
    noise = noise_by_name(bundle)
    for name in order:
        p = parameters[name]
        p.grad = p.summed_grad + MULTIPLIER * CLIP * torch.from_numpy(
            noise[name].T.astype(np.float64)
        )
    optimizer.scale_grad()
    optimizer.original_optimizer.step()
    after = {name: p.detach().numpy().T for name, p in parameters.items()}
    return before, after, norms, sum(norm > CLIP for norm in norms)


def noise_by_name(bundle: Bundle) -> dict[str, np.ndarray]:
    blocks = bundle.architecture.blocks
    vectors = reference.private_noise(KEY, 0, [block.lora_size(RANK) for block in blocks])
    return {
        f"model.layers.{layer}.{module}.{part}": np.array(matrix)
        for layer, vector in enumerate(vectors)
        for module, pair in reference.unpack_lora(vector, blocks[layer]).items()
        for part, matrix in zip(("lora_a", "lora_b"), pair, strict=True)
    }
