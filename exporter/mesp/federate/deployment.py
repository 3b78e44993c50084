"""The Flower app with which `flwr run` begins a federation on real machines."""

from __future__ import annotations

import json

from mesp.errors import plain_os_errors
from mesp.federate.federation import Federation
from mesp.files import write_whole

# Server and clients have this package; the app only says where its two halves are.
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "mesp-federate"
version = "0.1.0"
description = "Federated fine-tuning with MeSP"
license = "MIT"
dependencies = ["mesp[federate]"]

[tool.flwr.app]
publisher = "mesp"

[tool.flwr.app.components]
serverapp = "mesp.federate.server_app:app"
clientapp = "mesp.federate.client_app:app"

[tool.flwr.app.config]
output = {output}
"""


def write_app(federation: Federation) -> str:
    """Writes OUTPUT/app, and returns what to do with it."""
    folder = federation.output / "app"
    with plain_os_errors(f"Cannot write {folder}"):
        folder.mkdir(exist_ok=True)
        text = PROJECT.format(output=json.dumps(str(federation.output), ensure_ascii=False))
        write_whole(folder / "pyproject.toml", text.encode())
    return f"Start it where the SuperLink runs: flwr run {folder} --stream"
