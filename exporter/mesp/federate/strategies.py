from __future__ import annotations

import inspect
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, strategy
from flwr.serverapp.strategy import Strategy

from mesp.errors import MespError
from mesp.federate.exchange import (
    Arrays,
    averaging_error,
    check_arrays,
    clip_update,
    drift,
    pack,
    unpack,
)
from mesp.federate.federation import STRATEGIES
from mesp.federate.flower_messages import to_numpy, to_record

# The attributes with FedAdam's state, its moments.
KEPT = ("m_t", "v_t")
# As the weight, it lets all clients count equally.
ONE = "client"
MOST_CHARACTERS = 500  # the longest name or reason that is shown
HEADER = 256


def make_strategy(options: dict[str, Any]) -> Strategy:
    kind = getattr(strategy, STRATEGIES[options["strategy"]])
    given = dict(options["strategy_options"])
    numbers = {
        name: each.default
        for name, each in inspect.signature(kind).parameters.items()
        if isinstance(each.default, int | float)
    }
    for name, value in given.items():
        if name not in numbers:
            raise MespError(
                f"--strategy {options['strategy']} has no option {name}; it has "
                f"{', '.join(sorted(numbers))}."
            )
        is_whole = isinstance(numbers[name], int)
        if not math.isfinite(value) or (is_whole and value != int(value)):
            raise MespError(
                f"--strategy-options {name}={value:g} is not a {'whole' if is_whole else 'finite'} "
                "number."
            )
        given[name] = int(value) if is_whole else value
    limits = {
        "min_available_nodes": options["clients"],
        "min_train_nodes": options["clients"],
        "fraction_train": 1,
    }
    for name, most in limits.items():
        if not 0 < given.get(name, most) <= most:
            raise MespError(
                f"--strategy-options {name} is above 0 and at most {most}, or a round would wait "
                "for clients forever."
            )
    private = options["noise"] is not None
    defaults = {
        "min_available_nodes": options["clients"],
        "min_train_nodes": 1,
        # Noise hides each client only if all clients count equally.
        "weighted_by_key": ONE if private else "num-examples",
    }
    try:
        inner = kind(**defaults | given)
    except ValueError as error:
        raise MespError(f"--strategy-options do not suit {options['strategy']}: {error}") from error
    if not private:
        return inner
    # `Screened` clips the answers. This strategy adds noise to their mean.
    return strategy.DifferentialPrivacyClientSideFixedClipping(
        inner, options["noise"], options["clip"], options["clients"]
    )


def state_of(inner: Strategy) -> bytes | None:
    arrays = {
        f"{kind}/{name}": array
        for kind in KEPT
        for name, array in (getattr(_innermost(inner), kind, None) or {}).items()
    }
    if not arrays:
        return None
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def restore(inner: Strategy, path: Path) -> None:
    kept = dict(np.load(path)) if path.exists() else {}
    for kind in KEPT:
        if hasattr(_innermost(inner), kind):
            arrays = {n.partition("/")[2]: kept[n] for n in kept if n.startswith(f"{kind}/")}
            setattr(_innermost(inner), kind, arrays or None)


def _innermost(inner: Strategy) -> Strategy:
    return getattr(inner, "strategy", inner)


@dataclass
class Screened(Strategy):
    """A strategy that passes only valid answers to the strategy `inner`.

    A valid answer has metrics, and the matrices of the model with finite numbers of at most
    `exchange.MOST` in absolute value. `inner` gets float32 matrices. If `clip` is given, their
    change is scaled down to a norm of at most `clip`.
    """

    inner: Strategy
    first: int
    exchange: str
    most_targets: int
    needed: int
    clip: float | None
    keep: Callable[[int, Arrays, dict[str, Any]], Arrays]
    sent: Arrays = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    names: dict[int, str] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.sent = to_numpy(arrays)
        number = self.first + server_round
        messages = list(self.inner.configure_train(number, arrays, config, grid))
        self.asked = {message.metadata.dst_node_id for message in messages}
        down = arrays if self.exchange == "float32" else to_record(pack(self.sent))
        for message in messages:
            message.content["arrays"] = down
        self.report = {"bytes_down": _size(down) * len(messages)}
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        taken: list[tuple[str, int, Message]] = []
        left_out: list[str] = []
        silent, up = set(self.asked), 0
        for reply in replies:
            node = reply.metadata.src_node_id
            name = self.names.get(node, f"node {node}")
            try:
                if node not in silent:
                    raise MespError("it was not asked, or has answered before")
                silent.discard(node)
                if reply.has_error():
                    left_out.append(_printable(reply.error.reason))
                    continue
                up += sum(map(_size, reply.content.array_records.values()))
                self.names[node] = name = _printable(reply.content["about"]["name"])
                taken.append((name, node, self._screened(reply)))
            except MespError as error:
                left_out.append(f"{name}: {_printable(error.message)}")
            except Exception as error:  # an untrusted message can raise anything
                why = _printable(f"its answer does not follow docs/federation.md: {error}")
                left_out.append(f"{name}: {why}")
        left_out += [f"{self.names.get(n, f'node {n}')}: did not answer in time." for n in silent]
        number = self.first + server_round
        if len(taken) < self.needed:
            raise MespError(
                f"Round {number} has adapters of {len(taken)} clients and needs {self.needed}: "
                + " ".join(sorted(left_out))
            )
        # Sums of float32 depend on the order, and answers arrive in any order. So the answers are
        # sorted.
        taken.sort(key=lambda each: each[:2])
        replies = [reply for *_, reply in taken]
        self.report |= self._report(replies) | {"bytes_up": up, "left_out": sorted(left_out)}
        if isinstance(self.inner, strategy.DifferentialPrivacyClientSideFixedClipping):
            self.inner.num_sampled_clients = len(taken)
        averaged, metrics = self.inner.aggregate_train(number, replies)
        if averaged is None:
            raise MespError(f"The strategy returned no adapters in round {number}.")
        arrays = {name: array.astype(np.float32) for name, array in to_numpy(averaged).items()}
        if not all(np.isfinite(array).all() for array in arrays.values()):
            raise MespError(
                f"The strategy's adapters of round {number} are not finite; lower its rates in "
                "--strategy-options."
            )
        return to_record(self.keep(number, arrays, self.report)), metrics

    def _screened(self, reply: Message) -> Message:
        metrics = reply.content["metrics"]
        targets, loss = metrics["num-examples"], metrics["loss"]
        footprint = metrics["footprint-bytes"]
        if not (isinstance(targets, int) and 0 < targets <= self.most_targets):
            raise MespError(f"it counts {targets} targets, more than {self.most_targets}")
        if not (
            isinstance(loss, float)
            and math.isfinite(loss)
            and isinstance(footprint, int)
            and footprint >= 0
        ):
            raise MespError("its metrics do not follow docs/federation.md")
        expected = self.sent if self.exchange == "float32" else pack(self.sent)
        wanted = sum(array.nbytes + HEADER for array in expected.values())
        # Larger arrays are read up to 4 times the expected size, so that an error can name a wrong
        # dtype.
        if (size := _size(reply.content["arrays"])) > 4 * wanted:
            raise MespError(f"it sends {size} bytes, more than the {wanted} needed")
        arrays = to_numpy(reply.content["arrays"])
        check_arrays(arrays, expected)
        if self.exchange == "bfloat16":
            arrays = {n: self.sent[n] + added for n, added in unpack(arrays).items()}
        if self.clip is not None:
            arrays = clip_update(arrays, self.sent, self.clip)
        kept = {"num-examples": targets, "loss": loss, "footprint-bytes": footprint, ONE: 1}
        arrays = {name: arrays[name] for name in self.sent}
        reply.content = RecordDict({"arrays": to_record(arrays), "metrics": MetricRecord(kept)})
        return reply

    def _report(self, replies: list[Message]) -> dict[str, Any]:
        arrays = [to_numpy(reply.content["arrays"]) for reply in replies]
        metrics = [reply.content["metrics"] for reply in replies]
        targets = [each["num-examples"] for each in metrics]
        clients = [
            {
                "name": self.names[reply.metadata.src_node_id],
                "targets": each["num-examples"],
                "loss": each["loss"],
                "footprint_bytes": each["footprint-bytes"],
            }
            for reply, each in zip(replies, metrics, strict=True)
        ]
        return {
            "clients": clients,
            "drift": drift(arrays, targets, self.sent),
            "averaging_error": averaging_error(arrays, targets, self.sent),
        }

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return ()  # the server evaluates, not the clients

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        self.inner.summary()


def _printable(text: object) -> str:
    return "".join(each if each.isprintable() else " " for each in str(text))[:MOST_CHARACTERS]


def _size(record: ArrayRecord) -> int:
    return sum(len(array.data) for array in record.values())
