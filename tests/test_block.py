"""The exported block function against mlx-lm's own block on the same quantized weights."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen2
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.tuner.lora import LoRALinear

from conftest import TINY, random_tensors
from mesp import block
from mesp.bundle import Layout, Quantization, block_layout
from mesp.models import PROJECTIONS, Architecture

OUTPUTS = ("y", "attn_in", "q", "k", "v", "attn_out", "x_mid", "gate", "up")
TOLERANCE = 1e-5
SCALE = 2.0

# hidden size, intermediate size, heads, kv heads, group size, bits
GEOMETRIES = {
    "groups": (128, 320, 4, 2, 64, 4),
    "three in a group": (192, 512, 6, 2, 32, 4),
    "no groups": (128, 192, 2, 2, 64, 8),
    "one head": (64, 192, 1, 1, 32, 4),
}


class Case:
    """A block of mlx-lm's with LoRA layers, and the same weights as the block function's arrays."""

    def __init__(self, geometry: str, rank: int, lora: bool = True):
        hidden, intermediate, heads, kv_heads, group_size, bits = GEOMETRIES[geometry]
        config = {
            **TINY,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "num_hidden_layers": 1,
        }
        self.arch = Architecture.from_config(config)
        self.quantization = Quantization(bits, group_size)
        self.layout = block_layout(self.arch, self.quantization, "float32")
        tensors = random_tensors(config, seed=1)

        self.block = qwen2.TransformerBlock(qwen2.ModelArgs.from_dict(config))
        prefix = "model.layers.0."
        block_tensors = [
            (k.removeprefix(prefix), v) for k, v in tensors.items() if k.startswith(prefix)
        ]
        self.block.load_weights(block_tensors)
        nn.quantize(self.block, group_size, bits)
        self.weights = pack(self.layout, dict(tree_flatten(self.block.parameters())))

        flat = []
        for name in PROJECTIONS:
            parent = self.block
            *path, last = name.split(".")
            for part in path:
                parent = parent[part]
            layer = LoRALinear.from_base(parent[last], r=rank, scale=SCALE)
            if lora:
                layer.lora_b = mx.random.normal(layer.lora_b.shape) * 0.1
            parent[last] = layer
            flat += [layer.lora_a.flatten(), layer.lora_b.flatten()]
        self.lora = mx.concatenate(flat)

    def expected(self, x: mx.array) -> list[mx.array]:
        """What mlx-lm computes, piece by piece, and y by the block as a whole."""
        attention, mlp = self.block.self_attn, self.block.mlp
        mask = create_attention_mask(x, None)

        def heads(a: mx.array) -> mx.array:
            return a.reshape(1, x.shape[1], -1, self.arch.head_dim).transpose(0, 2, 1, 3)

        attn_in = self.block.input_layernorm(x)
        q = attention.rope(heads(attention.q_proj(attn_in)))
        k = attention.rope(heads(attention.k_proj(attn_in)))
        v = heads(attention.v_proj(attn_in))
        out = scaled_dot_product_attention(q, k, v, cache=None, scale=attention.scale, mask=mask)
        attn_out = out.transpose(0, 2, 1, 3).flatten(2)
        x_mid = x + attention.o_proj(attn_out)
        mlp_in = self.block.post_attention_layernorm(x_mid)
        gate, up = mlp.gate_proj(mlp_in), mlp.up_proj(mlp_in)
        return [self.block(x, mask), attn_in, q, k, v, attn_out, x_mid, gate, up]

    def export(self, folder, seq_len: int, plain: bool = False, device: str = "cpu"):
        """The block function, exported and imported again."""
        # A name of its own: MLX reads a function's constants when it first runs.
        path = str(folder / f"{plain}.mlxfn")
        function = block.block_function(
            self.arch, self.quantization, self.layout, device, plain=plain
        )
        rank = self.lora.size // self.arch.lora_size(1)
        block.export_block(
            path, function, self.arch, self.layout, mx.float32, device, [seq_len], [rank]
        )
        return mx.import_function(path)


def pack(layout: Layout, arrays: dict[str, mx.array]) -> mx.array:
    """Lays float32 and uint32 arrays out as a block's file."""
    words = mx.zeros(layout.words, mx.uint32)
    for spec in layout.arrays:
        words[spec.offset : spec.offset + spec.words] = arrays[spec.name].flatten().view(mx.uint32)
    return words


def relative_error(a: mx.array, b: mx.array) -> float:
    assert a.shape == b.shape and a.dtype == b.dtype
    return (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item()


@pytest.fixture(autouse=True)
def seed():
    mx.random.seed(0)


@pytest.fixture(params=["tiled", "one tile", "plain"])
def kind(request, monkeypatch) -> str:
    """Sizes of tiles that cut these small shapes into many; the default sizes; the plain twin."""
    if request.param == "tiled":
        monkeypatch.setattr(block, "WIDTH", 24)
        monkeypatch.setattr(block, "ATTENTION_ROWS", 4)
    return request.param


@pytest.mark.parametrize("seq_len", [1, 7, 32])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_equals_mlx_lm(tmp_path, kind, geometry, seq_len):
    case = Case(geometry, rank=4)
    function = case.export(tmp_path, seq_len, plain=kind == "plain")
    x = mx.random.normal((1, seq_len, case.arch.hidden_size))
    outputs = function(x, case.lora, mx.array(SCALE), case.weights)
    for name, a, b in zip(OUTPUTS, outputs, case.expected(x), strict=True):
        assert relative_error(a, b) <= TOLERANCE, name


def test_without_lora_it_is_the_base_model(tmp_path, kind):
    case = Case("groups", rank=2, lora=False)
    function = case.export(tmp_path, 9, plain=kind == "plain")
    x = mx.random.normal((1, 9, case.arch.hidden_size))
    outputs = function(x, case.lora, mx.array(SCALE), case.weights)
    for name, a, b in zip(OUTPUTS, outputs, case.expected(x), strict=True):
        assert relative_error(a, b) <= TOLERANCE, name


@pytest.mark.parametrize("seq_len", [1, 7, 32])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_plain_function_differentiates(tmp_path, geometry, seq_len):
    case = Case(geometry, rank=4)
    function = case.export(tmp_path, seq_len, plain=True)
    x = mx.random.normal((1, seq_len, case.arch.hidden_size))
    dy = mx.random.normal(x.shape)

    def mlx_lm(x: mx.array, lora: mx.array) -> mx.array:
        start = 0
        for name in PROJECTIONS:
            layer = case.block
            for part in name.split("."):
                layer = layer[part]
            for matrix in ("lora_a", "lora_b"):
                size = layer[matrix].size
                layer[matrix] = lora[start : start + size].reshape(layer[matrix].shape)
                start += size
        return case.block(x, create_attention_mask(x, None))

    def imported(x: mx.array, lora: mx.array) -> mx.array:
        return function(x, lora, mx.array(SCALE), case.weights)[0]

    _, expected = mx.vjp(mlx_lm, [x, case.lora], [dy])
    _, actual = mx.vjp(imported, [x, case.lora], [dy])
    for name, a, b in zip(("dx", "d lora"), actual, expected, strict=True):
        assert relative_error(a, b) <= TOLERANCE, name


def test_one_file_serves_several_lengths_and_ranks(tmp_path):
    case = Case("groups", rank=4)
    path = str(tmp_path / "block.mlxfn")
    function = block.block_function(case.arch, case.quantization, case.layout, "cpu")
    block.export_block(path, function, case.arch, case.layout, mx.float32, "cpu", [3, 70], [2, 4])
    imported = mx.import_function(path)
    for seq_len in (3, 70):
        for rank in (2, 4):
            x = mx.random.normal((1, seq_len, case.arch.hidden_size))
            lora = mx.random.normal((case.arch.lora_size(rank),)) * 0.1
            arguments = (x, lora, mx.array(SCALE), case.weights)
            assert relative_error(imported(*arguments)[0], function(*arguments)[0]) <= 1e-6
    with pytest.raises(ValueError, match="No imported function"):
        imported(x[:, :5], lora, mx.array(SCALE), case.weights)


def test_bfloat16(tmp_path):
    """bfloat16 arrays and scales; the arithmetic between them is float32."""
    case = Case("groups", rank=4)
    wide = case.layout.unpack(case.weights)
    layout = block_layout(case.arch, case.quantization, "bfloat16")
    words = mx.zeros(layout.words, mx.uint32)
    rounded = {}
    for spec in layout.arrays:
        array = wide[spec.name]
        if spec.dtype == "bfloat16":
            array = array.astype(mx.bfloat16)
            rounded[spec.name] = array.astype(mx.float32)
        words[spec.offset : spec.offset + spec.words] = array.flatten().view(mx.uint32)
    path = str(tmp_path / "block.mlxfn")
    function = block.block_function(case.arch, case.quantization, layout, "cpu")
    block.export_block(path, function, case.arch, layout, mx.bfloat16, "cpu", [20], [4])
    x = mx.random.normal((1, 20, case.arch.hidden_size)).astype(mx.bfloat16)
    outputs = mx.import_function(path)(x, case.lora, mx.array(SCALE), words)

    exact = block.block_function(case.arch, case.quantization, case.layout, "cpu")
    weights = pack(case.layout, {**wide, **rounded})
    expected = exact(x.astype(mx.float32), case.lora, mx.array(SCALE), weights)
    for name, a, b in zip(OUTPUTS, outputs, expected, strict=True):
        assert a.dtype == mx.bfloat16
        assert relative_error(a.astype(mx.float32), b) <= 1e-2, name


def test_y_alone_takes_little_memory(tmp_path, monkeypatch):
    """Evaluating y holds neither [T, intermediate] nor [heads, T, T], nor the unpacked weights."""
    monkeypatch.setitem(GEOMETRIES, "wide", (256, 4096, 8, 2, 64, 4))
    case = Case("wide", rank=4)
    x = mx.random.normal((1, 256, case.arch.hidden_size))
    mx.eval(x, case.weights, case.lora)
    peaks = {}
    for plain in (False, True):
        function = case.export(tmp_path, x.shape[1], plain)
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(function(x, case.lora, mx.array(SCALE), case.weights)[0])
        peaks[plain] = mx.get_peak_memory() - before
    gate = 4 * x.shape[1] * case.arch.intermediate_size
    unpacked = 4 * sum(out * inp for out, inp in case.arch.projections().values())
    assert peaks[False] < gate + x.nbytes < unpacked < peaks[True]
