import contextlib
import gzip
import io
import json
import math
import re
import shutil
import struct
from pathlib import Path
from types import SimpleNamespace

import click
import mlx.core as mx
import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.adapters import write_adapters, write_peft
from helpers.commands import call
from helpers.damage import changed, damaged, texts
from helpers.gguf_files import MODELS, write_gguf
from helpers.models import FAMILIES, TEXT, TINY, random_tensors, write_model
from mesp.adapters.load import read_adapters
from mesp.block_function.check import check_functions
from mesp.block_function.mlxfn import DTYPES
from mesp.bundle.manifest import read_manifest
from mesp.bundle.reader import Bundle
from mesp.bundle.weight_files import weight_files
from mesp.bundle.writer import write_config_and_tokenizer
from mesp.commands.config import read_config
from mesp.commands.train import main as train
from mesp.data.records import AnyRecord
from mesp.data.sources import Selection, read_data
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.engine.train import prepare_training
from mesp.errors import MespError
from mesp.federate.exchange import Arrays, averaging_error, check_arrays, clip_update, drift
from mesp.models.architecture import Architecture
from mesp.models.config_json import check_lengths
from mesp.quantization.choose import check_quantizations, find_quantizations
from mesp.runs import report
from mesp.runs.log import RunLog
from mesp.runs.report_columns import table_row
from mesp.source_model.find import find_source
from mesp.source_model.gguf.header import GGUF
from mesp.source_model.gguf.weights import GGUFWeights
from mesp.source_model.safetensors import SafetensorsWeights

pytestmark = pytest.mark.slow
TYPES = {(code, dtype.size): dtype for code, dtype in enumerate(DTYPES)}


@st.composite
def overwritten(draw: st.DrawFn, data: bytes) -> bytes:
    data = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data) - 8))
        value = draw(st.integers(-4, 4) | st.sampled_from([10, 12, 256, 2**31 - 1, -(2**31)]))
        data[at : at + 4] = struct.pack("<i", value)
    return bytes(data)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    model = write_model(folder / "model", TINY)
    (folder / "text.txt").write_text(TEXT)
    data = ("--data", folder / "text.txt", "--seq-len", 8)
    call("export", "--model", model, *data, "--out", folder / "out.mesp")
    return folder / "out.mesp"


@pytest.fixture(scope="module")
def copy(bundle: Path) -> Path:
    return Path(shutil.copytree(bundle, bundle.with_name("copy.mesp")))


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
        assert min(manifest.seq_lens) >= 0 and manifest.ranks
        opened = Bundle(copy)
        opened.embedding(), opened.block(0), opened.head()
        for split in manifest.data:
            opened.tokens(split), opened.examples(split), opened.mask(split)


STEP = {"step": 1, "loss": 2.5, "seconds": 0.5, "tokens": 8, "time": "2026-01-01T00:00:00Z"}
STEP |= {"input_tokens": 9, "footprint_bytes": 1, "footprint_peak_bytes": 2, "type": "step"}
LOG = [
    {"type": "start", "model": {"name": "m"}, "settings": {"method": "mesp", "rank": 8}},
    {"type": "eval", "step": 0, "loss": 3.0, "split": "valid"},
    STEP,
    {**STEP, "step": 2},
    {"type": "end", "reason": "finished", "step": 2, "seconds": 1.0, "footprint_peak_bytes": 3},
]


@given(data=st.data())
def test_logs(tmp_path: Path, data: st.DataObject):
    records = data.draw(changed(LOG))
    text = "\n".join(map(json.dumps, records if isinstance(records, list) else [records])) + "\n"
    (tmp_path / "metrics.jsonl").write_bytes(
        data.draw(st.just(text.encode()) | damaged(text.encode()))
    )
    with contextlib.suppress(MespError):
        found = RunLog.load(tmp_path)
        assert all(isinstance(cell, str) for cell in table_row(found).values())
        runs = {"a": found}
        report.render_document(found.model, report.render_table(runs, report.summary_rows(runs)))
        report.render_table(runs, report.settings_rows(runs))
        report.render_events(runs)


def matrices(scale: float, dtype: type = np.float32) -> Arrays:
    numbers = np.random.default_rng(0).normal(scale=scale, size=(2, 3, 4)).astype(dtype)
    return {"m.lora_a": numbers, "m.lora_b": numbers.swapaxes(1, 2).copy()}


@given(data=st.data())
def test_matrices_of_a_federation(data: st.DataObject):
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
    after = clip_update(given, start, 0.5)
    moved = sum(float(np.square(after[n].astype(float) - start[n]).sum()) for n in start)
    # The tolerance allows for rounding to float32.
    assert math.sqrt(moved) <= 0.5 * (1 + 1e-5) + 24 * np.spacing(np.float32(8))


RECORDS = [
    {"text": "a"},
    {"prompt": "a", "completion": "b"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"prompt": "a", "completion": "b", "label": True},
]


@given(data=st.data())
def test_records_of_data(tmp_path: Path, data: st.DataObject):
    record = data.draw(changed([data.draw(st.sampled_from(RECORDS))]))
    text = json.dumps(record[0] if isinstance(record, list) and record else record).encode()
    (tmp_path / "train.jsonl").write_bytes(data.draw(st.just(text) | damaged(text)))
    with contextlib.suppress(MespError):
        for document in read_data(str(tmp_path / "train.jsonl"), Selection())["train"]:
            assert isinstance(document, AnyRecord)


def files_of_data() -> dict[str, bytes]:
    records = [{"messages": record["messages"]} for record in RECORDS[2:3]] * 3
    table, lines = io.BytesIO(), "".join(f"{json.dumps(record)}\n" for record in records).encode()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), table)
    return {
        "a.parquet": table.getvalue(),
        "a.json": json.dumps(records).encode(),
        "a.jsonl.gz": gzip.compress(lines),
        "a.csv": b'prompt,completion\n"a\nb",c\n',
    }


@pytest.mark.parametrize("name", files_of_data())
@given(data=st.data())
def test_files_of_data(tmp_path: Path, name: str, data: st.DataObject):
    (tmp_path / name).write_bytes(data.draw(damaged(files_of_data()[name])))
    with contextlib.suppress(MespError):
        for document in read_data(str(tmp_path / name), Selection())["train"]:
            assert isinstance(document, AnyRecord)


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
        weights = SafetensorsWeights(tmp_path, Architecture.from_config(FAMILIES["qwen2"]))
        for name in "ab":
            assert weights.rows(name, (2, 3), slice(0, 2)).shape == (2, 3)


@pytest.fixture(scope="module")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("gguf")
    kinds = {"gemma3_text": "pieces", "qwen3_5_text": "qwen35", "lfm2": "lfm2", "phi3": "smollm"}
    return [
        write_gguf(folder / name, name, random_tensors(MODELS[name][1]), vocabulary=vocabulary)
        for name, vocabulary in kinds.items()
    ]


@st.composite
def damaged_gguf(draw: st.DrawFn, file: bytes) -> bytes:
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged(file))
    names = re.compile(rb"general|tokenizer|blk|[.](attention|rope|ssm|shortconv|\w+_length)")
    keys = [match.start() for match in names.finditer(file)]
    changed = bytearray(file)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(keys)) + draw(st.integers(-16, 48))
        value = draw(
            st.integers(-2, 16) | st.sampled_from([2**31 - 1, -(2**31), 1 << 20, 0x7FC00000])
        )
        changed[at : at + 4] = struct.pack("<i", value)
    return bytes(changed)


@given(data=st.data())
def test_gguf_files(gguf_files: list[Path], tmp_path: Path, data: st.DataObject):
    path = tmp_path / "m.gguf"
    file = data.draw(st.sampled_from(gguf_files)).read_bytes()
    path.unlink(missing_ok=True)  # replaces the file, because the previous one may still be mapped
    path.write_bytes(data.draw(damaged_gguf(file)))
    with contextlib.suppress(MespError):
        convert(path)


def convert(path: Path) -> None:
    source = find_source(str(path), random_weights=False)
    arch = Architecture.from_config(source.config)
    quantizations = find_quantizations(source.name, source.config, arch, None, None, None, None)
    check_quantizations(arch, quantizations)
    weights = GGUFWeights(source.gguf, arch)
    options = SimpleNamespace(quantizations=quantizations, dtype="float32")
    for layout, pieces in weight_files(weights, arch, options).values():
        for part, _, array in pieces:
            assert array.shape[1:] == layout[part].shape[1:]


METADATA = [
    *("", "a", "\x1b", True, False, 0, 1, -1, 7, 1 << 26, (1 << 31) - 1, (1 << 64) - 1, -(1 << 63)),
    *(0.0, -1.0, 1e-40, 3e38, math.nan, math.inf, [], ["a", "b"], ["a"] * 512),
    *(np.array([], np.uint32), np.array([1, 2], np.int32), np.zeros(512, np.float32)),
    *(np.array([True]), np.full(3, -1, np.int64), np.array([math.nan, 1.0])),
]


@given(data=st.data())
def test_metadata_of_gguf_files(gguf_files: list[Path], data: st.DataObject):
    path = data.draw(st.sampled_from(gguf_files))
    file = GGUF.read(path)
    keys = [*file.metadata, "split.count", "general.type", "general.alignment", "general.license"]
    keys += ["tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"]
    for _ in range(data.draw(st.integers(1, 2))):
        file.metadata[data.draw(st.sampled_from(keys))] = data.draw(st.sampled_from(METADATA))
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(MespError):
        patch.setattr(GGUF, "read", lambda path: file)
        convert(path)


@given(data=st.data())
def test_configurations(tmp_path: Path, data: st.DataObject):
    config = {"seq_len": 8, "projections": ["q", "v"], "learning_rate": 1e-4, "rslora": True}
    text = json.dumps(data.draw(changed(config))).encode()  # JSON is also YAML
    path = tmp_path / "config.yaml"
    path.write_bytes(data.draw(st.just(text) | damaged(text) | st.binary(max_size=40)))
    with contextlib.suppress(click.ClickException, MespError):
        read_config(click.Context(train, info_name="mesp-train"), None, path)


@given(data=st.data())
def test_functions(bundle: Path, tmp_path: Path, data: st.DataObject):
    original = data.draw(st.sampled_from(sorted(bundle.glob("*.mlxfn")))).read_bytes()
    file = data.draw(damaged(original) | overwritten(original))
    path = tmp_path / "function.mlxfn"
    path.unlink(missing_ok=True)  # MLX may still read the previous file
    path.write_bytes(file)
    with contextlib.suppress(MespError, ValueError):
        for function in check_functions(file, "cpu"):
            values = [mx.zeros(each.shape, TYPES[each.dtype]) for each in function.inputs.values()]
            with contextlib.suppress(RuntimeError):
                mx.eval(mx.import_function(str(path))(*values))


@pytest.fixture(scope="module", params=["mlx", "peft", "mlx-dora", "peft-dora"])
def adapters(request: pytest.FixtureRequest, bundle: Path) -> Path:
    folder = bundle.with_name(f"adapters-{request.param}")
    write_adapters(folder, bundle, dora="dora" in request.param)
    return write_peft(folder / "peft", bundle, folder) if "peft" in request.param else folder


@given(data=st.data())
def test_adapters(bundle: Path, adapters: Path, tmp_path: Path, data: st.DataObject):
    architecture = Bundle(bundle).architecture
    (file,) = adapters.glob("*.safetensors")
    weights = file.read_bytes()
    start = 8 + int.from_bytes(weights[:8], "little")
    header = json.dumps(data.draw(changed(json.loads(weights[8:start])))).encode()
    relabelled = struct.pack("<Q", len(header)) + header + weights[start:]
    (tmp_path / file.name).write_bytes(
        data.draw(st.just(weights) | damaged(weights) | st.just(relabelled))
    )
    config = (adapters / "adapter_config.json").read_bytes()
    (tmp_path / "adapter_config.json").write_bytes(data.draw(texts(config)))
    with contextlib.suppress(MespError):
        read = read_adapters(tmp_path, architecture)
        assert math.isfinite(read.scale) and read.matrices
        for a, b, *m in read.matrices.values():
            assert a.shape[1] == b.shape[0] and all(each.shape == b.shape[1:] for each in m)
            assert all(mx.isfinite(each).all() for each in (a, b, *m))


@given(data=st.data())
def test_models(tmp_path: Path, data: st.DataObject):
    config = data.draw(st.sampled_from(sorted(FAMILIES)).map(FAMILIES.get))
    if data.draw(st.booleans()):
        config = config | {"quantization": {"bits": 4, "group_size": 32, "lm_head": {"bits": 8}}}
    (tmp_path / "config.json").write_bytes(data.draw(texts(json.dumps(config).encode())))
    with contextlib.suppress(MespError):
        source = find_source(str(tmp_path), random_weights=True)
        arch = Architecture.from_config(source.config)
        quantizations = find_quantizations(source.name, source.config, arch, None, None, None, None)
        check_quantizations(arch, quantizations)
        check_lengths(source.config, [8])
        (tmp_path / "out").mkdir(exist_ok=True)
        write_config_and_tokenizer(source, tmp_path / "out", arch, quantizations)


@given(data=st.data())
def test_tokenizers(bundle: Path, copy: Path, data: st.DataObject):
    for name in ("tokenizer_config.json", "config.json"):
        (copy / name).write_bytes(data.draw(texts((bundle / name).read_bytes())))
    with contextlib.suppress(MespError):
        tokenizer = load_bundle_tokenizer(copy)
        assert sorted(tokenizer.eos_token_ids) is not None and tokenizer.encode("a dog")
    with contextlib.suppress(MespError):
        Bundle(copy).config()


@given(data=st.data())
def test_indices_of_weights(tmp_path: Path, data: st.DataObject):
    text = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(data.draw(texts(text.encode())))
    with contextlib.suppress(MespError):
        SafetensorsWeights(tmp_path, Architecture.from_config(FAMILIES["qwen2"]))


@given(data=st.data())
def test_settings_of_runs(tmp_path: Path, data: st.DataObject):
    options = {option.name: option.default for option in train.params if option.expose_value}
    recorded = {n: v for n, v in options.items() if isinstance(v, bool | int | float | str | None)}
    recorded |= {"bundle": "b", "steps": 3, "seq_len": 8, "projections": ["q", "v"]}
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "settings.json").write_bytes(data.draw(texts(json.dumps(recorded).encode())))
    with contextlib.suppress(MespError):
        settings = prepare_training(None, tmp_path, True, False, {}).settings
        assert settings.warmup >= 0 and settings.steps >= 1
