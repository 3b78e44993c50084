"""Trains with PEFT on PyTorch, in an environment that has these and neither MLX nor MeSP.

    python -m studies.in_peft.train SETTINGS.json

The folder `output` in the settings contains the inputs (`studies.in_peft.inputs`). Prints
records as JSON, one per line.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from studies.benchmarks.footprint import Peak, footprint, report


def load(folder: Path, settings: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """Returns the model with its initial adapters, and the trained tensors by mlx-lm's names.

    The trained tensors are transposed compared with mlx-lm's.
    """
    first = load_file(folder / "first.safetensors")
    dtype = getattr(torch, settings["dtype"])
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=dtype, trust_remote_code=False
    )
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


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(settings["output"])
    torch.ones(256, 256) @ torch.ones(256, 256)
    report("start", baseline_bytes=footprint())
    model, trained = load(folder, settings)
    optimizer = torch.optim.SGD(trained.values(), settings["learning_rate"])
    peak = Peak()
    for step, ids in enumerate(np.load(folder / "windows.npy"), start=1):
        began = time.perf_counter()
        ids = torch.from_numpy(ids).long()
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
        loss = torch.nn.functional.cross_entropy(logits, ids[1:])
        del logits
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        took = time.perf_counter() - began
        report("step", step=step, loss=loss.item(), seconds=took, footprint_peak_bytes=peak.bytes)


if __name__ == "__main__":
    main()
