from __future__ import annotations

from typing import Any

from rich.console import Console

from mesp.federate.federation import Federation
from mesp.formatting import decimal, megabytes, printable


class RoundsProgress:
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.console = Console(stderr=True, highlight=False)
        self.status = self.console.status("Starting Flower")
        self.before: dict[str, Any] | None = None

    def __enter__(self) -> RoundsProgress:
        if self.console.is_terminal:
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.status.stop()

    def show(self, record: dict[str, Any]) -> None:
        """The first record is that of the last completed round, or of the initial adapters."""
        number = record["round"]
        said = [line(record, self.rounds, self.before)]
        if "discarded" in record:
            said.append(
                "  discarded what the clients made, and kept the adapters of the round before: "
                f"{record['discarded']}"
            )
        said += [f"  left out: {sentence}" for sentence in record.get("left_out", ())]
        for each in said:
            # A sentence may come from a client.
            self.console.print(printable(each), markup=False, soft_wrap=True)
        self.before = record
        if number < self.rounds:
            self.status.update(f"Round {number + 1} of {self.rounds}")


def line(record: dict[str, Any], rounds: int, before: dict[str, Any] | None) -> str:
    loss = decimal(record["held_out_loss"], 3)
    if before is None:
        return f"round {record['round']}/{rounds}: held-out loss {loss}"
    was = decimal(before["held_out_loss"], 3)
    footprint = max(client["footprint_bytes"] for client in record["clients"])
    private = privacy(record)
    return (
        f"round {record['round']}/{rounds}: held-out loss {was} → {loss}, "
        f"{len(record['clients'])} clients, drift {decimal(record['drift'])}, "
        f"{megabytes(record['bytes_down'])} MB down, {megabytes(record['bytes_up'])} MB up, "
        f"footprint {megabytes(footprint)} MB" + (f", {private} so far" if private else "")
    )


def privacy(record: dict[str, Any]) -> str:
    if "epsilon" not in record:
        return ""
    return f"ε {decimal(record['epsilon'])} at δ {record['delta']:g}"


def summary(federation: Federation) -> str:
    rounds = federation.rounds
    records = rounds.records()
    before, after = records[0]["held_out_loss"], records[-1]["held_out_loss"]
    down, up = (sum(r.get(f"bytes_{way}", 0) for r in records) for way in ("down", "up"))
    lines = [
        f"Finished {len(records) - 1} rounds: {megabytes(down)} MB sent to clients, "
        f"{megabytes(up)} MB back.",
        f"Held-out loss {decimal(before, 3)} before, {decimal(after, 3)} after (nats a token).",
    ]
    if private := privacy(records[-1]):
        lines.append(f"Differential privacy of a client, over all rounds: {private}.")
    adapters = rounds.path(records[-1]["round"]) / "adapters"
    return "\n".join([*lines, f"Adapters: {adapters}"])
