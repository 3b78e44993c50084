"""Trains with PEFT on PyTorch, in an environment that has these and neither MLX nor MeSP.

    python -m studies.in_peft.train SETTINGS.json

The folder `output` in the settings contains the inputs (`studies.in_peft.inputs`), and gets the
adapters. A window is a sequence or a batch of sequences; a token that is not in the loss is ~id.
Prints records as JSON, one per line.
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


def updates(
    settings: dict[str, Any], trained: dict[str, torch.Tensor]
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Without `bias_correction`, the learning rate of each AdamW step undoes it."""

    def factor(step: int) -> float:
        if settings.get("bias_correction", True):
            return 1.0
        return (1 - 0.9 ** (step + 1)) / (1 - 0.999 ** (step + 1)) ** 0.5

    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[settings.get("optimizer", "sgd")]
    optimizer = kind(trained.values(), settings["learning_rate"], weight_decay=0.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(settings["output"])
    torch.ones(256, 256) @ torch.ones(256, 256)
    report("start", baseline_bytes=footprint())
    model, trained = load(folder, settings)
    optimizer, schedule = updates(settings, trained)
    peak = Peak()
    for step, window in enumerate(np.load(folder / "windows.npy"), start=1):
        began = time.perf_counter()
        given = torch.from_numpy(window).long().reshape(-1, window.shape[-1])
        given = given[:, : int((given >= 0).any(0).nonzero().max()) + 1]
        ids, targets = torch.where(given < 0, ~given, given), torch.where(given < 0, -100, given)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        del logits
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        took = time.perf_counter() - began
        report("step", step=step, loss=loss.item(), seconds=took, footprint_peak_bytes=peak.bytes)
    model.save_pretrained(folder / "adapters")


if __name__ == "__main__":
    main()
