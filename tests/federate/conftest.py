from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.commands import call
from helpers.federations import RANK, RECORDS, SEQ_LEN, federation, write_records
from mesp.engine.build import find_engine
from mesp.federate.federation import Federation


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


@pytest.fixture
def federate(bundle: Path, data: Path, tmp_path: Path) -> Callable[..., Federation]:
    def federate(*options: object, name: str = "f") -> Federation:
        return federation(bundle, data, tmp_path / name, *options)

    return federate
