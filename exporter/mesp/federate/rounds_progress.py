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
        self.console.print(line(record, self.rounds, self.before), markup=False, soft_wrap=True)
        if "discarded" in record:
            self.console.print(
                "  discarded what the clients made, and kept the adapters of the round before: "
                f"{printable(record['discarded'])}",
                markup=False,
                soft_wrap=True,
            )
        for sentence in record.get("left_out", ()):
            # The sentence may come from a client, so unprintable characters are replaced by spaces.
            said = printable(f"  left out: {sentence}")
            self.console.print(said, markup=False, soft_wrap=True)
        self.before = record
        if number < self.rounds:
            self.status.update(f"Round {number + 1} of {self.rounds}")


def line(record: dict[str, Any], rounds: int, before: dict[str, Any] | None) -> str:
    loss = decimal(record["held_out_loss"], 3)
    if before is None:
        return f"round {record['round']}/{rounds}: held-out loss {loss}"
    was = decimal(before["held_out_loss"], 3)
    footprint = max(client["footprint_bytes"] for client in record["clients"])
    return (
        f"round {record['round']}/{rounds}: held-out loss {was} → {loss}, "
        f"{len(record['clients'])} clients, drift {decimal(record['drift'])}, "
        f"{megabytes(record['bytes_down'])} MB down, {megabytes(record['bytes_up'])} MB up, "
        f"footprint {megabytes(footprint)} MB" + privacy(record)
    )


def privacy(record: dict[str, Any]) -> str:
    if "epsilon" not in record:
        return ""
    return f", ε {decimal(record['epsilon'])} at δ {record['delta']:g} so far"


def summary(federation: Federation) -> str:
    rounds = federation.rounds
    records = rounds.records()
    before, after = records[0]["held_out_loss"], records[-1]["held_out_loss"]
    down, up = (sum(r.get(f"bytes_{way}", 0) for r in records) for way in ("down", "up"))
    last, private = records[-1], []
    if "epsilon" in last:
        private = [
            f"Differential privacy of a client, over all rounds: ε {decimal(last['epsilon'])} at "
            f"δ {last['delta']:g}."
        ]
    return "\n".join(
        [
            f"Finished {len(records) - 1} rounds: {megabytes(down)} MB sent to clients, "
            f"{megabytes(up)} MB back.",
            f"Held-out loss {decimal(before, 3)} before, {decimal(after, 3)} after (nats a token).",
            *private,
            f"Adapters: {rounds.path(last['round']) / 'adapters'}",
        ]
    )
