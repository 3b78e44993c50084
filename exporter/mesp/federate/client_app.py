from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from logging import ERROR, INFO
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.logger import log

from mesp.errors import MespError
from mesp.federate.exchange import clip_update
from mesp.federate.flower_messages import in_float32, to_numpy, to_record
from mesp.federate.local_training import Client, Trained, train
from mesp.runs.privacy import Steps, epsilon, gaussian_epsilon, noise_for

NOISE = ("clip", "epsilon", "delta")
NODE = ("name", "bundle", "data")
PRIVATE = ("dp_clip", "dp_noise", "dp_delta")
MOST_EPSILON = 1000
KEPT, KEPT_STEPS = "privacy", "private-steps"


def client_app(find: Callable[[Context], Client], tells: bool) -> ClientApp:
    app = ClientApp(mods=[in_float32, with_own_noise])

    @app.train()
    def _(message: Message, context: Context) -> Message:
        client = find(context)
        received = to_numpy(message.content["arrays"])
        try:
            trained = train(client, received, message.content["config"])
        except MespError as error:
            log(ERROR, error.message)
            reason = error.message if tells else "it could not train; its own log says why."
            failed = Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{client.name}: {reason}")
            return Message(failed, reply_to=message)
        if client.privacy:
            log_privacy(client, trained, message.content["config"], context)
        metrics = {"num-examples": trained.targets, "loss": trained.loss}
        content = {
            "arrays": to_record(trained.arrays),
            "metrics": MetricRecord(metrics | {"footprint-bytes": trained.footprint}),
            "about": ConfigRecord({"name": client.name}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


def log_privacy(
    client: Client, trained: Trained, config: Mapping[str, Any], context: Context
) -> None:
    """Logs the ε of all of a client's DP-SGD steps in this `flwr run` since its node started.

    The server may change the number of steps and the sampling probability. So the client keeps both
    for each round.
    """
    sampled = config["batch_size"] / trained.examples
    counts, probabilities = [config["steps"]], [sampled]
    if KEPT_STEPS in context.state:
        counts += context.state[KEPT_STEPS]["counts"]
        probabilities += context.state[KEPT_STEPS]["sampled"]
    context.state[KEPT_STEPS] = MetricRecord({"counts": counts, "sampled": probabilities})
    noise, delta = client.privacy["dp_noise"], client.privacy["dp_delta"]
    steps = [Steps(n, noise, q) for n, q in zip(counts, probabilities, strict=True)]
    log(
        INFO,
        "Each of %d training examples is (%.3g, %g)-private in the %d steps so far, since the node "
        "was started, in this run.",
        *(trained.examples, epsilon(steps, delta), delta, sum(counts)),
    )


def with_own_noise(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """A mod of Flower that adds noise to a client's answer before it is sent.

    The noise protects a client that does not trust the server. `clip`, `epsilon` and `delta` come
    from --node-config. The log has the ε of all answers in this `flwr run` since the node started.
    """
    given = {name: context.node_config[name] for name in NOISE if name in context.node_config}
    if not given:
        return call_next(message, context)
    try:
        clip, own_epsilon, delta = (float(given[name]) for name in NOISE)
    except (KeyError, ValueError) as error:
        raise ValueError("--node-config needs the numbers clip, epsilon and delta.") from error
    if not all(0 < number < math.inf for number in (clip, own_epsilon)):
        raise ValueError("clip and epsilon of --node-config are finite and above 0.")
    if own_epsilon > MOST_EPSILON:
        raise ValueError(f"epsilon of --node-config is at most {MOST_EPSILON}: more hides nothing.")
    if not 0 < delta < 1:
        raise ValueError("delta of --node-config is a probability, above 0 and below 1.")
    received = to_numpy(message.content["arrays"])
    reply = call_next(message, context)
    if reply.has_error():
        return reply
    noise, generator = noise_for(own_epsilon, delta), np.random.default_rng()
    arrays = clip_update(to_numpy(reply.content["arrays"]), received, clip)
    reply.content["arrays"] = to_record(
        {
            name: (array + generator.normal(0, noise * 2 * clip, array.shape)).astype(np.float32)
            for name, array in arrays.items()
        }
    )
    answers = 1 + (context.state[KEPT]["answers"] if KEPT in context.state else 0)
    context.state[KEPT] = MetricRecord({"answers": answers})
    total = gaussian_epsilon(noise, delta, answers)
    log(
        INFO,
        "Answer %d has noise: all so far are (%.3g, %g)-private, since the node was started, in "
        "this run.",
        *(answers, total, delta),
    )
    return reply


def _of_node(context: Context) -> Client:
    # If the keys for noise were misspelt, the client would send its update without noise. So
    # unknown keys are refused.
    known = (*NODE, *NOISE, *PRIVATE)
    if unknown := context.node_config.keys() - {*known}:
        raise ValueError(f"--node-config has no {min(unknown)}, only {', '.join(known)}.")
    name = str(context.node_config.get("name", f"node {context.node_id}"))
    bundle = context.node_config.get("bundle")
    if bundle is None:
        raise ValueError("A SuperNode needs --node-config 'bundle=\"FOLDER\"'.")
    data = context.node_config.get("data")
    private = {each: context.node_config[each] for each in PRIVATE if each in context.node_config}
    if private and not (
        len(private) == len(PRIVATE)
        and all(type(number) in (int, float) for number in private.values())
        and 0 < private["dp_delta"] < 1
    ):
        raise ValueError(
            "--node-config needs the numbers dp_clip, dp_noise and dp_delta, a probability above 0 "
            "and below 1."
        )
    return Client(name, Path(str(bundle)), None if data is None else Path(str(data)), private)


# The app that `flower-supernode` runs. It trains with the `bundle` and on the `data` that
# --node-config names. Without `data`, it trains on the bundle's data.
app = client_app(_of_node, tells=False)
