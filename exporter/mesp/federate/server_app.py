"""Flower's ServerApp: a strategy of Flower's over the rounds of a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from mesp.errors import MespError
from mesp.federate.exchange import Arrays, select_exchanged
from mesp.federate.federation import STATE_NAME, Federation
from mesp.federate.flower_messages import to_record
from mesp.federate.rounds_progress import RoundsProgress
from mesp.federate.strategies import Screened, make_strategy, restore, state_of
from mesp.folders import locked
from mesp.runs.privacy import gaussian_epsilon

# Seconds that a client's answer may take beyond its training.
TO_ANSWER = 30.0

Show = Callable[[dict[str, Any]], None]


def serve(federation: Federation, grid: Grid, show: Show, timeout: float | None) -> None:
    """All rounds that are not there yet, each kept as it ends and given to `show`. After `timeout`
    seconds a round continues without those that have not answered."""
    with locked(federation.folder, f"server is at work in {federation.folder}"):
        options, rounds = federation.options, federation.rounds
        if rounds.last is None:
            rounds.save(0, None, {})
        done = rounds.last or 0
        show(rounds.record(done))
        inner = make_strategy(options)
        restore(inner, rounds.path(done) / STATE_NAME)
        sequences = options["steps"] * options["batch_size"] * options["grad_accumulation_steps"]

        def keep(number: int, arrays: Arrays, report: dict[str, Any]) -> Arrays:
            if options["noise"]:
                delta = options["delta"]
                report = report | {
                    "epsilon": gaussian_epsilon(options["noise"], delta, number),
                    "delta": delta,
                }
            try:
                record = rounds.save(number, arrays, report, state_of(inner))
            except MespError as error:
                # Nothing can be trained from adapters that cannot be evaluated. If the failure is
                # of this machine, the adapters before them cannot be evaluated either.
                arrays, before = rounds.arrays(number - 1), rounds.path(number - 1) / STATE_NAME
                restore(inner, before)
                report = report | {"discarded": error.message}
                record = rounds.save(number, arrays, report, state_of(inner))
            show(record)
            return arrays

        screened = Screened(
            inner,
            done,
            options["exchange"],
            sequences * options["seq_len"],
            options["min_clients"],
            options["clip"],
            keep,
        )
        screened.start(
            grid,
            to_record(select_exchanged(rounds.arrays(done), options["freeze_a"])),
            num_rounds=options["rounds"] - done,
            timeout=timeout,
            train_config=ConfigRecord(federation.config),
        )


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """The app that a SuperLink runs: the federation in the folder of its configuration."""
    federation = Federation.read(Path(str(context.run_config["output"])))
    with RoundsProgress(federation.options["rounds"]) as report:
        timeout = federation.options["timeout"] + TO_ANSWER
        serve(federation, grid, report.show, timeout)
