import struct
from collections.abc import Iterable
from functools import partial
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear

from helpers.models import (
    FAMILIES,
    HEADS_64,
    TINY,
    arrays_of,
    given_to,
    mlx_lm_model,
    run_layer,
)
from mesp import reference
from mesp.block_function import attention, chunks, dequantize, fused, mlxfn, tiles
from mesp.block_function.forward_pass import BlockFunction, block_function
from mesp.block_function.gated_delta_net import delta_rule
from mesp.block_function.mamba2 import state_space
from mesp.block_function.rope import fast_rope, rope
from mesp.block_function.trace import export_block
from mesp.models.architecture import Architecture, Block
from mesp.models.layout import DTYPES, Layout, block_layout
from mesp.models.mixers import AttentionMixer
from mesp.models.quantization_formats import Quantization


def output_names(block) -> tuple[str, ...]:
    return ("y", *reference.intermediate_names(block))


TOLERANCE = 1e-5
SCALE = 2.0


def geometry(hidden: int, intermediate: int, heads: int, kv_heads: int) -> dict:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate}
    heads = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {**TINY, **sizes, **heads, "num_hidden_layers": 1}


def mixed(path: str) -> Quantization:
    many = "v_proj" in path or "down_proj" in path
    return Quantization(6, 64) if many else Quantization(8 if "q_proj" in path else 3, 32)


GROUPS = geometry(128, 320, 4, 2)
MODELS = {name: (config, lambda _: Quantization(4, 32)) for name, config in FAMILIES.items()}
MODELS |= {
    "groups": (GROUPS, lambda _: Quantization(4, 64)),
    "three in a group": (geometry(192, 512, 6, 2), lambda _: Quantization(4, 32)),
    "no groups": (geometry(128, 192, 2, 2), lambda _: Quantization(8, 64)),
    "one head": (geometry(64, 192, 1, 1), lambda _: Quantization(2, 32)),
    "3 bits": (GROUPS, lambda _: Quantization(3, 32)),
    "5 bits": (GROUPS, lambda _: Quantization(5, 32)),
    "mixed": (GROUPS, mixed),
    "mxfp4": (GROUPS, lambda _: Quantization(4, 32, "mxfp4")),
    "mxfp8": (GROUPS, lambda _: Quantization(8, 32, "mxfp8")),
    "nvfp4": (FAMILIES["phi3"], lambda _: Quantization(4, 16, "nvfp4")),
}
BLOCKS = [
    pytest.param(name, layer, id=f"{name} {layer}" if layer else name)
    for name, (config, _) in MODELS.items()
    for arch in [Architecture.from_config(config)]
    for layer in map(arch.blocks.index, arch.kinds)
    # Blocks with experts are left out: a function that depends on the choice of experts cannot be
    # traced.
    if not arch.blocks[layer].mlp.experts
]


class Case:
    def __init__(self, name: str, layer: int = 0):
        config, quantization = MODELS[name]
        self.arch = Architecture.from_config(config)
        self.described = self.arch.blocks[layer]
        self.mixer = self.described.mixer
        self.block = mlx_lm_model(config, quantization, seed=1).layers[layer]
        arrays = arrays_of(self.block, self.described)
        quantizations = {name: quantization(name) for name in self.described.modules}
        self.layout = block_layout(self.described, quantizations, "float32")
        self.weights = pack(self.layout, arrays)

        flat, adapters = [], []
        for name in self.described.modules:
            adapted = LoRALinear.from_base(self.module(name), r=4, scale=SCALE)
            adapted.lora_b = mx.random.normal(adapted.lora_b.shape) * 0.1
            adapters.append((name, adapted))
            flat += [adapted.lora_a.flatten(), adapted.lora_b.flatten()]
        self.block.update_modules(tree_unflatten(adapters))
        self.lora = mx.concatenate(flat)
        self.given: dict[int, dict] = {}

    def beside(self, length: int) -> dict:
        return self.given.setdefault(length, given_to(self.described, length))

    def more(self, length: int) -> list[mx.array]:
        beside = self.beside(length)
        return [*([beside["per_layer"]] if beside else []), *beside.get("shared", ())]

    def module(self, name: str) -> nn.Module:
        return dict(self.block.named_modules())[name]

    def run(self, x: mx.array) -> mx.array:
        return run_layer(self.block, x, self.described, **self.beside(x.shape[1]))

    def expected(self, x: mx.array) -> list[mx.array]:
        arrays = self.layout.unpack(self.weights)
        beside = self.beside(x.shape[1])
        return reference.block_forward(x, self.lora, SCALE, arrays, self.described, **beside)

    def export(self, folder, seq_len: int):
        path, rank = str(folder / "block.mlxfn"), self.lora.size // self.described.lora_size(1)
        export_block(
            path, self.function(), self.described, self.layout, mx.float32, "cpu", [seq_len], [rank]
        )
        return mx.import_function(str(path))

    def function(self, plain: bool = True) -> BlockFunction:
        return block_function(self.described, self.layout, None if plain else mx.fast)


def pack(layout: Layout, arrays: dict[str, mx.array]) -> mx.array:
    words = mx.zeros(layout.words, mx.uint32)
    for spec in layout.arrays:
        words[spec.offset : spec.offset + spec.words] = arrays[spec.name].flatten().view(mx.uint32)
    return words


def relative_error(a: mx.array, b: mx.array) -> float:
    assert a.shape == b.shape and a.dtype == b.dtype
    return (mx.linalg.norm(a - b) / mx.linalg.norm(b)).item()


def assert_same(case: Case, outputs: list[mx.array], x: mx.array) -> None:
    for name, a, b in zip(output_names(case.described), outputs, case.expected(x), strict=True):
        assert relative_error(a, b) <= TOLERANCE, name


@pytest.fixture(autouse=True)
def seed():
    mx.random.seed(0)


# The families' windows are 5 tokens.
@pytest.mark.parametrize("seq_len", [1, 5, 32])
@pytest.mark.parametrize(("name", "layer"), BLOCKS)
def test_equals_the_reference(tmp_path, name, layer, seq_len):
    case = Case(name, layer)
    function = case.export(tmp_path, seq_len)
    x = mx.random.normal((1, seq_len, case.arch.hidden_size))
    given = case.more(x.shape[1])
    assert_same(case, function(x, case.lora, mx.array(SCALE), case.weights, *given), x)


@pytest.mark.parametrize("length", [63, 64, 65, 200])
@pytest.mark.parametrize(("heads", "sizes"), [((2, 2), (8, 16)), ((1, 3), (16, 8))])
def test_the_delta_rule_equals_the_reference(heads, sizes, length):
    (Hk, Hv), (dk, dv) = heads, sizes
    q, k = (mx.random.normal((Hk, length, dk)) * dk**-0.5 for _ in range(2))
    log_g = -mx.exp(3 * mx.random.normal((Hv, length)) - 2)
    inputs = [q, k, mx.random.normal((Hv, length, dv)), log_g, mx.random.uniform(shape=log_g.shape)]
    error = relative_error(delta_rule(*inputs), reference.gated_delta_rule(*inputs))
    assert error <= TOLERANCE


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize(("heads", "groups"), [(4, 2), (3, 1)])
def test_the_state_space_equals_the_reference(heads, groups, length):
    x, D = mx.random.normal((heads, length, 8)), mx.random.normal((heads,))
    A = -mx.exp(3 * mx.random.normal((heads,)) - 2)
    dt = mx.random.uniform(shape=(heads, length))
    B, C = (mx.random.normal((groups, length, 16)) for _ in range(2))
    y = state_space(dt[..., None] * x, A[:, None] * dt, B, C) + D[:, None, None] * x
    assert relative_error(y, reference.state_space(x, dt, B, C, A, D)) <= TOLERANCE


def test_a_pair_that_stays_has_a_finite_period():
    mixers = [m for config, _ in MODELS.values() for m in Architecture.from_config(config).mixers]
    mixer = next(m for m in mixers if 0.0 in getattr(m, "frequencies", ()))
    given = {}

    def turn(x: mx.array, size: int, offset: int, freqs: mx.array, **options) -> mx.array:
        given["freqs"] = freqs
        return mx.fast.rope(x, size, offset=offset, freqs=freqs, **options)

    rows = slice(100_000, 100_008)
    x = mx.random.normal((1, 2, 8, mixer.head_dim))
    turned = fast_rope(mixer, SimpleNamespace(rope=turn))(x, rows)
    assert mx.all(mx.isfinite(given["freqs"]))
    half = len(mixer.frequencies)
    stays = [i for i, f in enumerate(mixer.frequencies) if not f]
    for pair in (stays, [half + i for i in stays]):
        assert mx.array_equal(turned[..., mx.array(pair)], x[..., mx.array(pair)])
    plain = rope(mixer, slice(0, rows.stop))(x, rows)
    assert mx.array_equal(plain[..., mx.array(stays)], x[..., mx.array(stays)])


@pytest.mark.parametrize("seq_len", [1, 32])
@pytest.mark.parametrize(("name", "layer"), BLOCKS)
def test_it_differentiates(tmp_path, name, layer, seq_len):
    case = Case(name, layer)
    function = case.export(tmp_path, seq_len)
    x = mx.random.normal((1, seq_len, case.arch.hidden_size))
    dy = mx.random.normal(x.shape)

    def mlx_lm(x: mx.array, lora: mx.array) -> mx.array:
        start = 0
        for name in case.described.modules:
            layer = case.module(name)
            for matrix in ("lora_a", "lora_b"):
                size = layer[matrix].size
                layer[matrix] = lora[start : start + size].reshape(layer[matrix].shape)
                start += size
        return case.run(x)

    def imported(x: mx.array, lora: mx.array) -> mx.array:
        return function(x, lora, mx.array(SCALE), case.weights, *case.more(x.shape[1]))[0]

    _, expected = mx.vjp(mlx_lm, [x, case.lora], [dy])
    _, actual = mx.vjp(imported, [x, case.lora], [dy])
    for name, a, b in zip(("dx", "d lora"), actual, expected, strict=True):
        assert relative_error(a, b) <= TOLERANCE, name


@pytest.mark.parametrize("length", [5, 7, 32])
@pytest.mark.parametrize("window", [None, 1, 4, 5])
def test_fused_attention_sees_the_same_keys(monkeypatch, window, length):
    monkeypatch.setattr(tiles, "ATTENTION_ROWS", 4)
    q, k, v = (mx.random.normal((1, heads, length, 16)) for heads in (4, 2, 2))
    scoring = attention.Scoring(0.3, None, window)
    functions = (partial(attention.fused_attention, mx.fast), attention.attention)
    a, b = (function(q, k, v, lambda x, _: x, scoring) for function in functions)
    assert relative_error(a, b) <= TOLERANCE


# "fused" has fused attention. "tiled" has sizes that cut these small shapes into many tiles.
@pytest.mark.parametrize("how", ["fused", "tiled", "one tile"])
@pytest.mark.parametrize(("name", "layer"), BLOCKS)
def test_the_gpu_function_computes_the_same(monkeypatch, name, layer, how):
    """The operations of the GPU's function also exist on the CPU, so this test needs no GPU."""
    case, calls = Case(name, layer), []
    attend = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(
        mx.fast,
        "scaled_dot_product_attention",
        lambda *args, **options: calls.append(args) or attend(*args, **options),
    )
    has_scores = isinstance(case.mixer, AttentionMixer)
    if has_scores:
        fused_heads = (case.mixer.head_dim,) if how == "fused" else ()
        monkeypatch.setattr(attention, "FUSED_HEADS", fused_heads)
    if how == "tiled":
        monkeypatch.setattr(tiles, "NUMBERS_A_TOKEN", 1)
        monkeypatch.setattr(tiles, "ATTENTION_ROWS", 4)
        monkeypatch.setattr(tiles, "FEWEST_HEADS", 1)
        monkeypatch.setattr(tiles, "HEADS_BY_TOKENS", 1)
    x = mx.random.normal((1, 20, case.arch.hidden_size))
    function = case.function(plain=False)
    outputs = function(x, case.lora, mx.array(SCALE), case.weights, *case.more(x.shape[1]))
    takes_fused = has_scores and case.mixer.attn_logit_softcapping is None
    assert bool(calls) == (how == "fused" and takes_fused)
    assert_same(case, outputs, x)


@pytest.mark.parametrize("how", ["fused", "tiled", "plain"])
@pytest.mark.parametrize(("name", "layer"), BLOCKS)
def test_packed_records_do_not_see_each_other(monkeypatch, name, layer, how):
    case = Case(name, layer)
    if isinstance(case.mixer, AttentionMixer):
        heads = (case.mixer.head_dim,) if how == "fused" else ()
        monkeypatch.setattr(attention, "FUSED_HEADS", heads)
    if how == "tiled":
        monkeypatch.setattr(tiles, "ATTENTION_ROWS", 4)
    monkeypatch.setattr(chunks, "CHUNK", 8)
    function = case.function(how == "plain")
    x, ends = mx.random.normal((1, 30, case.arch.hidden_size)), [1, 3, 15, 16, 30]
    records = list(pairwise([0, *ends]))
    starts = mx.array([start for start, end in records for _ in range(start, end)])
    inputs = (case.lora, mx.array(SCALE), case.weights)
    beside = case.beside(30)

    def more(start: int, end: int) -> list[mx.array]:
        given = [beside["per_layer"][:, start:end]] if beside else []
        if case.described.keys_of is not None:
            keys, values = (each[:, :, start:end] for each in beside["shared"])
            given += [rope(case.mixer, slice(0, 30))(keys, slice(0, end - start)), values]
        return given

    found = function(x, *inputs, *more(0, 30), starts)
    alone = [function(x[:, a:b], *inputs, *more(a, b)) for a, b in records]
    for name, packed, parts in zip(
        output_names(case.described), found, zip(*alone, strict=True), strict=True
    ):
        if case.described.keys_of is not None and name == "k":
            continue  # positions of given keys differ
        assert relative_error(packed, mx.concatenate(parts, axis=-2)) <= TOLERANCE, name


# The first blocks of these models have head size 64, which Metal's fused attention supports, or
# other head sizes. Those of lfm2 and qwen3_5 have no attention.
GPU_BLOCKS = {name: {**FAMILIES[name], **HEADS_64} for name in ("qwen2", "qwen3", "mistral")}
GPU_BLOCKS |= {name: FAMILIES[name] for name in ("gemma2", "gemma3_text", "phi3", "lfm2")}
GPU_BLOCKS |= {"qwen3_5": FAMILIES["qwen3_5"]}
GPU_BLOCKS |= {"gate of a head": {**FAMILIES["lfm3"], "layer_types": ["full_attention"] * 3}}
GPU_BLOCKS |= {"output gate": {**FAMILIES["qwen3_5"], "full_attention_interval": 1}}


def gpu_block(name: str, dtype: str, fast: ModuleType) -> tuple:
    arch = Architecture.from_config(GPU_BLOCKS[name])
    block = arch.blocks[0]
    layout = block_layout(block, dict.fromkeys(block.modules, Quantization(4, 32)), dtype)
    return block_function(block, layout, fast), block, layout


def gpu_inputs(
    block: Block, layout: Layout, dtype: str, length: int, packed: bool = False
) -> list[mx.array]:
    x = mx.zeros((1, length, block.arch.hidden_size), getattr(mx, dtype))
    inputs = [x, mx.zeros(block.lora_size(4)), mx.array(1.0), mx.zeros(layout.words, mx.uint32)]
    return inputs + [mx.zeros(length, mx.int32)] * packed


def trace(function: BlockFunction, *inputs: mx.array) -> list:
    found = []

    def callback(part: dict) -> None:
        if part["type"] == "constants":
            part = [(name, a.shape, a.dtype, a.tolist()) for name, a in part["constants"]]
        found.append(part)

    mx.export_function(callback, function, *inputs)
    return found


def flat(arguments: Iterable) -> list:
    numbers = []
    for value in arguments:
        if isinstance(value, mx.Dtype):
            numbers += [mlxfn.DTYPES.index(value), value.size]
        else:
            numbers += value if isinstance(value, (tuple, list)) else [value]
    return numbers


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GPU_BLOCKS)
def test_a_file_for_the_gpu_is_the_cpus_but_for_streams(tmp_path, name, dtype, packed):
    function, block, layout = gpu_block(name, dtype, fused)
    lengths = [5, 12]
    path = tmp_path / "block.mlxfn"
    sizes = (lengths, [4], packed)
    export_block(str(path), function, block, layout, getattr(mx, dtype), "gpu", *sizes)
    gpu = path.read_bytes()
    cpu = mlxfn.on_device(gpu, "cpu")
    assert mlxfn.on_device(cpu, "gpu") == gpu

    expected = []
    for each in lengths:
        for part in trace(function, *gpu_inputs(block, layout, dtype, each, packed)):
            if isinstance(part, dict) and part["type"] == "primitive":
                expected.append((part["name"], flat(part["arguments"])))
    assert [(p.name, flat(p.state)) for p in mlxfn.primitives(gpu)] == expected
    # The CPU is device 0, the GPU is device 1; no other byte differs.
    assert [(a, b) for a, b in zip(cpu, gpu, strict=True) if a != b] == [(0, 1)] * len(expected)

    used = {name for name, _ in expected} & {"RMSNorm", "RoPE", "ScaledDotProductAttention"}
    fused_ones = {"RMSNorm"}
    if isinstance(block.mixer, AttentionMixer):
        fused_ones |= {"RoPE"}
        fused_ones |= {"ScaledDotProductAttention"} if block.mixer.head_dim == 64 else set()
    assert used == fused_ones
    path.write_bytes(cpu)
    assert len(mx.import_function(str(path))(*gpu_inputs(block, layout, dtype, 5, packed))) >= 9


@pytest.mark.skipif(not mx.metal.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("length", [5, 12])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GPU_BLOCKS)
def test_fused_primitives_are_those_of_a_trace_on_the_gpu(name, dtype, length):
    traces = []
    for device, fast in ((mx.gpu, mx.fast), (mx.cpu, fused)):
        function, block, layout = gpu_block(name, dtype, fast)
        with mx.stream(device):
            traces.append(trace(function, *gpu_inputs(block, layout, dtype, length)))
    assert traces[0] == traces[1]


def test_a_damaged_file_of_functions_is_refused(tmp_path):
    path = tmp_path / "sum.mlxfn"
    mx.export_function(str(path), lambda x: x + mx.array([1.0, 2.0]), mx.zeros(2))
    file = path.read_bytes()
    assert len(mlxfn.on_device(file, "gpu")) == len(file)
    for damaged in (*(file[:length] for length in range(len(file))), file + b"\0"):
        with pytest.raises(ValueError, match="file of functions"):
            mlxfn.on_device(damaged, "gpu")


@pytest.mark.parametrize("version", ["0.31.1", "0.32.1", "0.33.0", "1.0", ""])
def test_a_file_of_another_layout_is_refused(tmp_path, version):
    path = tmp_path / "sum.mlxfn"
    mx.export_function(str(path), lambda x: x + 1, mx.zeros(2))
    file = path.read_bytes()
    written = struct.pack("<Q", len(mx.__version__)) + mx.__version__.encode()
    assert file.startswith(written)
    file = struct.pack("<Q", len(version)) + version.encode() + file.removeprefix(written)
    with pytest.raises(ValueError, match=r"it is not in the layout of MLX 0\.32\.2"):
        mlxfn.primitives(file)


def test_every_small_float_is_exact():
    codes = mx.arange(256, dtype=mx.uint8)
    values = mx.from_fp8(codes, dtype=mx.float32)
    is_nan = codes % 128 == 127
    assert mx.array_equal(mx.isnan(values), is_nan)
    assert mx.array_equal(mx.where(is_nan, 0, dequantize.E4M3), mx.where(is_nan, 0, values))
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    e2m1 = dequantize.e2m1(mx.arange(16, dtype=mx.uint32))
    assert e2m1.tolist() == positive + [-value for value in positive]


def test_one_file_serves_several_lengths_and_ranks(tmp_path):
    case = Case("groups")
    path = str(tmp_path / "block.mlxfn")
    function = case.function()
    export_block(path, function, case.described, case.layout, mx.float32, "cpu", [3, 70], [2, 4])
    from_file = mx.import_function(str(path))
    for seq_len in (3, 70):
        for rank in (2, 4):
            x = mx.random.normal((1, seq_len, case.arch.hidden_size))
            lora = mx.random.normal((case.described.lora_size(rank),)) * 0.1
            arguments = (x, lora, mx.array(SCALE), case.weights)
            assert relative_error(from_file(*arguments)[0], function(*arguments)[0]) <= 1e-6
    with pytest.raises(ValueError, match="No imported function"):
        from_file(x[:, :5], lora, mx.array(SCALE), case.weights)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("name", "layer"), BLOCKS)
def test_a_function_converts_what_is_stored(tmp_path, name, layer, stored):
    """The plain function on stored arrays of any dtype equals the function of the same numbers in
    float32.
    """
    case = Case(name, layer)
    quantizations = {module: MODELS[name][1](module) for module in case.described.modules}
    layout = block_layout(case.described, quantizations, stored)
    words, rounded = mx.zeros(layout.words, mx.uint32), {}
    for spec, wide in zip(layout.arrays, case.layout.arrays, strict=True):
        array = case.layout.unpack(case.weights)[wide.name].astype(DTYPES[spec.dtype])
        rounded[spec.name] = array.astype(DTYPES[wide.dtype])
        flat = mx.pad(array.flatten(), (0, -array.nbytes % 4 // array.itemsize)).view(mx.uint32)
        words[spec.offset : spec.offset + spec.words] = flat
    weights = pack(case.layout, rounded)
    x = mx.random.normal((1, 20, case.arch.hidden_size))
    inputs, more = (case.lora, mx.array(SCALE)), case.more(20)
    expected = case.function()(x, *inputs, weights, *more)

    def outputs(fast: ModuleType | None, dtype: mx.Dtype) -> list[mx.array]:
        path, sizes = str(tmp_path / f"{dtype}.mlxfn"), ([20], [4])
        function = block_function(case.described, layout, fast)
        export_block(path, function, case.described, layout, dtype, "cpu", *sizes)
        given = [each.astype(dtype) for each in more]
        found = mx.import_function(path)(x.astype(dtype), *inputs, words, *given)
        mx.eval(found)  # before another trace
        return found

    for kind, found in (("plain", outputs(None, mx.float32)), ("", outputs(mx.fast, mx.bfloat16))):
        for output, a, b in zip(output_names(case.described), found, expected, strict=True):
            assert a.dtype == (mx.float32 if kind else mx.bfloat16)
            # On a CPU, `quantized_matmul` sums some hundred terms in bfloat16.
            most = TOLERANCE if kind else 0.05
            assert relative_error(a.astype(mx.float32), b) <= most, (kind, output)
