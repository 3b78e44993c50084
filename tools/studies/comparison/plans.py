from __future__ import annotations

from pathlib import Path

from mesp.engine.build import find_engine
from mesp.engine.process import find_plan
from studies.tasks.bundles import RANK, Task

ON_DISK = {"none": "nothing on disk", "inputs": "inputs on disk", "all": "all on disk"}
EVERYTHING_MB = 1e6  # more than all intermediates need
# the ratio of the middle memory limit to the mean of the least and the greatest predicted peak
MARGIN = 1.08


def plans(bundle: Path, task: Task, optimizer: str) -> dict[str, tuple[object, ...]]:
    """Returns the options of mesp-train for each plan, by the plan's name.

    Depending on the memory limit, the plans keep the intermediates of no blocks, some blocks or all
    blocks.
    """
    engine, found = find_engine(), {}
    settings = {
        "bundle": str(bundle.resolve()),
        "seq_len": task.seq_len,
        "batch_size": task.batch_size,
        "rank": RANK,
        "optimizer": optimizer,
    }
    for offload, words in ON_DISK.items():
        least, most = (
            find_plan(engine, settings | {"offload": offload} | limit)["predicted_peak_bytes"] / 1e6
            for limit in ({}, {"memory_limit_mb": EVERYTHING_MB})
        )
        for limit in (None, MARGIN * (least + most) / 2, EVERYTHING_MB):
            options = {"offload": offload} | ({} if limit is None else {"memory_limit_mb": limit})
            kept = find_plan(engine, settings | options)["kept_blocks"]
            given = () if limit is None else ("--memory-limit", limit)
            found[f"{words}, {kept} kept"] = ("--offload", offload, *given)
    return found
