from __future__ import annotations

import logging
import os

# All must be set before Flower and Ray are imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

# isort: split
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from mesp.errors import MespError
from mesp.federate.client_app import client_app
from mesp.federate.federation import Federation
from mesp.federate.local_training import Client
from mesp.federate.server_app import Show, serve


def simulate(federation: Federation, show: Show) -> None:
    failed: list[MespError] = []
    server = ServerApp()

    @server.main()
    def _(grid: Grid, _: Context) -> None:
        try:
            # Clients wait for each other here, so answers have no time limit. Each client's own
            # time limit begins when it starts.
            serve(federation, grid, show, timeout=None)
        except MespError as error:
            failed.append(error)

    def find(context: Context) -> Client:
        return federation.client(int(context.node_config["partition-id"]))

    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    run_simulation(
        server,
        client_app(find, tells=True),
        num_supernodes=federation.options["clients"],
        backend_config={
            "client_resources": {"num_cpus": 1},
            "init_args": {"logging_level": "error", "log_to_driver": False},
        },
    )
    if failed:
        raise failed[0]
