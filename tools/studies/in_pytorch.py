"""Trains with PEFT on PyTorch, in an environment that has these and not MeSP.

    python in_pytorch.py FOLDER

`FOLDER` holds `model/`, `first.safetensors` (adapters by mlx-lm's names), `batches.npz` and
`settings.json`. Writes `adapters.safetensors` and prints the losses, a JSON list.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


class AdamW(torch.optim.Optimizer):
    """As mlx.optimizers has it, without bias correction; PyTorch's has no such option."""

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


def main() -> None:
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "settings.json").read_text())
    first, data = load_file(folder / "first.safetensors"), np.load(folder / "batches.npz")
    dtype = getattr(torch, settings["dtype"])
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype)
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
    parameters = [*trained.values()]
    rate, steps = settings["rate"], len(data["ids"])
    if settings["optimizer"] == "adamw":
        optimizer = AdamW(parameters, rate, settings["beta2"])
    else:
        optimizer = torch.optim.SGD(parameters, rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses = []
    for ids, counted in zip(data["ids"], data["counted"], strict=True):
        ids, counted = torch.from_numpy(ids).long(), torch.from_numpy(counted)
        logits = model(input_ids=ids[:, :-1]).logits.float()
        loss = torch.nn.functional.cross_entropy(logits[counted], ids[:, 1:][counted])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    saved = {name: p.detach().float().T.contiguous() for name, p in trained.items()}
    save_file(saved, folder / "adapters.safetensors")
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
