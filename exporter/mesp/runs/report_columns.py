from __future__ import annotations

from mesp.formatting import decimal, megabytes
from mesp.runs.log import RunLog

COLUMNS = (
    "model",
    "method",
    "seq",
    "rank",
    "steps",
    "loss",
    "held-out",
    "tok/s",
    "in the loss",
    "peak MB",
    "state",
)


def table_row(run: RunLog) -> list[str]:
    losses = run.losses
    before, after = run.held_out
    return [
        run.model,
        str(run.settings.get("method", "?")),
        str(run.settings.get("seq_len", "?")),
        str(run.settings.get("rank", "?")),
        str(run.last_step),
        f"{decimal(losses[0])} → {decimal(losses[-1])}" if losses else "-",
        f"{decimal(before)} → {decimal(after)}",
        decimal(run.speed.tokens, 0),
        decimal(run.speed.in_loss, 0),
        megabytes(run.peak_bytes),
        run.state(),
    ]
