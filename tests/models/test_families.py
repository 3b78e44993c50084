from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

from helpers.commands import call, run
from helpers.models import FAMILIES, TEXT, write_mixed_model, write_model
from mesp import reference
from mesp.adapters.held_out_loss import measure_held_out_loss
from mesp.adapters.weighted import weigh
from mesp.bundle.reader import Bundle
from mesp.engine.process import generate
from mesp.models.architecture import Architecture
from mesp.runs.log import RunLog

pytestmark = pytest.mark.slow
SEQ_LEN = 24
VAL_BATCHES = 4
IGNORED_WINDOWS = ("mistral", "gemma2", "phi3")


def write(family: str, folder: Path) -> Path:
    if family == "mixed":
        return write_mixed_model(folder, {**FAMILIES["qwen2"], "num_hidden_layers": 3})
    window = {"sliding_window": 64} if family in IGNORED_WINDOWS else {}
    return write_model(folder, FAMILIES[family] | window)


def quantization(path: str, module: nn.Module) -> bool | dict:
    routers = (".mlp.gate", ".feed_forward.gate", ".router.layer", ".shared_expert_gate")
    return {"group_size": 64, "bits": 8} if path.endswith(routers) else True


MIXTURES = [name for name in FAMILIES if Architecture.from_config(FAMILIES[name]).has_experts]


@pytest.mark.parametrize(
    ("family", "trained"),
    [(name, None) for name in (*FAMILIES, "mixed")] + [(name, "experts") for name in MIXTURES],
)
def test_what_is_trained_here_is_the_same_in_mlx_lm(
    family: str, trained: str | None, tmp_path: Path
):
    source, text, bundle, output = (tmp_path / n for n in ("model", "text.txt", "b.mesp", "run"))
    write(family, source)
    text.write_text(TEXT)
    options = ["--seq-len", SEQ_LEN, "--rank", 4]
    if family != "mixed":  # the mixed model is already quantized
        options += ["--quantize", "nearest", "--head-bits", 4]
    call("export", "--model", source, "--data", text, "--out", bundle, *options)
    options = ("--steps", 10, "--val-batches", VAL_BATCHES, "--optimizer", "sgd")
    options += ("--learning-rate", 0.05 if trained is None else 0.5)
    options += () if trained is None else ("--projections", trained)
    call("train", bundle, "--out", output, *options)
    before, after = RunLog.load(output).held_out
    assert after < before - 0.1

    quantized = source
    if family != "mixed":
        quantized = tmp_path / "quantized"
        # Without a predicate, mlx-lm keeps some layers of some families in 8 bits.
        options = {"quant_predicate": quantization, "dtype": "float32"}
        mlx_lm.convert(str(source), str(quantized), quantize=True, **options)
    model, _ = mlx_lm.load(str(quantized))
    held_out = (Bundle(bundle), SEQ_LEN, VAL_BATCHES)
    # The losses differ only by the order of float32 sums.
    assert measure_held_out_loss(model, *held_out) == pytest.approx(before, rel=1e-5)
    load_adapters(model, str(output / "adapters"))
    model.eval()
    assert measure_held_out_loss(model, *held_out) == pytest.approx(after, rel=1e-5)

    if trained:
        layers = model.layers
        kinds = {type(each) for layer in layers for _, each in layer.named_modules()}
        assert LoRASwitchLinear in kinds and LoRALinear not in kinds

    prompt = Bundle(bundle).tokens("valid")[:SEQ_LEN].tolist()
    count = 200 if family in ("qwen3_5", "lfm2", "granite-mamba") else 20
    theirs = [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=count)]
    *ours, _ = generate(bundle, prompt, max_tokens=count, adapters=weigh(output / "adapters"))
    assert [record["token"] for record in ours] == theirs


@pytest.mark.parametrize("family", MIXTURES)
def test_steps_on_experts_are_those_of_mlx_lm(family: str, tmp_path: Path):
    rank, rate, steps = 4, 0.1, 5
    text, bundle = tmp_path / "text.txt", tmp_path / "b.mesp"
    text.write_text(TEXT)
    size = ("--seq-len", SEQ_LEN, "--rank", rank, "--quantize", "nearest", "--head-bits", 4)
    source = write(family, tmp_path / "model")
    call("export", "--model", source, "--data", text, "--out", bundle, *size)
    opened = Bundle(bundle)
    arch = opened.architecture.training_experts()
    options = ("--steps", steps, "--optimizer", "sgd", "--learning-rate", rate)
    options += ("--val-batches", 0, "--projections", ",".join(arch.trainable))
    call("train", bundle, "--out", tmp_path / "run", *options)
    found = RunLog.load(tmp_path / "run").losses
    model = opened.to_mlx_lm()
    model.set_dtype(mx.float32)
    names = [*arch.modules, *(name for block in arch.kinds for name in block.stacked())]
    lora = {"rank": rank, "scale": 16 / rank, "dropout": 0.0, "keys": names}
    linear_to_lora_layers(model, arch.num_hidden_layers, lora)
    start = {}
    pairs = zip(reference.init_lora(arch, rank, 0), arch.blocks, strict=True)
    for i, (flat, block) in enumerate(pairs):
        for name, (a, b) in reference.unpack_lora(flat, block).items():
            path = f"{arch.mlx_root}model.layers.{i}.{name}"
            turn = (lambda m: m.swapaxes(1, 2)) if a.ndim == 3 else (lambda m: m)
            start |= {f"{path}.lora_a": turn(a), f"{path}.lora_b": turn(b)}
    model.load_weights(list(start.items()), strict=False)
    model.freeze()
    model.unfreeze(keys=["lora_a", "lora_b"])
    model.train()
    assert dict(tree_flatten(model.trainable_parameters())).keys() == start.keys()

    def loss(model: nn.Module, window: mx.array) -> mx.array:
        logits = model(window[None, :-1])[0]
        return nn.losses.cross_entropy(logits, window[1:], reduction="mean")

    tokens, expected = mx.array(opened.tokens("train")), []
    windows = (tokens.size - 1) // SEQ_LEN
    optimizer, gradient = optim.SGD(rate), nn.value_and_grad(model, loss)
    for step in range(steps):
        first = SEQ_LEN * reference.step_window(step, 0, windows)
        value, gradients = gradient(model, tokens[first : first + SEQ_LEN + 1])
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), value)
        expected.append(value.item())
    assert abs(expected[-1] - expected[0]) > 0.05
    assert found == pytest.approx(expected, rel=1e-5)
    ours = mx.load(str(tmp_path / "run" / "adapters" / "adapters.safetensors"))
    theirs = dict(tree_flatten(model.trainable_parameters()))
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        moved = mx.linalg.norm(array - start[name])
        # Rounding could change which experts are chosen, but does not do so here.
        assert mx.linalg.norm(ours[name] - array) <= 1e-3 * moved + 1e-7, name


def test_a_fused_module_is_trained_alone(tmp_path: Path):
    text, bundle = tmp_path / "text.txt", tmp_path / "b.mesp"
    text.write_text(TEXT)
    source = write("phi3", tmp_path / "model")
    options = ("--data", text, "--seq-len", SEQ_LEN, "--rank", 4)
    call("export", "--model", source, "--out", bundle, *options)
    options = ("--steps", 5, "--optimizer", "sgd", "--learning-rate", 0.05, "--projections", "qkv")
    call("train", bundle, "--out", tmp_path / "first", *options)
    adapters = tmp_path / "first" / "adapters"
    names = {name.split(".", 3)[3] for name in mx.load(str(adapters / "adapters.safetensors"))}
    assert names == {f"self_attn.qkv_proj.lora_{matrix}" for matrix in "ab"}
    model = Bundle(bundle).to_mlx_lm()
    load_adapters(model, str(adapters))
    model.eval()
    held_out = (model, Bundle(bundle), SEQ_LEN, VAL_BATCHES)
    options += ("--adapters", adapters, "--val-batches", VAL_BATCHES)
    call("train", bundle, "--out", tmp_path / "second", *options)
    start, _ = RunLog.load(tmp_path / "second").held_out
    assert measure_held_out_loss(*held_out) == pytest.approx(start, rel=1e-5)

    done = run("train", bundle, "--out", tmp_path / "third", "--steps", 1, "--projections", "q")
    assert done.returncode == 2
    assert "qkv" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "third").exists()
