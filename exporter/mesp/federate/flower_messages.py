from __future__ import annotations

from collections.abc import Callable

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message

from mesp.errors import MespError
from mesp.federate.exchange import Arrays, pack, unpack


def to_numpy(record: ArrayRecord) -> Arrays:
    """Returns the arrays of a record.

    Raises MespError if an array is an archive, which NumPy would open.
    """
    arrays = {name: array.numpy() for name, array in record.items()}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise MespError(f"its {name} is an archive and not an array")
    return arrays


def to_record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def in_float32(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """A mod of Flower that gives the app float32 arrays, whatever the message's dtype.

    If the message has bfloat16 arrays, the reply has the change of each array in bfloat16.
    """
    if message.content["config"]["exchange"] == "float32":
        return call_next(message, context)
    received = unpack(to_numpy(message.content["arrays"]))
    message.content["arrays"] = to_record(received)
    reply = call_next(message, context)
    if not reply.has_error():
        added = {n: a - received[n] for n, a in to_numpy(reply.content["arrays"]).items()}
        reply.content["arrays"] = to_record(pack(added))
    return reply
