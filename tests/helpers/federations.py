import json
from pathlib import Path

import numpy as np

from helpers.commands import call
from mesp.commands.federate import main, prepare_federation
from mesp.federate.exchange import Arrays, read_arrays
from mesp.federate.federation import Federation

SEQ_LEN, RANK = 32, 4
RECORDS = [
    {"prompt": f"{number} and {number + 1} are ", "completion": str(2 * number + 1)}
    for number in range(40)
]
SGD = ("--optimizer", "sgd", "--learning-rate", 0.5)
B = "self_attn.q_proj.lora_b"


def write_records(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def federation(bundle: Path, data: Path, output: Path, *options: object) -> Federation:
    arguments = (bundle, "--data", data, "--out", output, *options)
    with main.make_context("mesp federate", [*map(str, arguments)]) as context:
        return prepare_federation(context)


def trained_here(bundle: Path, output: Path, *options: object) -> Arrays:
    call("train", bundle, "--out", output, "--val-batches", 0, *options)
    return read_arrays(output / "adapters")


def equal(a: Arrays, b: Arrays) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
