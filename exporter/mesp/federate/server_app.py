"""Flower's ServerApp: a strategy of Flower's over the rounds of a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from mesp.bundle.folders import locked
from mesp.federate.exchange import travelling
from mesp.federate.federation import Federation
from mesp.federate.messages import to_numpy, to_record
from mesp.federate.report import Report
from mesp.federate.rounds import STATE_NAME
from mesp.federate.screening import Screened
from mesp.federate.strategies import make_strategy, restore, state_of

# Seconds that a client's answer may take beyond its training.
TO_ANSWER = 30.0

Show = Callable[[dict[str, Any]], None]


def serve(federation: Federation, grid: Grid, show: Show, timeout: float | None) -> None:
    """All rounds that are not there yet, each kept as it ends and given to `show`. After `timeout`
    seconds a round goes on without those that have not answered."""
    with locked(federation.output, f"server is at work in {federation.output}"):
        options, rounds = federation.options, federation.rounds
        if rounds.last is None:
            rounds.save(0, None, {})
        done = rounds.last
        show(rounds.record(done))
        inner = make_strategy(options)
        restore(inner, rounds.path(done) / STATE_NAME)
        sequences = options["steps"] * options["batch_size"] * options["grad_accumulation_steps"]
        screened = Screened(
            inner, done, options["exchange"], sequences * options["seq_len"], options["min_clients"]
        )

        def keep(server_round: int, arrays: ArrayRecord) -> None:
            if server_round > 0:
                number, report = done + server_round, screened.report
                show(rounds.save(number, to_numpy(arrays), report, state_of(inner)))

        screened.start(
            grid,
            to_record(travelling(rounds.arrays(done), options["freeze_a"])),
            num_rounds=options["rounds"] - done,
            timeout=timeout,
            train_config=ConfigRecord(federation.config),
            evaluate_fn=keep,
        )


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """What a SuperLink runs: the federation in the folder that the app's configuration names."""
    federation = Federation.read(Path(str(context.run_config["output"])))
    with Report(federation.options["rounds"]) as report:
        timeout = federation.options["timeout"] + TO_ANSWER
        serve(federation, grid, report.show, timeout)
