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

# The seconds that a client's answer may take in addition to its training.
TO_ANSWER = 30.0

Show = Callable[[dict[str, Any]], None]


def serve(federation: Federation, grid: Grid, show: Show, timeout: float | None) -> None:
    """Runs all missing rounds.

    After `timeout` seconds, a round continues without clients that have not answered.
    """
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
                total = gaussian_epsilon(options["noise"], options["delta"], number)
                report = report | {"epsilon": total, "delta": options["delta"]}
            try:
                record = rounds.save(number, arrays, report, state_of(inner))
            except MespError as error:
                # Adapters that cannot be evaluated must not be trained further. So this round keeps
                # the adapters of the round before.
                arrays, before = rounds.arrays(number - 1), rounds.path(number - 1) / STATE_NAME
                restore(inner, before)
                report = report | {"discarded": error.message}
                record = rounds.save(number, arrays, report, state_of(inner))
            show(record)
            return arrays

        screened = Screened(
            inner, done, options["exchange"], sequences * options["seq_len"],
            options["min_clients"], options["clip"], keep,
        )  # fmt: skip
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
    federation = Federation.read(Path(str(context.run_config["output"])))
    with RoundsProgress(federation.options["rounds"]) as report:
        timeout = federation.options["timeout"] + TO_ANSWER
        serve(federation, grid, report.show, timeout)
