"""What the engine plans for a run, and the memory that it predicts; nothing is trained."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from mesp.engine.build import engine_path
from mesp.engine.update_defaults import OPTIMIZERS, default_optimizer
from mesp.errors import MespError
from mesp.formatting import megabytes


def find_plan(engine: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The engine's plan for these settings, its `plan` record. Nothing is written."""
    return _ask([engine], settings)


def find_count(engine: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What the engine counts of a step with these settings on a phone's GPU: its `count` record.

    Raises MespError where it cannot: of a bundle for the CPU, or on a Mac.
    """
    return _ask([engine, "count"], settings)


def _ask(command: list[str | Path], settings: dict[str, Any]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump({"output": "", **settings, "dry_run": True}, file)
        file.flush()
        done = subprocess.run([*command, file.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise MespError(done.stderr.strip() or f"mesp-engine failed ({done.returncode}).")
    return json.loads(done.stdout)


def find_plans(bundle: Path, manifest: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The plan of mesp-train's defaults by length, for the bundle's first rank.

    Raises OSError where the engine has not been built, MespError where it refuses.
    """
    size = {"bundle": str(bundle.resolve()), "rank": manifest["ranks"][0]}
    size["optimizer"] = default_optimizer("mesp")
    return {n: find_plan(engine_path(), {**size, "seq_len": n}) for n in manifest["seq_lens"]}


def predicted_memory(out: Path, manifest: dict[str, Any]) -> str | None:
    """The trainer's predicted peak for each length with its default plan, and the least possible.

    None where the engine has not been built: exporting does not need it.
    """
    try:
        plans = find_plans(out, manifest)
    except (MespError, OSError):
        return None
    peaks = (
        f"{length} tokens {megabytes(plan['predicted_peak_bytes'])} MB "
        f"(at least {megabytes(plan['least_peak_bytes'])})"
        for length, plan in plans.items()
    )
    return "training peaks at " + ", ".join(peaks)


# What its sequences do, by `order` of a plan.
ORDERS = {
    "sequences": "one sequence after the other",
    "blocks": "all its sequences go through a block before the next",
}


def describe_plan(plan: dict) -> str:
    """The engine's plan in words."""
    answer = "; of a pair the inputs of one answer kept" if plan.get("keeps_answer") else ""
    metal = ""
    if "metal_bytes" in plan:
        metal = f"; {megabytes(plan['metal_bytes'])} MB are assumed for Metal itself"
    lines = [
        f"Predicted peak footprint: {megabytes(plan['predicted_peak_bytes'])} MB "
        f"(the lowest --memory-limit: {megabytes(plan['least_peak_bytes'])} MB{metal}).",
        f"Tiles of {plan['tile_bytes'] // 1024} KiB; on disk: {plan['offload']}; "
        f"intermediates of {plan['kept_blocks']} blocks kept{answer}.",
        f"Mapped weights: {megabytes(plan['mapped_bytes'])} MB, not in the footprint.",
    ]
    if "read_weight_bytes" in plan:
        order = f": {ORDERS[plan['order']]}" if "order" in plan else ""
        lines.append(f"A step goes over {megabytes(plan['read_weight_bytes'])} MB of them{order}.")
    return "\n".join(lines)


def describe_count(count: dict) -> str:
    """What the engine counted of a step, in words."""
    return (
        f"On a phone's GPU a step has {count['evals']:,} evals and {count['kernels']:,} kernels "
        f"(counted), {count['tflop']:.3f} TFLOP, and takes {count['modelled_seconds']:.2f} s "
        f"(modelled); MLX's arrays peak at {megabytes(count['ledger_peak_bytes'])} MB (counted; "
        f"predicted {megabytes(count['predicted_peak_bytes'])})."
    )


def describe_optimizers(engine: Path, settings: dict[str, Any]) -> str:
    """What a run would take with each optimizer, without a limit and all in memory."""
    free = {**settings, "memory_limit_mb": None, "offload": "none"}
    peaks = (
        f"{megabytes(find_plan(engine, free | {'optimizer': name})['predicted_peak_bytes'])} MB "
        f"with {name}"
        for name in reversed(OPTIMIZERS)
    )
    return f"All in memory: {', '.join(peaks)}."
