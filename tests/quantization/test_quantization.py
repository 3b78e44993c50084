import json
import math
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_unflatten

from helpers.commands import call
from helpers.exports import refused
from helpers.models import (
    FAMILIES,
    TEXT,
    TINY,
    mlx_lm_model,
    random_tensors,
    write_mixed_model,
    write_model,
)
from mesp.block_function.dequantize import pack, unpack
from mesp.bundle.reader import Bundle
from mesp.bundle.to_source_model import to_source_model
from mesp.models.architecture import Architecture
from mesp.models.quantization_formats import AFFINE, Quantization
from mesp.quantization import least_squares, quantize_rows
from mesp.quantization.choose import Quantizations
from mesp.quantization.coordinate_descent import shrink
from mesp.source_model import calibration
from mesp.source_model.calibration import Moments
from mesp.source_model.forward_pass import SourceModel
from mesp.source_model.quantization_loss import measure_loss
from mesp.source_model.safetensors import SafetensorsWeights

pytestmark = pytest.mark.usefixtures("working_folder")


def export(*arguments: object) -> str:
    options = ("--out", "out.mesp", "--overwrite", "--seq-len", 8)
    return call("export", *arguments, *options).stdout


def weights_of() -> dict[str, str]:
    files = Bundle("out.mesp").manifest.files
    return {file.path: file.sha256 for file in files if file.path.endswith(".bin")}


def values(packed: tuple[mx.array, ...], quantization: Quantization) -> mx.array:
    weight, *rest = packed
    scales, biases = (each.astype(mx.float32) for each in rest)
    return mx.dequantize(weight, scales, biases, quantization.group_size, quantization.bits)


_NORMAL = mx.random.normal((24, 256), key=mx.random.key(1))
MATRICES = {
    "normal": _NORMAL,
    "heavy": _NORMAL**5,
    "shifted": 0.1 * _NORMAL + 7,
    "tiny": _NORMAL * 1e-12,
    "zeros": mx.zeros((24, 256)),
    "constant": mx.full((24, 256), -0.3),
    "outliers": mx.where(mx.arange(256) % 50 == 0, 100 * _NORMAL, _NORMAL),
    "one": mx.where(mx.arange(256) == 3, _NORMAL, 0.0),
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("kind", MATRICES)
def test_error_is_at_most_that_of_the_nearest(kind, dtype):
    matrix = MATRICES[kind]
    spread = mx.exp(3 * mx.random.normal((256,), key=mx.random.key(2)))
    for moments in (None, spread, mx.where(mx.arange(256) < 64, 0.0, spread), 0 * spread):
        for bits, size in ((2, 32), (3, 64), (4, 32), (4, 64), (4, 128), (5, 64), (6, 64), (8, 64)):
            quantization = Quantization(bits, size)
            found = least_squares.quantize(matrix, quantization, moments, dtype)
            packed, *others = mx.quantize(matrix, size, bits)
            nearest = (packed, *(each.astype(dtype) for each in others))
            m = least_squares.damp(moments, 256)
            errors = [
                (m * mx.square(matrix - values(each, quantization))).reshape(-1, size).sum(axis=1)
                for each in (found, nearest)
            ]
            assert mx.isfinite(errors[0]).all()
            slack = 1e-6 * (m * mx.square(matrix)).reshape(-1, size).sum(axis=1)
            assert (errors[0] <= errors[1] * (1 + 1e-4) + slack).all(), (bits, size)


def test_error_with_moments_is_lower():
    matrix = mx.random.normal((128, 512), key=mx.random.key(1))
    moments = mx.exp(mx.random.normal((512,), key=mx.random.key(2)))
    quantization = Quantization()

    def error(packed: tuple[mx.array, ...], m: mx.array) -> float:
        return (m * mx.square(matrix - values(packed, quantization))).sum().item()

    nearest = mx.quantize(matrix, 64, 4)
    for m, bar in ((moments, 0.75), (mx.ones(512), 0.83)):
        found = least_squares.quantize(matrix, quantization, m, mx.float32)
        assert error(found, m) <= bar * error(nearest, m)


def products_of(inputs: mx.array) -> mx.array:
    return inputs.T @ inputs / len(inputs)


def correlated(tokens: int, width: int) -> mx.array:
    common = mx.random.normal((tokens, 16), key=mx.random.key(4))
    mixed = common @ mx.random.normal((16, width), key=mx.random.key(5)) / 2
    return mixed + mx.random.normal((tokens, width), key=mx.random.key(6))


def test_codes_make_up_for_each_others_errors():
    matrix = mx.random.normal((96, 256), key=mx.random.key(1))
    inputs, quantization = correlated(1024, 256), Quantization()
    seen, others = inputs[:512], inputs[512:]

    def error(moments: mx.array) -> float:
        packed = quantize_rows.least_squares_of(moments)(matrix, quantization, mx.float32)
        return mx.square(others @ (matrix - values(packed, quantization)).T).sum().item()

    products = products_of(seen)
    assert error(products) <= 0.75 * error(mx.diag(products))


@pytest.mark.parametrize("kind", MATRICES)
def test_descent_never_adds_error(kind):
    matrix, products = MATRICES[kind], products_of(correlated(300, 256))
    products = mx.where(mx.arange(256) < 3, 0.0, products)  # inputs that are always zero
    products = mx.where(mx.arange(256)[:, None] < 3, 0.0, products)
    for bits, size in ((2, 32), (4, 64), (5, 64), (8, 128)):
        quantization = Quantization(bits, size)
        found, plain = (
            quantize_rows.least_squares_of(moments)(matrix, quantization, mx.bfloat16)
            for moments in (products, mx.diag(products))
        )
        for part in (1, 2):
            assert mx.array_equal(found[part], plain[part])
        P = mx.array(shrink(products))
        e, before = (matrix - values(each, quantization) for each in (found, plain))
        errors, bar = ((each @ P * each).sum(axis=1) for each in (e, before))
        slack = 1e-6 * (matrix @ P * matrix).sum(axis=1)
        assert (errors <= bar * (1 + 1e-4) + mx.abs(slack)).all(), (bits, size)


def test_independent_inputs_leave_the_codes_as_they_are():
    matrix = MATRICES["normal"]
    moments = mx.exp(mx.random.normal((256,), key=mx.random.key(2)))
    quantization = Quantization()
    found, plain = (
        quantize_rows.least_squares_of(each)(matrix, quantization, mx.float32)
        for each in (mx.diag(moments), moments)
    )
    assert all(map(mx.array_equal, found, plain))


@pytest.mark.parametrize("bits", sorted(AFFINE[0]))
def test_weights_on_a_grid_are_exact(bits):
    rng = np.random.default_rng(0)
    levels = 2**bits - 1
    used = rng.integers(max(levels - 3, 1), levels + 1, size=(64, 4, 1))
    codes = np.minimum(rng.integers(0, levels + 1, size=(64, 4, 64)), used)
    codes[..., 0], codes[..., 1:2] = 0, used
    scale = rng.uniform(0.01, 0.1, size=(64, 4, 1))
    matrix = mx.array((scale * codes - 3 * scale).reshape(64, 256).astype(np.float32))
    moments = mx.array(rng.uniform(0.1, 10, size=256).astype(np.float32))
    quantization = Quantization(bits, 64)
    found = values(least_squares.quantize(matrix, quantization, moments, mx.float32), quantization)
    assert mx.abs(found - matrix).max() <= 1e-5 * mx.abs(matrix).max()


@pytest.mark.parametrize("bits", sorted(AFFINE[0]))
def test_packing(bits):
    codes = mx.random.randint(0, 2**bits, (5, 192), key=mx.random.key(bits)).astype(mx.uint32)
    packed = pack(codes, bits)
    assert packed.dtype == mx.uint32 and packed.shape == (5, 192 * bits // 32)
    assert mx.array_equal(unpack(packed, bits).reshape(codes.shape), codes)
    ones, zeros = mx.ones((5, 3)), mx.zeros((5, 3))
    assert mx.array_equal(mx.dequantize(packed, ones, zeros, 64, bits), codes.astype(mx.float32))


# mlx-lm ignores the windows of these models. Texts up to a window's length are unaffected.
WITHOUT_WINDOWS = ("mistral", "phi3", "gemma2")


class Recorder(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.sums = layer, mx.array(0.0)

    def __call__(self, x: mx.array) -> mx.array:
        rows = x.astype(mx.float32).reshape(-1, x.shape[-1])
        self.sums = self.sums + rows.T @ rows
        return self.layer(x)


def source_model(config: dict) -> SourceModel:
    folder = write_model(Path("model"), config, tokenizer=False)
    arch = Architecture.from_config(json.loads((folder / "config.json").read_text()))
    return SourceModel(SafetensorsWeights(folder, arch), arch, Quantizations(Quantization()))


@pytest.mark.parametrize("name", FAMILIES)
def test_moments_are_of_what_mlx_lm_multiplies(name):
    config = FAMILIES[name]
    source = source_model(config)
    model = mlx_lm_model(config)
    recorders = {
        path: Recorder(layer)
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and ".layers." in path
    }
    model.update_modules(tree_unflatten(list(recorders.items())))
    length = config["sliding_window"] if name in WITHOUT_WINDOWS else 24
    sequences = mx.random.randint(0, config["vocab_size"], (2, length), key=mx.random.key(3))
    moments = Moments(source, sequences.tolist())
    products = Moments(source, sequences.tolist(), with_products=True)
    logits = [model(tokens[None])[0] for tokens in sequences]
    for i in range(source.arch.num_hidden_layers):
        found, of_pairs = moments.of_block(i), products.of_block(i)
        block = source.arch.blocks[i]
        assert found.keys() == of_pairs.keys() == (block.modules | block.frozen()).keys()
        for module, sums in found.items():
            (expected,) = (
                each.sums for path, each in recorders.items() if path.endswith(f".{i}.{module}")
            )
            for ours, theirs in ((sums, mx.diag(expected)), (of_pairs[module], expected)):
                assert ours.shape == theirs.shape
                assert mx.linalg.norm(ours - theirs) <= 1e-4 * mx.linalg.norm(theirs), module
    final = [source.final(x)[0] for x in moments.xs]
    assert mx.allclose(moments.of_head(), sum(mx.square(x).sum(axis=0) for x in final))
    z = source.logits(final[1], slice(0, config["vocab_size"]))
    assert mx.linalg.norm(z - logits[1]) <= 1e-4 * mx.linalg.norm(logits[1])


def test_modules_with_many_inputs_have_no_products(monkeypatch):
    monkeypatch.setattr(calibration, "WIDEST", TINY["hidden_size"])
    found = Moments(source_model(TINY), [[1, 2, 3]], with_products=True).of_block(0)
    hidden, wide = TINY["hidden_size"], TINY["intermediate_size"]
    assert found["mlp.up_proj"].shape == (hidden, hidden)
    assert found["mlp.down_proj"].shape == (wide,)


def test_blocks_in_another_order_are_refused():
    moments = Moments(source_model(TINY), [[1, 2, 3]])
    with pytest.raises(ValueError, match="block 0 comes before block 1"):
        moments.of_block(1)


def test_an_export_gives_the_same_again_and_whatever_the_tile(tiny, monkeypatch):
    export("--model", tiny)
    first = weights_of()
    export("--model", tiny)
    assert weights_of() == first
    monkeypatch.setattr(quantize_rows, "TILE", 1000)
    export("--model", tiny)
    assert weights_of() == first


def test_calibrating_counts(tiny):
    export("--model", tiny)
    digests = [weights_of()]
    Path("text.txt").write_text(TEXT)
    calibrated = ("--calibrate", "text.txt")
    for options in (calibrated, calibrated, ("--quantize", "nearest")):
        export("--model", tiny, *options)
        digests.append(weights_of())
    assert digests[1] == digests[2]
    assert len({json.dumps(each) for each in digests}) == 3
    name = "model.layers.1.self_attn.o_proj.weight"
    expected = mx.quantize(random_tensors(TINY)[name], 64, 4)
    for part, array in zip(("weight", "scales", "biases"), expected, strict=True):
        assert mx.array_equal(Bundle("out.mesp").block(1)[f"self_attn.o_proj.{part}"], array)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_has_6_bits(tiny, tied):
    config = {**TINY, "tie_word_embeddings": tied}
    folder = write_model(Path("model"), config)
    said = export("--model", folder)
    assert "4 bits in groups of 64, the head 6 bits in groups of 64," in said
    bundle = Bundle("out.mesp")
    assert Quantization.of(bundle.head(), "", 128) == Quantization(6, 64)
    assert Quantization.of(bundle.embedding(), "", 128) == Quantization(6 if tied else 4, 64)
    name = "model.embed_tokens" if tied else "lm_head"
    config = bundle.config()["quantization"]
    assert config == {
        "bits": 4, "group_size": 64, "mode": "affine",
        name: {"bits": 6, "group_size": 64, "mode": "affine"},
    }  # fmt: skip
    said = export("--model", folder, "--head-bits", 4)
    assert "4 bits in groups of 64," in said and "head" not in said
    export("--model", folder, "--bits", 8)
    assert Quantization.of(Bundle("out.mesp").head(), "", 128) == Quantization(8, 64)


@pytest.mark.parametrize("others", [{}, {"model.embed_tokens": None}])
def test_a_head_that_is_the_table_is_quantized_as_the_table(others):
    arch = Architecture.from_config(FAMILIES["minicpm"])
    said = Quantizations(Quantization(), {"lm_head": Quantization(8), **others}).to_config(arch)
    assert "lm_head" not in said if not others else said["lm_head"] is None


def test_what_quantizes_otherwise_is_refused(tiny):
    assert "leave out one of them" in refused("--model", tiny, "--mode", "mxfp4", "--head-bits", 6)
    for option in (["--quantize", "nearest"], ["--random-weights"], ["--mode", "mxfp4"]):
        error = refused("--model", tiny, "--calibrate", "python-docs", *option)
        assert f"{' '.join(option)} does not use --calibrate" in error
    assert "predict nothing" in refused("--model", tiny, "--random-weights", "--measure")
    bare = write_model(Path("bare"), TINY, tokenizer=False)
    for option in ("--calibrate", "--measure"):
        assert f"which {option} needs" in refused("--model", bare, option, "python-docs")
    assert "There is no data nothing" in refused("--model", tiny, "--calibrate", "nothing")
    quantized = write_mixed_model(Path("quantized"), TINY)
    for option in (["--calibrate", "python-docs"], ["--head-bits", 6]):
        assert "leave out" in refused("--model", quantized, *option)


def test_measuring_equals_mlx_lm(tiny):
    said = export("--model", tiny, "--measure", "python-docs")
    assert " KL " in said and "of python-docs" in said
    source = source_model(TINY)
    bundle = Bundle("out.mesp")
    sequences = mx.random.randint(0, 512, (2, 20), key=mx.random.key(3))
    loss = measure_loss(source, to_source_model(bundle), sequences.tolist())
    models = mlx_lm_model(TINY), bundle.to_mlx_lm()
    kl, losses = [], ([], [])
    for tokens in sequences:
        p, q = (nn.log_softmax(model(tokens[None])[0].astype(mx.float32)) for model in models)
        kl.append((mx.exp(p) * (p - q)).sum(axis=-1))
        for each, log in zip(losses, (p, q), strict=True):
            each.append(-mx.take_along_axis(log[:-1], tokens[1:, None], axis=1)[:, 0])
    kl = np.concatenate(kl)
    assert kl.mean() > 1e-4
    assert np.allclose(loss.kl, kl, rtol=1e-3, atol=1e-6)
    for found, each, perplexity in zip(
        (loss.source, loss.model), losses, loss.perplexities, strict=True
    ):
        assert np.allclose(found, np.concatenate(each), rtol=1e-4)
        assert math.isclose(perplexity, math.exp(np.concatenate(each).mean()), rel_tol=1e-4)


def test_a_model_is_as_far_from_itself_as_nothing(tiny):
    source = source_model(TINY)
    loss = measure_loss(source, source, [[1, 2, 3, 4]])
    assert np.abs(loss.kl).max() <= 1e-6
    assert loss.perplexities[0] == loss.perplexities[1]


PEAK_OF_EXPORT = """
import resource, sys
from mesp.commands.export import main
main(sys.argv[1:], standalone_mode=False)
unit = 1 if sys.platform == "darwin" else 1024
print(unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_is_that_of_tiles(tmp_path):
    config = {**TINY, "hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 2048}
    config |= {"num_hidden_layers": 1}
    folder = write_model(Path("model"), config, tokenizer=False)
    peaks = []
    for how in ("nearest", "least-squares"):
        options = ["--model", folder, "--seq-len", "8", "--quantize", how, "--out", f"{how}.mesp"]
        output = subprocess.check_output([sys.executable, "-c", PEAK_OF_EXPORT, *options])
        peaks.append(int(output.splitlines()[-1]))
    assert peaks[1] - peaks[0] <= 40e6, peaks
