"""What is read from files, damaged in every way: it is read, or refused in a sentence."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import struct
from pathlib import Path

import click
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import TEXT, TINY, write_model
from mesp.bundle.manifest import read_manifest
from mesp.bundle.reader import Bundle
from mesp.commands.options_from_yaml import read_config
from mesp.commands.train import main as train
from mesp.data.records import LABELS, PAIRS
from mesp.data.sources import Selection, read_documents
from mesp.errors import MespError
from mesp.federate.exchange import Arrays, averaging_error, check_arrays, clipped, drift
from mesp.runs.log import read_run
from mesp.runs.table import table_row
from mesp.source_model.safetensors import SafetensorsWeights
from test_export import export

pytestmark = pytest.mark.slow
CASES = settings(
    max_examples=400,
    deadline=None,
    derandomize=True,  # the same cases each time
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["../x", "/etc/passwd", "blocks/00.bin", "blocks", "a\0b", "uint32"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def paths(value: object, path: tuple = ()) -> list[tuple]:
    """Where every part of a JSON value lies."""
    inner = []
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    return [path, *(each for key, part in inner for each in paths(part, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, value: object) -> object:
    """A JSON value with one or two parts replaced or removed."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from([path for path in paths(value) if path]))
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        if draw(st.booleans()) and isinstance(parent, dict):
            del parent[path[-1]]
        else:
            parent[path[-1]] = draw(JSON)
    return value


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes cut off somewhere, or with some overwritten."""
    at = draw(st.integers(0, len(data)))
    middle = draw(st.binary(max_size=9))
    rest = data[at + len(middle) :] if draw(st.booleans()) else b""
    return data[:at] + middle + rest


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    model = write_model(folder / "model", TINY)
    (folder / "text.txt").write_text(TEXT)
    with contextlib.chdir(folder) if hasattr(contextlib, "chdir") else pytest.MonkeyPatch.context():
        os.chdir(folder)
        done = export("--model", model, "--data", "text.txt", "--seq-len", "8", "--out", "out.mesp")
    assert done.exit_code == 0, done.output
    return folder / "out.mesp"


@pytest.fixture(scope="module")
def copy(bundle: Path) -> Path:
    return Path(shutil.copytree(bundle, bundle.with_name("copy.mesp")))


@CASES
@given(data=st.data())
def test_manifests(bundle: Path, copy: Path, data: st.DataObject):
    original = (bundle / "manifest.json").read_bytes()
    text = data.draw(
        damaged(original)
        | changed(json.loads(original)).map(lambda manifest: json.dumps(manifest).encode())
    )
    (copy / "manifest.json").write_bytes(text)
    with contextlib.suppress(MespError):
        manifest = read_manifest(copy)
        assert min(manifest["seq_lens"]) >= 0 and manifest["ranks"]
        opened = Bundle(copy)
        opened.embedding(), opened.block(0), opened.head()
        for split in manifest.get("data") or {}:
            opened.tokens(split), opened.examples(split), opened.mask(split)


@pytest.mark.parametrize("name", ["/etc/passwd", "../out.mesp/embedding.bin", "link/00.bin", "l"])
def test_no_path_leads_out_of_the_bundle(bundle: Path, tmp_path: Path, name: str):
    copy = shutil.copytree(bundle, tmp_path / "out.mesp")
    (copy / "link").symlink_to(bundle / "blocks")
    (copy / "l").symlink_to("/etc/passwd")
    manifest = json.loads((copy / "manifest.json").read_text())
    size = (copy / name).stat().st_size
    manifest["files"].append({"path": name, "size": size, "sha256": ""})
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(MespError, match="outside of it"):
        read_manifest(copy)


STEP = {"step": 1, "loss": 2.5, "seconds": 0.5, "tokens": 8, "time": "2026-01-01T00:00:00Z"}
STEP |= {"footprint_bytes": 1, "footprint_peak_bytes": 2, "type": "step"}
LOG = [
    {"type": "start", "model": {"name": "m"}, "settings": {"method": "mesp", "rank": 8}},
    {"type": "eval", "step": 0, "loss": 3.0, "split": "valid"},
    STEP,
    {**STEP, "step": 2},
    {"type": "end", "reason": "finished", "step": 2, "seconds": 1.0, "footprint_peak_bytes": 3},
]


@CASES
@given(data=st.data())
def test_logs(tmp_path: Path, data: st.DataObject):
    records = data.draw(changed(LOG))
    text = "\n".join(map(json.dumps, records if isinstance(records, list) else [records])) + "\n"
    (tmp_path / "metrics.jsonl").write_bytes(
        data.draw(st.just(text.encode()) | damaged(text.encode()))
    )
    with contextlib.suppress(MespError):
        assert all(isinstance(cell, str) for cell in table_row(read_run(tmp_path)))


def matrices(scale: float, dtype: type = np.float32) -> Arrays:
    numbers = np.random.default_rng(0).normal(scale=scale, size=(2, 3, 4)).astype(dtype)
    return {"m.lora_a": numbers, "m.lora_b": numbers.swapaxes(1, 2).copy()}


@CASES
@given(data=st.data())
def test_matrices_of_a_federation(data: st.DataObject):
    """What passes can be averaged: no figure of it overflows, and a norm is kept."""
    start = matrices(1)
    added = matrices(data.draw(st.sampled_from([0, 1e-38, 1e-30, 1, 1e5, 1e38])))
    given = {name: start[name] + added[name] for name in start}
    name = data.draw(st.sampled_from([*given]))
    numbers = given[name].ravel()
    numbers[data.draw(st.integers(0, 23))] = data.draw(st.floats(width=32))
    given[name] = data.draw(
        st.sampled_from(
            [given[name], given[name][:1], given[name].astype(float), np.array("x"), numbers]
        )
    )
    if data.draw(st.integers(0, 9)) == 0:
        del given[name]
    try:
        check_arrays(given, start)
    except MespError:
        return
    clients, weights = [given, start], [2, 1]
    assert math.isfinite(drift(clients, weights, start))
    assert math.isfinite(averaging_error(clients, weights, start))
    after = clipped(given, start, 0.5)
    moved = sum(float(np.square(after[n].astype(float) - start[n]).sum()) for n in start)
    # A number of 1e6 has no 0.01 beside it in float32.
    assert math.sqrt(moved) <= 0.5 * (1 + 1e-5) + 24 * np.spacing(np.float32(8))


RECORDS = [
    {"text": "a"},
    {"prompt": "a", "completion": "b"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"prompt": "a", "completion": "b", "label": True},
]
KINDS = ("text", "prompt and completion", "messages", PAIRS, LABELS)


@CASES
@given(data=st.data())
def test_records_of_data(tmp_path: Path, data: st.DataObject):
    record = data.draw(changed([data.draw(st.sampled_from(RECORDS))]))
    text = json.dumps(record[0] if isinstance(record, list) and record else record).encode()
    (tmp_path / "train.jsonl").write_bytes(data.draw(st.just(text) | damaged(text)))
    with contextlib.suppress(MespError):
        for document in read_documents(str(tmp_path / "train.jsonl"), Selection())["train"]:
            assert document.kind in KINDS


@CASES
@given(data=st.data())
def test_weights(tmp_path: Path, data: st.DataObject):
    header = {
        name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [24 * i, 24 * i + 24]}
        for i, name in enumerate("ab")
    }
    text = json.dumps(data.draw(changed(header))).encode()
    file = struct.pack("<Q", len(text)) + text + np.zeros(12, np.float32).tobytes()
    (tmp_path / "model.safetensors").write_bytes(data.draw(st.just(file) | damaged(file)))
    with contextlib.suppress(MespError):
        weights = SafetensorsWeights(tmp_path, "qwen2")
        for name in "ab":
            assert weights.rows(name, (2, 3), slice(0, 2)).shape == (2, 3)


@CASES
@given(data=st.data())
def test_configurations(tmp_path: Path, data: st.DataObject):
    config = {"seq_len": 8, "projections": ["q", "v"], "learning_rate": 1e-4, "rslora": True}
    text = json.dumps(data.draw(changed(config))).encode()  # which is YAML
    path = tmp_path / "config.yaml"
    path.write_bytes(data.draw(st.just(text) | damaged(text) | st.binary(max_size=40)))
    with contextlib.suppress(click.ClickException):
        read_config(click.Context(train, info_name="mesp-train"), None, path)


def test_no_yaml_runs_code(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(f"!!python/object/apply:os.mkdir [{tmp_path / 'made'}]")
    with pytest.raises(MespError):
        read_config(click.Context(train, info_name="mesp-train"), None, path)
    assert not (tmp_path / "made").exists()
