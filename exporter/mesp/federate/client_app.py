"""Flower's ClientApp around a client's part of a round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.common.constant import ErrorCode

from mesp.errors import MespError
from mesp.federate.local_training import Client, train
from mesp.federate.messages import in_float32, to_numpy, to_record


def client_app(find: Callable[[Context], Client]) -> ClientApp:
    """An app that trains as the client which `find` gives. What fails is answered in a sentence."""
    app = ClientApp(mods=[in_float32, with_own_noise])

    @app.train()
    def _(message: Message, context: Context) -> Message:
        client = find(context)
        received = to_numpy(message.content["arrays"])
        try:
            trained = train(client, received, message.content["config"])
        except MespError as error:
            reason = f"{client.name}: {error.message}"
            error = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason)
            return Message(error, reply_to=message)
        metrics = {
            "num-examples": trained.targets,
            "loss": trained.loss,
            "footprint-bytes": trained.footprint,
        }
        content = {
            "arrays": to_record(trained.arrays),
            "metrics": MetricRecord(metrics),
            "about": ConfigRecord({"name": client.name}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def with_own_noise(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """The mod for a client that trusts no server, by `clip`, `epsilon` and `delta` of its
    --node-config: what it adds is clipped and gets noise before it leaves.

    Any two updates of norm C at most differ by 2 C, the mechanism's sensitivity.
    """
    config = context.node_config
    if "epsilon" not in config:
        return call_next(message, context)
    clip, epsilon, delta = (float(config[name]) for name in ("clip", "epsilon", "delta"))
    return LocalDpMod(clip, 2 * clip, epsilon, delta)(message, context, call_next)


def _of_node(context: Context) -> Client:
    name = str(context.node_config.get("name", f"node {context.node_id}"))
    bundle = context.node_config.get("bundle")
    if bundle is None:
        raise ValueError("A SuperNode needs --node-config 'bundle=\"FOLDER\"'.")
    data = context.node_config.get("data")
    return Client(name, Path(str(bundle)), None if data is None else Path(str(data)))


# What `flower-supernode` runs: the bundle of its --node-config, with its `data` or that in it.
app = client_app(_of_node)
