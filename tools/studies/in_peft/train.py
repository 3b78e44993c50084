"""Trains with PEFT on PyTorch, in an environment that has these and neither MLX nor MeSP.

    python -m studies.in_peft.train SETTINGS.json

The folder `output` in the settings contains the inputs, and gets `adapters.safetensors`. Prints
records as JSON, one per line. With the setting `nf4`, the path of a Hugging Face model, trains on
this model's weights in NF4, as QLoRA does. The NF4 weights are dequantized once into `base/`,
because bitsandbytes is slow on a CPU.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from studies.benchmarks.footprint import Peak, footprint


def report(kind: str, **fields: Any) -> None:
    print(json.dumps({"type": kind, **fields}), flush=True)


class AdamW(torch.optim.Optimizer):
    """AdamW without weight decay and bias correction. By default, mlx.optimizers' AdamW has no bias
    correction either.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float, beta2: float) -> None:
        super().__init__(parameters, {"lr": lr, "beta2": beta2})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if not (state := self.state[p]):
                    state |= {"m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                state["m"].lerp_(p.grad, 0.1)
                state["v"].lerp_(p.grad.square(), 1 - group["beta2"])
                p.addcdiv_(state["m"], state["v"].sqrt() + 1e-8, value=-group["lr"])


def load(folder: Path, settings: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Returns the model with its initial adapters, and the trained tensors by mlx-lm's names.

    The trained tensors are transposed compared with mlx-lm's.
    """
    first = load_file(folder / "first.safetensors")
    dtype = getattr(torch, settings["dtype"])
    weights = folder / "model"
    if "nf4" in settings:
        weights = folder / "base"
        source = Path(settings["nf4"])
        write_base(in_nf4(source, dtype), source, weights)
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=dtype, trust_remote_code=False)
    model.train()  # Gradient checkpointing works only in this mode.
    if settings.get("checkpoint"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    targets = sorted({name.split(".")[-2] for name in first})
    lora = LoraConfig(
        r=settings["rank"],
        lora_alpha=settings["alpha"],
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    trained = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = name.removeprefix("base_model.model.").replace(".default.weight", "")
            trained[key.replace("lora_A", "lora_a").replace("lora_B", "lora_b")] = parameter
    assert trained.keys() == first.keys()
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(first[name].T)
    return model, trained


def in_nf4(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Returns the model with its blocks' matrices in NF4 with 8-bit scales, as in QLoRA."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        quantization_config=quantization,
        device_map="cpu",
        trust_remote_code=False,
    )


def write_base(model: torch.nn.Module, source: Path, folder: Path) -> None:
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    tensors = {}
    for name, parameter in model.named_parameters():  # yields tied matrices once
        if isinstance(parameter, Params4bit):
            parameter = dequantize_4bit(parameter.data, parameter.quant_state)
        tensors[name] = parameter.detach().float().contiguous()
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(settings["output"])
    torch.ones(256, 256) @ torch.ones(256, 256)
    report("start", baseline_bytes=footprint())
    model, trained = load(folder, settings)
    if settings["optimizer"] == "adamw":
        optimizer = AdamW(trained.values(), 0.0, settings["beta2"])
    else:
        optimizer = torch.optim.SGD(trained.values(), 0.0)
    data, peak = np.load(folder / "batches.npz"), Peak()
    steps = zip(settings["rates"], data["ids"], data["counted"], strict=True)
    for step, (rate, ids, counted) in enumerate(steps, start=1):
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, counted = torch.from_numpy(ids).long(), torch.from_numpy(counted)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        targets = ids[:, 1:].where(counted, -100)  # cross_entropy ignores -100
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        del logits
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        took = time.perf_counter() - began
        report("step", step=step, loss=loss.item(), seconds=took, footprint_peak_bytes=peak.bytes)
    saved = {name: p.detach().float().T.contiguous() for name, p in trained.items()}
    save_file(saved, folder / "adapters.safetensors")


if __name__ == "__main__":
    main()
