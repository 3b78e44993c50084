from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from helpers.commands import call, run
from mesp.block_function import mlxfn
from mesp.block_function.check import check_functions
from mesp.block_function.forward_pass import block_function
from mesp.bundle.reader import Bundle
from mesp.engine.build import find_engine
from mesp.errors import MespError

FLOAT32 = struct.pack("<iB", 10, 4)


def exported(folder: Path, function: Callable, *inputs: mx.array) -> bytes:
    path = folder / "function.mlxfn"
    with mx.stream(mx.cpu):
        mx.export_function(str(path), function, *(inputs or [mx.zeros(16)]))
    return path.read_bytes()


def overwrite(x: mx.array) -> mx.array:
    x[2:4] = 1.0
    return x


def shape(*sizes: int) -> bytes:
    return struct.pack(f"<Q{len(sizes)}i", len(sizes), *sizes)


def replaced(file: bytes, old: bytes, new: bytes) -> bytes:
    assert file.count(old) == 1
    return file.replace(old, new)


@pytest.mark.parametrize(
    ("primitive", "function"),
    [
        ("AsStrided", lambda x: mx.as_strided(x, (64,), (1,), 1 << 20)),
        ("SliceUpdate", overwrite),
        ("DynamicSliceUpdate", lambda x: mx.slice_update(x, x[:4], mx.array([9]), axes=(0,))),
        ("Scatter", lambda x: x.at[mx.array([3])].add(1.0)),
        ("GatherAxis", lambda x: mx.take_along_axis(x, mx.array([3]), axis=0)),
        ("Sort", lambda x: mx.sort(x)),
    ],
)
def test_other_primitives_are_refused(tmp_path, primitive, function):
    with pytest.raises(ValueError, match=f"the primitive '{primitive}' is not supported"):
        check_functions(exported(tmp_path, function), "cpu")


def test_two_arrays_of_one_id_are_refused(tmp_path):
    file = exported(tmp_path, lambda x: mx.exp(mx.sin(x)))
    first, second = (struct.pack("<Q", *each.outputs) for each in mlxfn.primitives(file))
    with pytest.raises(ValueError, match="two arrays have one id"):
        check_functions(file.replace(second, first), "cpu")


def test_source_for_a_gpu_is_refused():
    file = mlxfn.one_primitive("Softmax", (False,), [mx.zeros(4)], (4,), mx.float32)
    file = replaced(file, *(struct.pack("<Q", len(n)) + n for n in (b"Softmax", b"CustomKernel")))
    with pytest.raises(ValueError, match="the primitive 'CustomKernel' is not supported"):
        check_functions(file, "cpu")


@pytest.mark.parametrize(
    ("function", "old", "new", "said"),
    [
        (lambda x: x[mx.array(5)], struct.pack("<iBi", 7, 4, 5), struct.pack("<iBi", 7, 4, 10**6),
         "Gather: its indices may be out of bounds"),
        (lambda x: x[mx.array(5)], struct.pack("<iBi", 7, 4, 5), struct.pack("<iBi", 7, 4, -1),
         "Gather: its indices may be out of bounds"),
        (lambda x: x[2:6], shape(2) + shape(6), shape(100) + shape(104),
         "Slice: it reads outside of its input"),
        (lambda x: x[2:6], shape(4) + FLOAT32, shape(400) + FLOAT32,
         "Slice: its outputs have other shapes"),
        (lambda x: mx.exp(x), struct.pack("<Q", 0) + shape(16), struct.pack("<Q", 0) + shape(160),
         "Exp: its outputs have other shapes"),
        (lambda x: mx.exp(x), struct.pack("<Q", 0) + shape(16) + FLOAT32,
         struct.pack("<Q", 0) + shape(16) + struct.pack("<iB", 10, 1), "an unsupported type"),
        (lambda x: x.reshape(4, 4), shape(4, 4) + struct.pack("<Q", 0),
         shape(-1, -1) + struct.pack("<Q", 0), "Reshape: unsupported parameters"),
        (lambda x: x[None], shape(1, 16) + FLOAT32, shape(-1, -16) + FLOAT32,
         "a dimension is below 0"),
    ],
)  # fmt: skip
def test_a_file_that_lies_is_refused(tmp_path, function, old, new, said):
    file = exported(tmp_path, function)
    check_functions(file, "cpu")
    with pytest.raises(ValueError, match=said):
        check_functions(replaced(file, old, new), "cpu")


def one(name: str, state: bytes, shape_in: tuple, shape_out: tuple) -> bytes:
    ids = struct.pack("<QQ", 1, 0), struct.pack("<QQ", 1, 1)
    array = shape(*shape_in) + FLOAT32
    name_bytes = struct.pack("<Q", len(name)) + name.encode()
    tape = struct.pack("<QQ??", 2, 0, False, False) + struct.pack("<Q?", 1, True) + ids[0]
    tape += bytes(12) + name_bytes + state + bytes(8) + shape(*shape_out) + FLOAT32
    inputs = bytes(8) + ids[0] + struct.pack("<Q", 1) + array
    return mlxfn._header(1) + inputs + ids[1] + tape


def number(value: int) -> bytes:
    return struct.pack("<i", value)


@pytest.mark.parametrize(
    ("name", "state", "good", "bad", "said"),
    [
        ("Reduce", number(2) + shape(1), ((4, 2), (4, 1)), ((4, 1), (4, 1)), "changes nothing"),
        ("Reduce", number(2) + shape(0), ((4, 2), (1, 2)), ((0, 2), (1, 2)), "an array is empty"),
        ("Broadcast", shape(4, 2), ((1, 2), (4, 2)), ((4, 2), (4, 2)), "changes nothing"),
        ("Broadcast", shape(4, 0), None, ((4, 1), (4, 0)), "an array is empty"),
        ("ExpandDims", shape(), None, ((4,), (4,)), "changes nothing"),
        ("Flatten", number(0) + number(0), None, ((4,), (4,)), "unsupported parameters"),
        ("Unflatten", number(0) + shape(4), None, ((4,), (4,)), "changes nothing"),
        ("Slice", shape(0) + shape(4) + shape(1), ((5,), (4,)), ((4,), (4,)), "changes nothing"),
        ("Slice", shape(0) + shape(1) + shape(2), None, ((4,), (1,)), "unsupported parameters"),
        ("Split", shape() + number(0), None, ((4,), (4,)), "unsupported parameters"),
        ("Concatenate", number(0), None, ((4,), (4,)), "unsupported parameters"),
        ("AsType", FLOAT32, None, ((4,), (4,)), "changes nothing"),
        ("View", FLOAT32, None, ((4,), (4,)), "changes nothing"),
        ("Exp", b"", ((4,), (4,)), ((0,), (0,)), "an array is empty"),
        ("Softmax", b"\0", ((4,), (4,)), ((), ()), "its inputs do not match"),
    ],
    ids=str,
)  # fmt: skip
def test_what_mlx_never_makes_is_refused(name, state, good, bad, said):
    """MLX's operations never make these states, and its primitives rely on that."""
    if good:
        check_functions(one(name, state, *good), "cpu")
    with pytest.raises(ValueError, match=f"{name}: .*{said}"):
        check_functions(one(name, state, *bad), "cpu")


def test_primitives_of_a_gpu_are_refused_on_a_cpu():
    x, weight = mx.zeros((1, 4)), mx.zeros(4)
    file = mlxfn.one_primitive("RMSNorm", (1e-5,), [x, weight], x.shape, x.dtype)
    check_functions(mlxfn.on_device(file, "gpu"), "gpu")
    with pytest.raises(ValueError, match="RMSNorm: it is for a GPU only"):
        check_functions(file, "cpu")


@pytest.mark.parametrize(
    ("heads", "length", "size"), [(2, 9, 192), (2, 9, 256), (2, 8, 80), (8, 8, 64)]
)
def test_attention_without_a_kernel_is_refused(heads, length, size):
    def file(heads: int, length: int, size: int) -> bytes:
        arrays = [mx.zeros((1, each, length, size)) for each in (heads, 1, 1)]
        state = (1.0, True, False, False, False)
        name, q = "ScaledDotProductAttention", arrays[0]
        return mlxfn.on_device(mlxfn.one_primitive(name, state, arrays, q.shape, q.dtype), "gpu")

    for size_of_many in (64, 72, 80, 96, 128):
        check_functions(file(2, 9, size_of_many), "gpu")
    check_functions(file(2, 8, 96), "gpu")
    with pytest.raises(ValueError, match="its inputs do not match"):
        check_functions(file(heads, length, size), "gpu")


def test_indices_that_are_computed_are_refused_unless_masked(tmp_path):
    def function(x: mx.array, i: mx.array) -> mx.array:
        return x[i]

    def masked(x: mx.array, i: mx.array) -> mx.array:
        return x[i & 15]

    inputs = mx.zeros(16), mx.array([1], mx.uint32)
    with pytest.raises(ValueError, match="Gather: its indices may be out of bounds"):
        check_functions(exported(tmp_path, function, *inputs), "cpu")
    check_functions(exported(tmp_path, masked, *inputs), "cpu")
    with pytest.raises(ValueError, match="Gather: its indices may be out of bounds"):
        check_functions(exported(tmp_path, masked, mx.zeros(15), inputs[1]), "cpu")


@pytest.fixture
def bundle(tiny: Path, tmp_path: Path) -> Path:
    record = tmp_path / "text.jsonl"
    record.write_text('{"text": "a dog and a cat and a dog"}\n' * 8)
    options = ("--seq-len", 8, "--data", record)
    call("export", "--model", tiny, *options, "--out", tmp_path / "b")
    return tmp_path / "b"


NAME = "block.plain.8.mlxfn"


def exchanged(outputs: list[mx.array]) -> list[mx.array]:
    return [*outputs[:5], outputs[7], *outputs[6:]]


def rounded(outputs: list[mx.array]) -> list[mx.array]:
    return [outputs[0].astype(mx.bfloat16), *outputs[1:]]


@pytest.mark.parametrize("change", [exchanged, rounded, lambda outputs: outputs[:-1]])
def test_a_function_has_the_outputs_of_a_block(bundle, tmp_path, change):
    opened = Bundle(bundle)
    block = opened.architecture.blocks[0]
    original = block_function(block, opened.group(0).layout)
    x, lora = mx.zeros((1, 8, opened.architecture.hidden_size)), mx.zeros(block.lora_size(8))
    inputs = x, lora, mx.array(1.0), opened.block_words(0)
    file = exported(tmp_path, lambda *arrays: change(original(*arrays)), *inputs)
    check_functions(file, "cpu")
    said = "it does not have the inputs and outputs of a block"
    check_refused(bundle, file, said, said)


def check_refused(bundle: Path, file: bytes, here: str, engine: str) -> None:
    """The manifest has the digest of the file. On a CPU, only MeBP runs a bundle's functions."""
    (bundle / NAME).write_bytes(file)
    manifest = json.loads((bundle / "manifest.json").read_text())
    (entry,) = [each for each in manifest["files"] if each["path"] == NAME]
    entry |= {"size": len(file), "sha256": hashlib.sha256(file).hexdigest()}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(MespError, match=here):
        Bundle(bundle).function(8, plain=True)
    find_engine()
    done = run("train", bundle, "--method", "mebp", "--steps", 1, "--out", bundle.with_name("run"))
    assert done.returncode == 2 and "Traceback" not in done.stderr
    writes = f"{NAME} in {bundle} is not a function that mesp-export writes"
    said = f"Error: {writes} ({engine}); export the bundle again."
    assert done.stderr.splitlines()[-1].startswith(said)


def test_the_file_is_for_one_device(tmp_path):
    file = exported(tmp_path, mx.exp)
    with pytest.raises(ValueError, match="for another device"):
        check_functions(file, "gpu")
    check_functions(mlxfn.on_device(file, "gpu"), "gpu")


def test_the_engine_checks_a_function_before_mlx_reads_it(bundle, tmp_path):
    file = exported(tmp_path, lambda x: mx.as_strided(x, (64,), (1,), 1 << 20))
    check_refused(bundle, file, "AsStrided", "the primitive AsStrided is not supported")
