from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import dequantize_model

from helpers.adapters import SCALE, write_adapters
from helpers.commands import call, refused, run
from helpers.gguf_files import q8_0, write_gguf
from helpers.models import FAMILIES, write_model
from mesp.adapters.load import apply_adapters, read_adapters, stack_adapters
from mesp.adapters.weighted import WeightedAdapters
from mesp.bundle.reader import Bundle
from mesp.engine.process import evaluator
from mesp.errors import MespError

pytestmark = pytest.mark.slow
CASES = 60
TOKENS = [5, 6, 7, 8, 9, 10, 11, 5]
LEAST = 2.0**-126
M = [0.0, -1.0, 1e-30, 1e-40, 1e10, 1e38, 3.4e38]
OTHERS = [0.0, 1e-40, 1e-25, 1e10, 1e19, 1e25, 1e38]
SUBNORMAL = 1e-40  # a weight of adapters


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edges")
    model, bundle = write_model(folder / "model", FAMILIES["llama"]), folder / "b.mesp"
    for file in model.glob("*.safetensors"):
        arrays = mx.load(str(file))
        for name, array in arrays.items():
            if name.endswith("proj.weight"):
                rows = mx.array([0.0, 0.0, 1e-25, 1e-40] + [1.0] * (len(array) - 4))
                arrays[name] = array * rows[:, None]
        mx.eval(arrays)
        mx.save_safetensors(str(file), arrays)
    size = ("--seq-len", 8, "--rank", 2, "--group-size", 32, "--data", "python-docs")
    call("export", "--model", model, "--out", bundle, *size)
    return bundle


def write_case(folder: Path, bundle: Path, seed: int) -> list[WeightedAdapters]:
    random = np.random.default_rng(seed)
    adapters = []
    for number in range(random.choice([1, 1, 2, 3])):
        dora, scale = bool(random.random() < 0.7), float(random.choice([SCALE, 1e-6, 1e6]))
        name = folder / f"{seed}.{number}"
        write_adapters(name, bundle, scale=scale, seed=seed + number + 1, dora=dora)
        file = name / "adapters.safetensors"
        arrays = {key: np.array(array) for key, array in mx.load(str(file)).items()}
        for _ in range(random.integers(0, 3)):
            key = str(random.choice([*arrays]))
            row = int(random.integers(0, 6))
            if key.endswith(".m"):
                arrays[key][row] = random.choice(M)
            elif key.endswith("lora_b"):
                arrays[key][:, row] *= random.choice(OTHERS)
            else:
                arrays[key] *= random.choice(OTHERS)
        for key in arrays:  # without B, the first row of W + s (A B)ᵀ is zero
            if key.endswith("lora_b"):
                arrays[key][:, 0] = 0
        mx.save_safetensors(str(file), {key: mx.array(array) for key, array in arrays.items()})
        adapters.append(WeightedAdapters(name, float(random.choice([1, 1, 0.5, 10, SUBNORMAL]))))
    return adapters


def in_float64(base: dict[str, mx.array], adapters: list[WeightedAdapters]) -> dict | None:
    found: dict[str, np.ndarray] = {}
    most = float(np.finfo(np.float32).max)
    for folder, weight in adapters:
        scale = json.loads((folder / "adapter_config.json").read_text())["lora_parameters"]["scale"]
        arrays = {
            key: np.array(array, np.float64)
            for key, array in mx.load(str(folder / "adapters.safetensors")).items()
        }
        for key in (key for key in arrays if key.endswith(".lora_a")):
            path = key.removesuffix(".lora_a")
            W = np.array(base[f"{path}.weight"], np.float64)
            change = scale * (arrays[key] @ arrays[f"{path}.lora_b"]).T
            if (m := arrays.get(f"{path}.m")) is not None:
                squares = np.square(W + change).sum(axis=1)
                norms = np.where(squares < LEAST, np.inf, np.sqrt(squares))
                if squares.max() > most or np.abs(m / norms).max() > most:
                    return None
                change = (m / norms)[:, None] * (W + change) - W
            found[path] = found.get(path, W) + weight * change
    if max(np.abs(array).max() for array in found.values()) > most:
        return None
    return {f"{path}.weight": mx.array(array.astype(np.float32)) for path, array in found.items()}


def log_likelihood(model: nn.Module) -> float:
    logits = model(mx.array([TOKENS[:-1]]))[0].astype(mx.float32)
    return -nn.losses.cross_entropy(logits, mx.array(TOKENS[1:])).sum().item()


def overflows_in_codes(model: nn.Module) -> bool:
    """A product of few rows is computed as scale · Σ code · x + bias · Σ x, so the sum may overflow
    where x Wᵀ does not.
    """
    inputs, call = [], nn.Linear.__call__

    def recording(linear: nn.Linear, x: mx.array) -> mx.array:
        inputs.append(mx.abs(x).max().item())
        return call(linear, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "__call__", recording)
        log_likelihood(model)
    return max(inputs) * 32 * 15 > float(np.finfo(np.float32).max)


def base_of(bundle: Path) -> nn.Module:
    model = Bundle(bundle).to_mlx_lm()
    model.set_dtype(mx.float32)
    return model


def in_the_exporter(bundle: Path, adapters: list[WeightedAdapters]) -> float | None:
    model, arch = base_of(bundle), Bundle(bundle).architecture
    try:
        read = [(read_adapters(folder, arch), weight) for folder, weight in adapters]
        apply_adapters(model, stack_adapters(read, model))
    except MespError as error:
        assert "too large" in error.message
        return None
    found = log_likelihood(model)
    return found if math.isfinite(found) else None


def in_the_engine(bundle: Path, adapters: list[WeightedAdapters]) -> float | None:
    try:
        with evaluator(bundle, adapters) as engine:
            return engine.text(TOKENS, len(TOKENS))
    except MespError as error:
        assert "not finite" in error.message and "\n" not in error.message
        return None


def test_edges_are_equal_or_refused_everywhere(bundle: Path, tmp_path: Path):
    figures: Counter[str] = Counter()
    plain = dequantize_model(base_of(bundle))
    base = dict(tree_flatten(plain.parameters()))
    wrong = []
    for seed in range(CASES):
        adapters = write_case(tmp_path, bundle, seed)
        weights = in_float64(base, adapters)
        plain.update(tree_unflatten([*(base | (weights or {})).items()]))
        expected = log_likelihood(plain) if weights is not None else math.nan
        found = in_the_exporter(bundle, adapters), in_the_engine(bundle, adapters)
        answers = [each for each in found if each is not None]
        is_equal = all(abs(each - expected) <= 1e-3 * abs(expected) for each in answers)
        kind = ["refused", "wrong", "equal"][len(answers)] if is_equal else "wrong"
        # A rare exception: mlx-lm on a CPU multiplies x by the dequantized weights, and the
        # engine's product of few rows (PackedProduct.cpp) first sums codes times x, which alone
        # overflows. Only another, slower product in the engine would remove the exception.
        if answers == [found[0]] and is_equal and overflows_in_codes(plain):
            kind = "refused by the engine's sums of codes"
        figures[kind] += 1
        if kind == "wrong":
            wrong.append((seed, expected, *found))
    print(dict(figures))
    assert not wrong, wrong
    assert figures["equal"] > CASES / 2 and figures["refused"]


def test_fused_weights_are_finite_or_refused(bundle: Path, tmp_path: Path):
    figures: Counter[str] = Counter()
    for seed in range(24):
        adapters, out = write_case(tmp_path, bundle, seed), tmp_path / f"fused {seed}"
        named = (",".join(str(each.folder) for each in adapters), "--val-batches", 1)
        weights = ",".join(str(each.weight) for each in adapters)
        bits = ["8", "bfloat16"][seed % 2]
        options = ("--weights", weights, "--bits", bits, "--out", out)
        done = run("fuse", bundle, "--adapters", *named, *options)
        if done.returncode == 0:
            arrays = mx.load(str(out / "model.safetensors")).values()
            floats = [array for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
            assert all(mx.isfinite(array).all() for array in floats) and "nan" not in done.stdout
        else:
            assert done.returncode == 2 and not out.exists()
            assert len(done.stderr.splitlines()) == 1, done.stderr
        figures["refused" if done.returncode else "finite"] += 1
    print(dict(figures))
    assert figures["refused"] and figures["finite"]


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_a_subnormal_weight_changes_nothing(bundle: Path, tmp_path: Path, count: int, dora: bool):
    seeds = range(1, count + 1)
    folders = [write_adapters(tmp_path / f"{n}", bundle, seed=n, dora=dora) for n in seeds]
    adapters = [WeightedAdapters(folder, SUBNORMAL) for folder in folders]
    expected = in_the_engine(bundle, [])
    assert expected is not None
    for found in (in_the_exporter(bundle, adapters), in_the_engine(bundle, adapters)):
        assert found == pytest.approx(expected, rel=1e-5)
    named = ("--adapters", ",".join(map(str, folders)))
    weights = ("--weights", ",".join([str(SUBNORMAL)] * count))
    out = tmp_path / "fused"
    call("fuse", bundle, *named, *weights, "--bits", "bfloat16", "--val-batches", 0, "--out", out)
    assert all(mx.isfinite(array).all() for array in mx.load(f"{out}/model.safetensors").values())


@pytest.mark.parametrize(
    ("weight", "scale", "said"),
    [
        (1e-46, SCALE, "--weights has 1e-46"),
        (1, SUBNORMAL, "has a rank or scale that is not a positive number"),
    ],
)
@pytest.mark.parametrize("module", ["generate", "fuse"])
def test_a_smaller_weight_or_scale_is_refused(
    bundle: Path, tmp_path: Path, module: str, weight: float, scale: float, said: str
):
    adapters, out = write_adapters(tmp_path / "adapters", bundle, scale=scale), tmp_path / "fused"
    options = ("--prompt", "a") if module == "generate" else ("--out", out)
    done = run(module, bundle, "--adapters", adapters, "--weights", weight, *options)
    assert said in refused(done) and done.stdout == "" and not out.exists()


def test_a_text_of_infinite_logits_is_refused(bundle: Path, tmp_path: Path):
    adapters = write_adapters(tmp_path / "large", bundle, size=1e30)
    done = run("generate", bundle, "--adapters", adapters, "--prompt", "a", "--max-tokens", 2)
    assert "The logits are not finite" in refused(done) and done.stdout == ""


def test_a_gguf_file_of_numbers_beyond_its_type_is_refused(tmp_path: Path):
    def in_8_bits(name: str, matrix: np.ndarray) -> tuple[np.ndarray, Type]:
        return q8_0(name, matrix) if name.startswith("blk.") else (np.float16(matrix), Type.F16)

    file = write_gguf(tmp_path / "base.gguf", "llama", encode=in_8_bits)
    bundle, out = tmp_path / "b.mesp", tmp_path / "fused"
    call("export", "--model", file, "--out", bundle, "--seq-len", 8)
    adapters = write_adapters(tmp_path / "adapters", bundle, size=1e5)
    options = ("--val-batches", 0, "--gguf-base", file, "--out", out)
    said = refused(run("fuse", bundle, "--adapters", adapters, *options))
    assert "are not finite in Q8_0; train" in said and not out.exists()
