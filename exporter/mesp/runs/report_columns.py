from __future__ import annotations

from mesp.formatting import decimal, megabytes
from mesp.runs.log import RunLog


def table_row(run: RunLog) -> dict[str, str]:
    losses = run.losses
    before, after = run.held_out
    return {
        "model": run.model,
        "method": str(run.settings.get("method", "?")),
        "seq": str(run.settings.get("seq_len", "?")),
        "rank": str(run.settings.get("rank", "?")),
        "steps": str(run.last_step),
        "loss": f"{decimal(losses[0])} → {decimal(losses[-1])}" if losses else "-",
        "held-out": f"{decimal(before)} → {decimal(after)}",
        "tok/s": decimal(run.speed.tokens, 0),
        "in the loss": decimal(run.speed.in_loss, 0),
        "peak MB": megabytes(run.peak_bytes),
        "state": run.state(),
    }
