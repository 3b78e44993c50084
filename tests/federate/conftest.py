from pathlib import Path

import pytest

from helpers.commands import call
from helpers.federations import RANK, RECORDS, SEQ_LEN, write_records
from mesp.engine.build import find_engine


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_records(folder / "train.jsonl", RECORDS[:32])
    write_records(folder / "valid.jsonl", RECORDS[32:])
    return folder


@pytest.fixture(scope="module")
def bundle(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    find_engine()
    path = tmp_path_factory.mktemp("demo") / "demo.mesp"
    options = ("--data", data, "--seq-len", SEQ_LEN, "--rank", RANK)
    call("export", "--model", "demo", "--out", path, *options)
    return path
