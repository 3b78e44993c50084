from __future__ import annotations

import math
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from unittest import mock

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from helpers.adapters import SCALE, write_adapters
from helpers.commands import call, run
from helpers.gguf_files import MODELS, q8_0, write_gguf
from helpers.models import TEXT, random_tensors, write_model
from mesp import hub_download
from mesp.bundle.reader import Bundle
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.source_model import find
from mesp.source_model.gguf.config import config_of
from mesp.source_model.gguf.header import GGUF, copy
from mesp.source_model.gguf.tokenizer import write_tokenizer

SIZE = ("--seq-len", 8, "--rank", 2)


def number(value: int) -> gguf.GGUFValue:
    return gguf.GGUFValue(value, gguf.GGUFValueType.UINT64)


def floats(value: float) -> gguf.GGUFValue:
    return gguf.GGUFValue(value, gguf.GGUFValueType.FLOAT32)


def text(value: str) -> gguf.GGUFValue:
    return gguf.GGUFValue(value, gguf.GGUFValueType.STRING)


def export(model: Path, out: Path, *options: object) -> Bundle:
    call("export", "--model", model, "--out", out, *SIZE, *options)
    return Bundle(out)


def in_8_bits(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """A weight d · q of Q8_0 is scale · (q + 128) + bias, with scale d and bias -128 · d."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2:
            found[name] = tensor
            continue
        blocks = gguf.quantize(np.array(tensor), Type.Q8_0).reshape(len(tensor), -1, 34)
        scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
        codes = np.ascontiguousarray(blocks[..., 2:] + np.uint8(128)).reshape(len(tensor), -1)
        module = name.removesuffix(".weight")
        found[name] = mx.array(codes.view(np.uint32))
        found[f"{module}.scales"] = mx.array(scales)
        found[f"{module}.biases"] = mx.array(-128 * scales)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_bundle_is_that_of_the_same_model_in_mlx_lms_form(name: str, tmp_path: Path):
    _, config = MODELS[name]
    tensors = random_tensors(config)
    file = write_gguf(tmp_path / "tiny.gguf", name, tensors)
    config = config | {"quantization": {"group_size": 32, "bits": 8}}
    folder = write_model(tmp_path / "tiny", config, in_8_bits(tensors))
    ours, theirs = export(file, tmp_path / "a.mesp"), export(folder, tmp_path / "b.mesp")
    assert ours.architecture.to_manifest() == theirs.architecture.to_manifest()
    for path, layout in theirs.weight_files().items():
        found, expected = layout.unpack(ours.words(path)), layout.unpack(theirs.words(path))
        for key, array in expected.items():
            # GGUF stores -exp(A_log), so A_log is equal only within rounding.
            equal = mx.allclose if key.endswith("A_log") else mx.array_equal
            assert equal(found[key], array), f"{path} {key}"
    ids = [load_bundle_tokenizer(bundle.path).encode(TEXT) for bundle in (ours, theirs)]
    assert ids[0] == ids[1]
    assert ours.to_mlx_lm() is not None


BLOCKS = {
    "Q4_0": ([0], 4, 32), "Q4_1": ([0, 2], 4, 32), "Q5_0": ([0], 5, 32), "Q5_1": ([0, 2], 5, 32),
    "Q8_0": ([0], 8, 32), "Q3_K": ([108], 8, 128), "Q4_K": ([0, 2], 4, 32), "Q5_K": ([0, 2], 5, 32),
    "MXFP4": ([], 4, 32), "Q6_K": ([208], 8, 32), "Q2_K": ([80, 82], 8, 32),
    "Q1_0": ([0], 2, 128), "Q2_0": ([0], 2, 64), "PQ2_0": ([0], 2, 128),
    "Q2_0 of 128": ([0], 2, 128), "TQ1_0": ([52], 2, 128), "TQ2_0": ([64], 2, 128),
}  # fmt: skip
UNKNOWN = {"Q2_0": (42, 64, 18), "PQ2_0": (142, 128, 34), "Q2_0 of 128": (42, 128, 34)}


def in_words_of_ggml(data: np.ndarray, block: int, size: int, bits: int) -> np.ndarray:
    values = []
    for row in data.reshape(len(data), -1, size):
        for each in row:
            d = np.frombuffer(each[:2].tobytes(), np.float16).astype(np.float32)[0]
            for j in range(block):
                code = int(each[2 + j * bits // 8]) >> j * bits % 8 & 2**bits - 1
                values.append(d * np.float32(2 * code - 1 if bits == 1 else code - 1))
    return np.array(values, np.float32).reshape(len(data), -1)


class Blocks:
    def __init__(self, kind: str):
        self.kind, self.values = kind, {}
        self.random = np.random.default_rng(0)

    def __call__(self, name: str, matrix: np.ndarray) -> tuple[np.ndarray, int]:
        number = UNKNOWN[self.kind][0] if self.kind in UNKNOWN else Type[self.kind]
        block, size = gguf.GGML_QUANT_SIZES[number]
        shape = (len(matrix), matrix.shape[1] // block, size)
        data = self.random.integers(0, 255, shape, dtype=np.uint8)
        for at in BLOCKS[self.kind][0]:
            factors = self.random.normal(size=(*shape[:2], 1), scale=0.01).astype(np.float16)
            data[..., at : at + 2] = factors.view(np.uint8)
        data = data.reshape(len(matrix), -1)
        if self.kind in UNKNOWN or self.kind == "Q1_0":
            self.values[name] = in_words_of_ggml(data, block, size, 1 if self.kind == "Q1_0" else 2)
        else:
            self.values[name] = gguf.dequantize(data, Type[self.kind])
        return data, number


def write_blocks(path: Path, blocks: Blocks) -> Path:
    number, *sizes = UNKNOWN.get(blocks.kind, (0, 1, 4))
    with mock.patch.dict(gguf.GGML_QUANT_SIZES, {number: tuple(sizes)} if number else {}):
        return write_gguf(path, "wide", encode=blocks)


def values(
    arrays: dict[str, mx.array], module: str, bits: int, group: int, mode: str
) -> np.ndarray:
    parts = [arrays.get(f"{module}{part}") for part in ("weight", "scales", "biases")]
    return np.array(mx.dequantize(*parts, group, bits, mode).astype(mx.float32))


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_values_of_blocks_are_kept(kind: str, tmp_path: Path):
    blocks = Blocks(kind)
    file = write_blocks(tmp_path / "tiny.gguf", blocks)
    bundle = export(file, tmp_path / "out.mesp")
    _, bits, group = BLOCKS[kind]
    how = (bits, group, "mxfp4" if kind == "MXFP4" else "affine")
    for theirs, arrays, module in (
        ("token_embd.weight", bundle.embedding(), ""),
        ("blk.0.attn_q.weight", bundle.block(0), "self_attn.q_proj."),
        ("blk.0.ffn_down.weight", bundle.block(0), "mlp.down_proj."),
    ):
        found, expected = values(arrays, module, *how), blocks.values[theirs]
        if kind in ("Q6_K", "Q2_K"):
            assert np.linalg.norm(found - expected) < 0.006 * np.linalg.norm(expected)
        else:
            assert np.array_equal(found, expected)


def test_the_summary_says_what_was_carried_over(tmp_path: Path):
    def encode(name: str, matrix: np.ndarray) -> tuple[np.ndarray, Type]:
        if "token_embd" in name:
            return matrix.astype(np.float16), Type.F16
        return Blocks("Q6_K" if "ffn_down" in name else "Q4_K")(name, matrix)

    file = write_gguf(tmp_path / "tiny.gguf", "wide", encode=encode)
    done = call("export", "--model", file, "--out", tmp_path / "o.mesp", *SIZE)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("  GGUF"))
    assert "63.6% of the weights (Q4_K) carried over exactly" in line
    assert "18.2% of the weights (Q6_K) quantized again to 8 bits" in line
    assert "18.2% of the weights (F16) quantized to 8 bits" in line


def test_a_ternary_file_keeps_its_types_beside_others(tmp_path: Path):
    def encode(name: str, matrix: np.ndarray) -> tuple[np.ndarray, Type]:
        return Blocks("Q6_K" if "token_embd" in name else "TQ2_0")(name, matrix)

    file = write_gguf(tmp_path / "tiny.gguf", "wide", encode=encode)
    done = call("export", "--model", file, "--out", tmp_path / "o.mesp", *SIZE)
    assert "of the weights (TQ2_0) carried over exactly; 18.2% of the weights (Q6_K)" in done.stdout
    assert "2 bits in groups of 128, the head 8 bits in groups of 32" in done.stdout


def test_blocks_of_q2_0_that_fit_neither_size_are_refused(tmp_path: Path):
    """Type number 42 has one of two block sizes."""
    with mock.patch.dict(UNKNOWN, {"Q2_0": (42, 64, 24)}):
        file = write_blocks(tmp_path / "tiny.gguf", Blocks("Q2_0"))
    assert "fit neither or both sizes of Q2_0 blocks" in refused(file, tmp_path / "out.mesp")


def test_a_router_keeps_8_bits(tmp_path: Path):
    tensors = random_tensors(MODELS["qwen3_moe"][1])

    def encode(name: str, matrix: np.ndarray) -> tuple[np.ndarray, Type]:
        if "ffn_gate_inp" in name:
            return matrix, Type.F32
        return gguf.quantize(matrix, Type.Q4_0), Type.Q4_0

    bundle = export(write_gguf(tmp_path / "t.gguf", "qwen3_moe", tensors, encode), tmp_path / "o")
    router = np.array(tensors["model.layers.0.mlp.gate.weight"])
    found = values(bundle.block(0), "mlp.gate.", 8, 32, "affine")
    assert np.linalg.norm(found - router) < 0.01 * np.linalg.norm(router)
    up = tensors["model.layers.0.mlp.experts.5.up_proj.weight"]
    expected = gguf.dequantize(gguf.quantize(np.array(up), Type.Q4_0), Type.Q4_0)
    of_all = values(bundle.block(0), "mlp.switch_mlp.up_proj.", 4, 32, "affine")
    assert np.array_equal(of_all[5], expected)


def test_an_unquantized_file_is_quantized_as_any_model(tmp_path: Path):
    tensors = random_tensors(MODELS["qwen3"][1])
    halves = {name: tensor.astype(mx.float16) for name, tensor in tensors.items()}
    file = write_gguf(
        tmp_path / "tiny.gguf", "qwen3", halves, lambda _, matrix: (matrix.astype("f2"), Type.F16)
    )
    config = MODELS["qwen3"][1] | {"bos_token_id": 0}  # as in the GGUF file
    folder = write_model(tmp_path / "tiny", config, halves)
    ours, theirs = export(file, tmp_path / "a.mesp"), export(folder, tmp_path / "b.mesp")
    for path in theirs.weight_files():
        assert mx.array_equal(ours.words(path), theirs.words(path)), path


def refused(file: Path, out: Path) -> str:
    done = run("export", "--model", file, "--out", out, *SIZE)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert not out.exists()
    return done.stderr


def test_types_of_blocks_that_are_not_supported_are_named(tmp_path: Path):
    def encode(name: str, matrix: np.ndarray) -> tuple[np.ndarray, Type]:
        data, kind = q8_0(name, matrix)
        is_other = "ffn_up" in name
        return (data[:, : data.shape[1] * 18 // 34], Type.IQ4_NL) if is_other else (data, kind)

    file = write_gguf(tmp_path / "t.gguf", "qwen2", encode=encode)
    assert "blk.0.ffn_up.weight in blocks of type IQ4_NL" in refused(file, tmp_path / "out.mesp")


SEVERAL = gguf.GGUFValue([1, 2], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32)


@pytest.mark.parametrize(
    ("model", "key", "value", "said"),
    [
        ("qwen2", "qwen2.embedding_length", None, "lacks qwen2.embedding_length"),
        ("qwen3", "qwen3.attention.layer_norm_rms_epsilon", None, "lacks qwen3.attention.layer_n"),
        ("granite", "granite.residual_scale", None, "lacks granite.residual_scale"),
        ("lfm2", "lfm2.shortconv.l_cache", None, "lacks lfm2.shortconv.l_cache"),
        ("qwen3_5_text", "qwen35.ssm.inner_size", None, "lacks qwen35.ssm.inner_size"),
        ("qwen3_moe", "qwen3moe.expert_used_count", None, "lacks qwen3moe.expert_used_count"),
        ("lfm2_moe", "lfm2moe.leading_dense_block_count", None, "lacks lfm2moe.leading_dense_b"),
        ("qwen2", "prism.hadamard.block_size", number(8), "a rotated basis ('prism.hadamard.block"),
        ("qwen2", "split.count", number(2), "is one part of several"),
        ("qwen2", "general.architecture", SEVERAL, "The architecture '' of"),
        ("qwen2", "general.type", SEVERAL, "holds no model"),
        ("granite", "granite.expert_count", number(8), "mixes experts"),
        ("qwen3_moe", "qwen3moe.expert_count", number(9), "does not fit its metadata"),
        ("qwen3_moe", "qwen3moe.expert_count", number(1 << 40), "experts' sizes"),
        ("lfm2_moe", "lfm2moe.expert_gating_func", number(1), "weighs experts in a way"),
        ("qwen2", "tokenizer.ggml.model", SEVERAL, "has a tokenizer of kind ''"),
        ("qwen2", "tokenizer.ggml.pre", text("default"), "its pre-tokenizer 'default' is not"),
        ("minicpm", "minicpm.logit_scale", number(0), "is not above 0"),
        ("minicpm", "minicpm.nextn_predict_layers", number(7), "is not above 0"),
        ("granite", "granite.logit_scale", number(1 << 63), "its logits_scaling cannot be used"),
        ("qwen3_5_text", "qwen35.ssm.inner_size", number(1 << 26), "does not fit its metadata"),
    ],
)
def test_metadata_that_lack_or_lie_are_a_sentence(model, key, value, said, tmp_path: Path):
    without, changed = ([key], {}) if value is None else ((), {key: value})
    file = write_gguf(tmp_path / "tiny.gguf", model, without=without, changed=changed)
    tracemalloc.start()
    assert said in refused(file, tmp_path / "out.mesp")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 << 20


def test_only_a_number_of_parts_says_that_there_are_several(tmp_path: Path):
    file = write_gguf(tmp_path / "tiny.gguf", "qwen2", changed={"split.count": SEVERAL})
    export(file, tmp_path / "b.mesp")


def test_tensors_are_those_of_the_architecture(tmp_path: Path):
    tensors = random_tensors(MODELS["qwen2"][1])
    fewer = {name: tensor for name, tensor in tensors.items() if "up_proj" not in name}
    file = write_gguf(tmp_path / "fewer.gguf", "qwen2", fewer)
    assert "lacks the tensor blk.0.ffn_up.weight" in refused(file, tmp_path / "out.mesp")
    more = tensors | {"model.layers.0.self_attn.q_norm.weight": mx.ones(32)}
    file = write_gguf(tmp_path / "more.gguf", "qwen3", more)
    assert "a tensor 'blk.0.attn_q.bias'" in refused(file, tmp_path / "out.mesp")
    whole = GGUF.read(write_gguf(tmp_path / "whole.gguf", "qwen2", tensors))
    whole.tensors[f"blk.{5000 * '9'}.attn_q.bias"] = whole.tensors.pop("blk.0.attn_q.bias")
    copy(whole, tmp_path / "long.gguf", {}, Type.Q8_0)
    assert "a tensor 'blk.999" in refused(tmp_path / "long.gguf", tmp_path / "out.mesp")


def test_pieces_are_read_as_sentencepiece_has_them(tmp_path: Path):
    file = write_gguf(tmp_path / "tiny.gguf", "llama-yarn", vocabulary="pieces")
    bundle = export(file, tmp_path / "out.mesp")
    assert bundle.config()["bos_token_id"] == 1
    tokenizer = load_bundle_tokenizer(bundle.path)
    text = "The quick\n  brown ☃"
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id == 1 and tokenizer.eos_token_ids == {2}
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert ids[-3:] == [3 + byte for byte in "☃".encode()]


def test_pieces_that_are_made_in_many_ways_take_no_memory(tmp_path: Path):
    """A token of k equal letters can be merged from k - 1 pairs of shorter tokens."""
    tokens = ["<unk>", *(letter * n for letter in "abcd" for n in range(1, 1025))]
    types, scores = np.array([2] + [1] * (len(tokens) - 1)), np.zeros(len(tokens), np.float32)
    entries = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in entries.items()}
    file = GGUF(tmp_path / "tiny.gguf", metadata, {}, memoryview(b""), 32)
    tracemalloc.start()
    with pytest.raises(MespError, match="can be merged in too many ways"):
        write_tokenizer(file, tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 << 20


@pytest.mark.parametrize("kind", ["Q1_0", "TQ1_0", *UNKNOWN])
def test_adapters_are_fused_into_a_file_of_few_bits(kind: str, tmp_path: Path):
    blocks = Blocks(kind)
    file, out = write_blocks(tmp_path / "base.gguf", blocks), tmp_path / "b.mesp"
    export(file, out)
    adapters, fused = write_adapters(tmp_path / "adapters", out), tmp_path / "fused"
    options = ("--out", fused, "--gguf-base", file, "--val-batches", 0)
    done = call("fuse", out, "--adapters", adapters, *options)
    assert "In model.gguf the matrices with adapters are Q8_0; all other" in done.stdout
    before, after = GGUF.read(file), GGUF.read(fused / "model.gguf")
    for name, tensor in before.tensors.items():
        if "token_embd" in name or "norm" in name:
            assert after.tensors[name].number == tensor.number
            assert np.array_equal(after.tensors[name].data, tensor.data)
    matrices = mx.load(str(adapters / "adapters.safetensors"))
    path = "model.layers.0.mlp.down_proj.lora"
    change = SCALE * np.array((matrices[f"{path}_a"] @ matrices[f"{path}_b"]).T)
    found = after.tensors["blk.0.ffn_down.weight"]
    expected = gguf.quantize(blocks.values["blk.0.ffn_down.weight"] + change, Type.Q8_0)
    error = gguf.dequantize(found.data, Type.Q8_0) - gguf.dequantize(expected, Type.Q8_0)
    assert found.type == "Q8_0" and np.linalg.norm(error) < 1e-3 * np.linalg.norm(change)


def test_a_tensor_of_an_unknown_type_is_not_copied(tmp_path: Path):
    out = tmp_path / "b.mesp"
    whole = GGUF.read(write_gguf(tmp_path / "whole.gguf", "qwen2"))
    whole.tensors["blk.99.attn_norm.weight"] = whole.tensors["blk.0.attn_norm.weight"]
    keys = bytearray(whole.keys)
    keys[8:16] = len(whole.tensors).to_bytes(8, "little")
    file = tmp_path / "base.gguf"
    copy(replace(whole, keys=memoryview(keys)), file, {}, Type.Q8_0)
    export(file, out)
    header = file.read_bytes()
    at = header.index(b"blk.99.attn_norm.weight") + len("blk.99.attn_norm.weight") + 4 + 8
    file.write_bytes(header[:at] + (999).to_bytes(4, "little") + header[at + 4 :])
    adapters, fused = write_adapters(tmp_path / "adapters", out), tmp_path / "fused"
    options = ("--adapters", adapters, "--out", fused, "--gguf-base", file)
    done = run("fuse", out, *options)
    assert done.returncode == 2 and "in blocks of an unknown type (number 999)" in done.stderr
    assert "Traceback" not in done.stderr and not fused.exists()


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("o/m:Q4_K_M", "m-Q4_K_M.gguf"),
        ("o/m:q8_0", "m.Q8_0.gguf"),
        ("o/m/sub/m-f16.gguf", "sub/m-f16.gguf"),
    ],
)
def test_files_of_the_hub_are_named_as_llama_cpp_names_them(name, chosen, tmp_path, monkeypatch):
    files = ["README.md", "mmproj-Q8_0.gguf", "m.Q8_0.gguf", "m-Q4_K_M.gguf", "sub/m-Q4_K_M.gguf"]
    folder = tmp_path / "snapshots" / "0123"
    (folder / "sub").mkdir(parents=True)
    write_gguf(tmp_path / "tiny.gguf", "qwen2").rename(folder / chosen)
    monkeypatch.setattr(hub_download, "list_files", lambda repo: files)
    monkeypatch.setattr(hub_download, "download", lambda kind, repo, patterns: folder)
    source = find.find_source(name, False)
    assert source.id == f"o/m/{chosen}" and source.revision == "0123"
    done = run("export", "--model", "o/m:Q6_K", "--out", tmp_path / "out.mesp")
    assert "has no GGUF file of Q6_K; it has m.Q8_0.gguf, m-Q4_K_M.gguf" in done.stderr


def test_a_folder_of_gguf_files_says_which_to_name(tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "b.GGUF").touch()
    (folder / "a.gguf").touch()
    expected = f"name the one to read: --model {folder}/a.gguf, or {folder}/b.GGUF."
    assert expected in refused(folder, tmp_path / "out.mesp")
    (folder / "config.json").write_text("{}")  # as in many repositories of GGUF files
    assert expected in refused(folder, tmp_path / "out.mesp")


def test_a_repository_of_gguf_files_says_which_to_name(tmp_path: Path, monkeypatch):
    files = ["README.md", "mmproj-Q8_0.gguf", "m.Q8_0.gguf"]
    monkeypatch.setattr(hub_download, "list_files", lambda repo: files)
    monkeypatch.setattr(hub_download, "download", lambda kind, repo, patterns: tmp_path)
    with pytest.raises(MespError, match=r"name the one to read: `model` o/m/m\.Q8_0\.gguf"):
        find.find_source("o/m", False)


def test_reading_needs_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    for name in [name for name in sys.modules if name.startswith("mesp.source_model.gguf.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'mesp[gguf]'" in refused(tmp_path / "m.gguf", tmp_path / "out.mesp")


YARN = {"rope.scaling.type": text("yarn")}
FOURFOLD = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope.scale_linear": floats(4.0)}, {"type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": floats(4.0)}, {"type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": floats(0.0), "rope.scale_linear": floats(4.0)}, None),
        ({"rope.scaling.type": text("none"), "rope.scaling.factor": floats(4.0)}, None),
        ({"rope.scaling.factor": floats(4.0)} | YARN, FOURFOLD),
        (
            {"rope.scale_linear": floats(4.0), "rope.scaling.yarn_beta_fast": floats(16.0)}
            | {"rope.scaling.yarn_log_multiplier": floats(0.5)}
            | YARN,
            FOURFOLD | {"beta_fast": 16.0, "mscale": 1.0, "mscale_all_dim": 0.5},
        ),
        ({"rope.scaling.finetuned": number(1)}, None),
        ({"attention.causal": gguf.GGUFValue(True, gguf.GGUFValueType.BOOL)}, None),
    ],
)
def test_attention_is_as_in_llama_cpp(keys, scaling, tmp_path: Path):
    changed = {f"qwen2.{key}": value for key, value in keys.items()}
    file = GGUF.read(write_gguf(tmp_path / "t.gguf", "qwen2", changed=changed))
    config = MODELS["qwen2"][1] | {"rope_scaling": scaling}
    found = Architecture.from_config(config_of(file))
    assert found.mixers == Architecture.from_config(config).mixers


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope.scaling.type", text("longrope")),
        ("rope.scaling.attn_factor", floats(1.5)),
        ("rope.scaling.yarn_ext_factor", floats(0.5)),
        ("rope.freq_base_swa", floats(100.0)),
        ("attention.clamp_kqv", floats(8.0)),
        ("attention.causal", number(0)),
    ],
)
def test_metadata_that_nothing_reads_are_named(key, value, tmp_path: Path):
    changed = {f"qwen2.{key}": value, "qwen2.rope.scaling.factor": floats(2.0)}
    file = write_gguf(tmp_path / "t.gguf", "qwen2", changed=changed)
    said = refused(file, tmp_path / "out.mesp")
    assert key in said or "scales RoPE in a way that is not supported" in said


@pytest.mark.parametrize("base", [-1.0, math.nan])
def test_factors_of_rope_for_a_base_that_is_no_base_are_refused(base: float, tmp_path: Path):
    changed = {"llama.rope.freq_base": floats(base)}
    file = write_gguf(tmp_path / "t.gguf", "llama", changed=changed)
    assert "differently from Llama 3" in refused(file, tmp_path / "out.mesp")
