from __future__ import annotations

from pathlib import Path
from typing import Any

from mesp.bundle.manifest import Manifest
from mesp.engine.build import engine_path
from mesp.engine.process import Record, find_plan
from mesp.errors import MespError
from mesp.formatting import megabytes
from mesp.runs.privacy import Steps, epsilon
from mesp.settings.optimizer_defaults import choose_optimizer
from mesp.settings.train_settings import OPTIMIZERS, TrainSettings


def find_plans(bundle: Path, manifest: Manifest) -> dict[int, dict[str, Any]]:
    size = {"bundle": str(bundle.resolve()), "rank": manifest.ranks[0]}
    size["optimizer"] = choose_optimizer("mesp")
    return {n: find_plan(engine_path(), {**size, "seq_len": n}) for n in manifest.seq_lens}


def predicted_memory(out: Path, manifest: Manifest) -> str | None:
    try:
        plans = find_plans(out, manifest)
    except MespError:
        return None
    peaks = (
        f"{length} tokens {megabytes(plan['predicted_peak_bytes'])} MB "
        f"(the lowest --memory-limit: {megabytes(plan['least_peak_bytes'])} MB)"
        for length, plan in plans.items()
    )
    return "training peaks at " + ", ".join(peaks)


ORDERS = {
    "sequences": "one sequence after the other",
    "blocks": "all its sequences go through a block before the next",
}


def describe_plan(plan: Record) -> str:
    answer = "; of a pair the inputs of one answer are kept" if plan.get("keeps_answer") else ""
    metal = ""
    if "metal_bytes" in plan:
        metal = f"; {megabytes(plan['metal_bytes'])} MB are counted for Metal itself"
    lines = [
        f"Predicted peak footprint: {megabytes(plan['predicted_peak_bytes'])} MB "
        f"(the lowest --memory-limit: {megabytes(plan['least_peak_bytes'])} MB{metal}).",
        f"Tiles of {plan['tile_bytes'] // 1024} KiB; on disk: {plan['offload']}{answer}.",
        describe_kept(plan) or "All intermediates are recomputed.",
        f"Mapped weights: {megabytes(plan['mapped_bytes'])} MB, not in the footprint.",
    ]
    if "read_weight_bytes" in plan:
        order = f": {ORDERS[plan['order']]}" if "order" in plan else ""
        lines.append(f"A step reads {megabytes(plan['read_weight_bytes'])} MB of them{order}.")
    return "\n".join(lines)


def describe_kept(plan: Record) -> str:
    if not plan.get("kept_blocks"):
        return ""
    return (
        "Room below the memory limit is used for speed: the intermediates of "
        f"{plan['kept_blocks']} blocks are kept. A lower --memory-limit keeps fewer."
    )


def describe_count(count: Record) -> str:
    return (
        f"On a phone's GPU a step has {count['evals']:,} evals and {count['kernels']:,} kernels "
        f"(counted), {count['tflop']:.3f} TFLOP, and takes {count['modelled_seconds']:.2f} s "
        f"(modelled); MLX's arrays peak at {megabytes(count['ledger_peak_bytes'])} MB (counted; "
        f"predicted {megabytes(count['predicted_peak_bytes'])})."
    )


def describe_optimizers(engine: Path, settings: dict[str, Any]) -> str:
    # A resumed run would keep its optimizer, so these settings are of a new run.
    free = {**settings, "memory_limit_mb": None, "offload": "none", "resume": False, "output": ""}
    peaks = (
        f"{megabytes(find_plan(engine, free | {'optimizer': name})['predicted_peak_bytes'])} MB "
        f"with {name}"
        for name in reversed(OPTIMIZERS)
    )
    return f"All in memory: {', '.join(peaks)}."


def describe_privacy(settings: TrainSettings, examples: int, steps: int) -> str:
    """Returns a sentence with the ε of `steps` steps of DP-SGD. Without noise, the sentence says
    that there is no privacy.
    """
    if not settings.dp_noise:
        return "Differential privacy: none, as gradients are clipped and get no noise."
    sampled = settings.batch_size / examples
    total = epsilon([Steps(steps, settings.dp_noise, sampled)], settings.dp_delta)
    return (
        f"Differential privacy of each of {examples:,} training examples: ε {total:.3g} at "
        f"δ {settings.dp_delta:g} over {steps:,} step{'s' * (steps != 1)}."
    )
