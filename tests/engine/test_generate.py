import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters

import mesp
from helpers.adapters import with_weighted_sum, write_adapters
from helpers.commands import HANG, call, command, refused, run, succeeded
from helpers.models import FAMILIES, TINY, write_model
from mesp.adapters.weighted import weigh
from mesp.bundle.reader import Bundle
from mesp.data.prompts import encode_prompt
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.engine.build import find_engine
from mesp.engine.process import generate
from mesp.errors import MespError
from mesp.runs.log import RunLog

pytestmark = pytest.mark.slow
SEQ_LEN = 64
PROMPT = "A class definition"


def export(model: object, out: Path, *options: object) -> Path:
    call("export", "--model", model, "--out", out, "--seq-len", SEQ_LEN, *options)
    return out


def engine(folder: Path, *words: str, **settings: object) -> subprocess.CompletedProcess:
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    return subprocess.run(
        [find_engine(), *words, path], capture_output=True, text=True, timeout=HANG
    )


def train(bundle: Path, output: Path, **settings: object) -> subprocess.CompletedProcess:
    numbers = {"seq_len": SEQ_LEN, "steps": 20, "learning_rate": 0.1, "val_batches": 4}
    settings = {"bundle": str(bundle), "output": str(output), **numbers, **settings}
    return engine(output.parent, **settings)


@pytest.fixture(scope="module")
def adapters(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("generate") / "run"
    succeeded(train(bundle, output))
    return output / "adapters"


@pytest.fixture
def copy(adapters: Path, tmp_path: Path) -> Path:
    return shutil.copytree(adapters, tmp_path / "adapters")


def ours(
    bundle: Path, prompt: list[int], count: int, adapters: Path | None = None, **options: object
) -> list[int]:
    options |= {"adapters": weigh(adapters), "max_tokens": count}
    *tokens, end = generate(bundle, prompt, **options)
    assert end["tokens"] == len(tokens)
    return [record["token"] for record in tokens]


def theirs(bundle: Path, prompt: list[int], count: int, adapters: Path | None = None) -> list[int]:
    model = Bundle(bundle).to_mlx_lm()
    if adapters is not None:
        load_adapters(model, str(adapters))
    model.eval()
    steps = generate_step(mx.array(prompt), model, max_tokens=count)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize(("text", "count"), [(PROMPT, 100), ("The people of", 40), ("\n\n", 40)])
def test_greedy_text_is_mlx_lms(bundle: Path, adapters: Path, text: str, count: int):
    prompt = load_bundle_tokenizer(bundle).encode(text)
    untrained = ours(bundle, prompt, count)
    assert untrained == theirs(bundle, prompt, count)
    trained = ours(bundle, prompt, count, adapters=adapters)
    assert trained == theirs(bundle, prompt, count, adapters)
    assert trained == ours(bundle, prompt, count, adapters=adapters / "peft")
    assert len(untrained) == len(trained) == count
    assert trained != untrained


def test_a_long_prompt_goes_through_in_pieces(bundle: Path):
    prompt = Bundle(bundle).tokens("valid")[: 3 * 256 + 3].tolist()
    *tokens, end = generate(bundle, prompt, max_tokens=20)
    assert [record["token"] for record in tokens] == theirs(bundle, prompt, 20)
    # When this test was written, the peak footprint was 11 MB on Linux. It does not include mapped
    # weights.
    assert end["footprint_peak_bytes"] < 30e6


@pytest.mark.parametrize("tied", [True, False])
def test_tiny_models_give_mlx_lms_text(tmp_path: Path, text: Path, tied: bool):
    model = write_model(tmp_path / "model", {**TINY, "tie_word_embeddings": tied})
    bundle = export(model, tmp_path / "tiny.mesp", "--data", text)
    assert ours(bundle, [5, 6, 7], 40) == theirs(bundle, [5, 6, 7], 40)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_of_some_projections_and_blocks(bundle: Path, tmp_path: Path, kind: str):
    keys = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]
    parameters = {"rank": 5, "scale": 20.0, "dropout": 0.0, "keys": keys}
    model = Bundle(bundle).to_mlx_lm()
    model.freeze()
    linear_to_lora_layers(model, 2, parameters, use_dora=kind == "dora")
    weights = {
        name: (array if name.endswith(".m") else 0)
        + 0.05 * mx.random.normal(array.shape, key=mx.random.key(i))
        for i, (name, array) in enumerate(tree_flatten(model.trainable_parameters()))
    }
    assert len(weights) == (3 if kind == "dora" else 2) * 2 * len(keys)
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), weights)
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    tokens = ours(bundle, [5, 6, 7], 100, adapters=tmp_path)
    assert tokens == theirs(bundle, [5, 6, 7], 100, tmp_path)
    assert tokens != ours(bundle, [5, 6, 7], 100)


def test_scales_in_bfloat16_follow_float32(bundle: Path, tmp_path: Path, monkeypatch):
    """Scales in bfloat16 have 8 significant bits, so the texts begin alike and may differ later."""
    # By default, codes are fitted to the stored scales, so the two bundles would have different
    # codes.
    options = ("--quantize", "nearest", "--head-bits", 4)
    whole = export("demo", tmp_path / "whole.mesp", *options)
    monkeypatch.setattr("mesp.bundle.export.DTYPE", "bfloat16")
    half = export("demo", tmp_path / "half.mesp", *options)
    prompt = load_bundle_tokenizer(bundle).encode(PROMPT)
    assert ours(half, prompt, 8) == ours(whole, prompt, 8)


def test_a_seed_gives_the_same_text_again(bundle: Path):
    def text(seed: int) -> list[int]:
        return ours(bundle, [5, 6, 7], 30, temperature=1.0, top_p=0.95, seed=seed)

    assert text(1) == text(1)
    assert text(1) != text(2)


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_a_seed_draws_mlx_lms_tokens(bundle: Path, temperature: float, top_p: float):
    model = Bundle(bundle).to_mlx_lm()
    mx.random.seed(11)
    sampler = make_sampler(temperature, top_p)
    # MLX 0.32 draws different tokens from logits [1, vocabulary] and [vocabulary]. The engine's
    # logits are [vocabulary].
    steps = generate_step(
        mx.array([5, 6, 7]), model, max_tokens=100, sampler=lambda logits: sampler(logits[0])[None]
    )
    expected = [int(token) for token, _ in steps]
    options = {"temperature": temperature, "top_p": top_p, "seed": 11}
    assert ours(bundle, [5, 6, 7], 100, **options) == expected


@pytest.mark.parametrize(
    "options", [{"temperature": 2.0, "top_p": 1e-6}, {"temperature": 1e-6, "seed": 3}]
)
def test_little_room_to_choose_is_greedy(bundle: Path, options: dict):
    assert ours(bundle, [5, 6, 7], 50, **options) == ours(bundle, [5, 6, 7], 50)


def test_a_stop_token_ends_the_text(bundle: Path):
    tokens = ours(bundle, [5, 6, 7], 20)
    stop = tokens[10]
    *records, end = generate(bundle, [5, 6, 7], max_tokens=20, stop=[stop])
    assert [record["token"] for record in records] == tokens[: tokens.index(stop)]
    assert end["reason"] == "stop"
    *_, end = generate(bundle, [5, 6, 7], max_tokens=20)
    assert end["reason"] == "length"


def test_the_command_prints_mlx_lms_text(bundle: Path, adapters: Path):
    tokenizer = load_bundle_tokenizer(bundle)
    model = Bundle(bundle).to_mlx_lm()
    load_adapters(model, str(adapters))
    expected = mlx_lm.generate(model.eval() or model, tokenizer, PROMPT, max_tokens=40)
    options = ("--no-chat", "--adapters", adapters, "--max-tokens", 40)
    line = command("generate", bundle, "--prompt", PROMPT, *options)
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == expected + "\n"
    assert run("generate", bundle, "--prompt", "-", *options, input=PROMPT).stdout == done.stdout


@pytest.mark.parametrize("form", ["", "peft"])
def test_several_adapters_give_the_text_of_their_sum(
    bundle: Path, adapters: Path, tmp_path: Path, form: str
):
    without = ("q_proj", "up_proj")
    other = write_adapters(tmp_path / "other", bundle, 0.1, 3, 1.5, seed=2, without=without)
    tokenizer = load_bundle_tokenizer(bundle)
    texts = []
    for weights in ([0.7, 2.0], [0.2, 2.0], [0.7, 0.0]):
        model = with_weighted_sum(bundle, dict(zip((adapters, other), weights, strict=True)))
        expected = mlx_lm.generate(model.eval() or model, tokenizer, PROMPT, max_tokens=60)
        found = mesp.generate(
            bundle, PROMPT, adapters=[adapters / form, other], weights=weights, max_tokens=60,
            chat=False,
        )  # fmt: skip
        assert found == expected
        texts.append(found)
    assert len(set(texts)) == 3
    one = ("--prompt", PROMPT, "--no-chat", "--max-tokens", 60, "--weights", 0.7)
    done = call("generate", bundle, *one, "--adapters", adapters)
    assert done.stdout == texts[-1] + "\n"


def test_one_folder_of_several_that_does_not_fit_is_named(bundle: Path, copy: Path, adapters: Path):
    change_weights(copy, lambda weights: weights.update({"model.layers.77.x": mx.zeros(3)}))
    options = ("--adapters", f"{adapters},{copy}", "--weights", "1,0.5")
    said = refused(run("generate", bundle, "--prompt", PROMPT, *options))
    assert said.startswith(f"Cannot load the adapters in {copy}: it holds model.layers.77.x")


def test_special_tokens_in_a_prompt_become_text_where_asked(bundle: Path):
    tokenizer = load_bundle_tokenizer(bundle)
    prompt = f"The people{tokenizer.eos_token} of"
    for option, split in ((), False), (("--split-special-tokens",), True):
        ids = tokenizer.encode(prompt, split_special_tokens=split)
        assert (tokenizer.eos_token_id in ids) != split
        model = Bundle(bundle).to_mlx_lm()
        expected = mlx_lm.generate(model.eval() or model, tokenizer, ids, max_tokens=20)
        options = ("--no-chat", "--max-tokens", 20, *option)
        assert call("generate", bundle, "--prompt", prompt, *options).stdout == expected + "\n"


@pytest.mark.parametrize("prompt", ["-", "\udce9"])  # é of Latin-1 from the shell
def test_a_prompt_that_is_no_text_is_one_sentence(bundle: Path, prompt: str):
    done = run("generate", bundle, "--prompt", prompt, input=b"\xe9")
    assert done.stdout == "" and "is not UTF-8 text; convert it first." in refused(done)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_text(bundle: Path, number: int):
    process = subprocess.Popen(
        command("generate", bundle, "--prompt", PROMPT, "--max-tokens", 1000000),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    beginning = process.stdout.read(20)
    process.send_signal(number)
    rest, errors = process.communicate(timeout=HANG)
    assert (process.returncode, errors) == (128 + number, "")
    assert beginning and rest.endswith("\n")


def test_sigint_ends_the_engine_with_its_record(bundle: Path):
    records = generate(bundle, [5, 6, 7], max_tokens=1000000)
    assert next(records)["type"] == "token"
    signal.raise_signal(signal.SIGINT)
    *_, end = records
    assert end["reason"] == "stopped"


def test_the_chat_template_is_used_where_there_is_one(bundle: Path, tmp_path: Path):
    chat = load_bundle_tokenizer(bundle)
    assert chat.decode(encode_prompt(chat, "Hello", None)) == "user: Hello\nassistant:"
    assert encode_prompt(chat, "Hello", False) == chat.encode("Hello")
    with_system = encode_prompt(chat, "Hello", None, "Be brief.")
    assert chat.decode(with_system).endswith("Be brief.\nuser: Hello\nassistant:")

    for name in ("config.json", "manifest.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundle / name, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    plain = load_bundle_tokenizer(tmp_path)
    assert encode_prompt(plain, "Hello", None) == plain.encode("Hello")
    with pytest.raises(MespError, match="no chat template"):
        encode_prompt(plain, "Hello", True)
    with pytest.raises(MespError, match="part of a chat template"):
        encode_prompt(plain, "Hello", None, "Be brief.")


def losses(output: Path) -> list[float]:
    return [record["loss"] for record in RunLog.load(output).evals]


@pytest.mark.parametrize("form", ["", "peft"])
def test_training_goes_on_from_adapters(bundle: Path, adapters: Path, tmp_path: Path, form: str):
    succeeded(train(bundle, tmp_path / "run", adapters=str(adapters / form), steps=1))
    assert losses(tmp_path / "run")[0] == losses(adapters.parent)[-1]


@pytest.mark.parametrize("form", ["", "peft"])
def test_training_goes_on_from_dora(bundle: Path, adapters: Path, tmp_path: Path, form: str):
    options = {"dora": True, "projections": ["q", "down"], "num_layers": 2}
    succeeded(train(bundle, tmp_path / "first", **options))
    folder = tmp_path / "first" / "adapters" / form
    succeeded(train(bundle, tmp_path / "on", adapters=str(folder), steps=1, dora=True))
    first = losses(tmp_path / "first")
    assert losses(tmp_path / "on")[0] == pytest.approx(first[-1], rel=1e-6)
    assert abs(first[0] - first[-1]) > 1e-3
    for start, dora, said in (
        (folder, False, "are DoRA's, and a run without dora would lose their magnitudes"),
        (adapters / form, True, "are LoRA's and have no magnitudes, which DoRA trains"),
    ):
        done = train(bundle, tmp_path / "other", adapters=str(start), steps=1, dora=dora)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_magnitudes_that_a_run_does_not_train_are_not_lost(bundle: Path, tmp_path: Path):
    folder = tmp_path / "first" / "adapters"
    succeeded(train(bundle, tmp_path / "first", dora=True, projections=["q"], steps=1))
    tensors = mx.load(str(folder / "adapters.safetensors"))
    for name, tensor in tensors.items():
        factor = 0.0 if name.endswith("lora_b") else 1.1 if name.endswith(".m") else 1.0
        tensors[name] = factor * tensor
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    options = {"adapters": str(folder), "steps": 1, "dora": True, "projections": ["v"]}
    done = train(bundle, tmp_path / "on", **options)
    assert done.returncode == 2 and "does not train" in done.stderr


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"alpha": 32.0}, "set alpha to 16"),
        ({"projections": ["q", "v"]}, "does not train"),
        ({"num_layers": 2}, "does not train"),
    ],
)
def test_adapters_that_do_not_fit_the_run(
    bundle: Path, adapters: Path, tmp_path: Path, settings: dict, said: str
):
    done = train(bundle, tmp_path / "run", adapters=str(adapters), **settings)
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def change_config(folder: Path, **values: object) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict], object]) -> None:
    (path,) = folder.glob("*.safetensors")
    weights = mx.load(str(path))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(path), weights)


def truncate(folder: Path, size: int) -> None:
    (path,) = folder.glob("*.safetensors")
    path.write_bytes(path.read_bytes()[:size])


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


NAME = "model.layers.0.self_attn.q_proj.lora_a"
STRANGER = {"model.layers.77.x": mx.zeros(3)}
RANK_4, RANK_0 = ({"rank": rank, "scale": 2.0} for rank in (4, 0))
DAMAGE = {
    "no config": (without("adapter_config.json"), "no adapter_config.json"),
    "no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "not valid"),
    "no weights": (without("adapters.safetensors"), "no adapters.safetensors"),
    "no parameters": (partial(change_config, lora_parameters=None), "lacks lora_parameters"),
    "dora": (partial(change_config, fine_tune_type="dora"), "q_proj.m is missing"),
    "full": (partial(change_config, fine_tune_type="full"), 'fine_tune_type "full"'),
    "short": (partial(truncate, size=10000), "adapters.safetensors is damaged"),
    "shorter": (partial(truncate, size=100), "adapters.safetensors is damaged"),
    "empty": (partial(truncate, size=0), "adapters.safetensors is damaged"),
    "rank": (
        partial(change_config, lora_parameters=RANK_4),
        f"{NAME} has the shape [192, 8], where the model needs [192, 4]",
    ),
    "rank 0": (partial(change_config, lora_parameters=RANK_0), "rank or scale"),
    "half a pair": (partial(change_weights, change=lambda w: w.pop(NAME)), f"{NAME} is missing"),
    "another model": (
        partial(change_weights, change=lambda w: w.update(STRANGER)), "model.layers.77.x",
    ),
}  # fmt: skip
PEFT_DAMAGE = {
    "no weights": (without("adapter_model.safetensors"), "adapter_model"),
    "dora": (partial(change_config, use_dora=True), "lora_magnitude_vector is missing"),
    "method": (partial(change_config, peft_type="LOHA"), "LOHA"),
    "bias": (partial(change_config, bias="all"), 'bias "all"'),
    "embeddings": (partial(change_config, modules_to_save=["lm_head"]), "modules_to_save"),
    "ranks": (partial(change_config, rank_pattern={"q_proj": 4}), "rank_pattern"),
    "no rank": (partial(change_config, r=None), "lacks r"),
    "shape": (partial(change_config, r=4), "has the shape [8, 192]"),
}


@pytest.mark.parametrize(
    ("form", "damage", "said"),
    [
        *(pytest.param("", *each, id=kind) for kind, each in DAMAGE.items()),
        *(pytest.param("peft", *each, id=f"{kind}, peft") for kind, each in PEFT_DAMAGE.items()),
    ],
)
def test_damaged_adapters_are_named(
    bundle: Path, copy: Path, form: str, damage: Callable[[Path], object], said: str
):
    damage(copy / form)
    check_refused(bundle, copy / form, said)


def check_refused(bundle: Path, adapters: Path, said: str) -> None:
    done = run("generate", bundle, "--prompt", PROMPT, "--adapters", adapters)
    sentence = refused(done)
    assert done.stdout == "" and said in sentence
    assert sentence.startswith(f"Cannot load the adapters in {adapters}: ")


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("granite")
    model = write_model(folder / "model", FAMILIES["granitemoehybrid"])
    bundle = export(model, folder / "b.mesp", "--data", "python-docs")
    succeeded(train(bundle, folder / "run"))
    return bundle, folder / "run" / "adapters"


def test_adapters_of_joined_layers_are_the_same_in_both_forms(granite, tmp_path: Path):
    bundle, adapters = granite

    def loss(name: str, **settings: str) -> float:
        succeeded(train(bundle, tmp_path / name, steps=1, **settings))
        return losses(tmp_path / name)[0]

    expected = loss("mlx", adapters=str(adapters))
    assert abs(expected - loss("none")) > 0.01
    assert loss("peft", adapters=str(adapters / "peft")) == pytest.approx(expected, rel=1e-6)

    # For its joined layer, PEFT trains one A. In mlx-lm's form, gate and up both have this A, and
    # each has its part of B.
    one, two = (shutil.copytree(adapters, tmp_path / name) for name in ("one", "two"))
    change_config(one / "peft", rank_pattern={}, alpha_pattern={})
    weights = mx.load(str(one / "adapters.safetensors"))
    joined = {}
    for i in range(2):
        gate, up = (f"model.layers.{i}.mlp.{name}_proj" for name in ("gate", "up"))
        weights[f"{up}.lora_a"] = weights[f"{gate}.lora_a"]
        b = [weights[f"{name}.lora_b"] for name in (gate, up)]
        path = f"base_model.model.model.layers.{i}.shared_mlp.input_linear"
        joined[f"{path}.lora_A.weight"] = weights[f"{gate}.lora_a"].T
        joined[f"{path}.lora_B.weight"] = mx.concatenate(b, axis=1).T
    change_weights(one / "peft", lambda w: w.update(joined))
    change_weights(two, lambda w: w.update(weights))
    shared = loss("shared", adapters=str(two))
    assert abs(shared - expected) > 1e-4
    found = loss("shared-peft", adapters=str(one / "peft"))
    assert found == pytest.approx(shared, rel=1e-6)


@pytest.mark.parametrize("family", ["lfm2_moe", "granite-moe"])
def test_peft_finds_no_expert_by_the_names_of_an_mlp(tmp_path: Path, family: str):
    model = write_model(tmp_path / "model", FAMILIES[family])
    bundle = export(model, tmp_path / "b.mesp", "--data", "python-docs")
    succeeded(train(bundle, tmp_path / "run", steps=1))
    folder = tmp_path / "run" / "adapters" / "peft"
    pattern = json.loads((folder / "adapter_config.json").read_text())["target_modules"]
    for name in mx.load(str(folder / "adapter_model.safetensors")):
        layer = name.removeprefix("base_model.model.").rpartition(".lora_")[0]
        assert re.fullmatch(pattern, layer), layer
    for expert in ("feed_forward.experts.0.w1", "block_sparse_moe.input_linear"):
        assert not re.fullmatch(pattern, f"model.layers.1.{expert}")


@pytest.mark.parametrize("kind", ["off the diagonal", "another rank", "no alpha"])
def test_joined_layers_of_ranks_of_their_own_are_refused(granite, tmp_path: Path, kind: str):
    bundle, adapters = granite
    copy = shutil.copytree(adapters / "peft", tmp_path / "peft")
    layer = "shared_mlp.input_linear"

    def fill(weights: dict[str, mx.array]) -> None:
        name = f"base_model.model.model.layers.1.{layer}.lora_B.weight"
        weights[name] = weights[name] + 1e-3

    if kind == "off the diagonal":
        change_weights(copy, fill)
    elif kind == "another rank":
        change_config(copy, rank_pattern={layer: 24})
    else:
        change_config(copy, alpha_pattern={})
    check_refused(bundle, copy, "rank_pattern or alpha_pattern")


@pytest.mark.parametrize(
    "parts", [["mlp.gate_proj", "mlp.gate_proj"], ["mlp.gate_proj", "self_attn.x_proj"], []]
)
def test_the_engine_refuses_damaged_joined_layers(granite, tmp_path: Path, parts: list[str]):
    bundle = shutil.copytree(granite[0], tmp_path / "b.mesp")
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["architecture"]["hf_modules"][0][1] = parts
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    done = train(bundle, tmp_path / "run")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "manifest" in done.stderr


def test_rslora_adapters_of_peft_count_alpha_by_the_root(bundle: Path, copy: Path):
    tokens = ours(bundle, [5, 6, 7], 50, adapters=copy / "peft")
    change_config(copy / "peft", use_rslora=True, lora_alpha=16 / 8**0.5)
    assert ours(bundle, [5, 6, 7], 50, adapters=copy / "peft") == tokens


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"prompt": []}, "The prompt must be at least one token long."),
        ({"prompt": [1, 2048]}, "holds the token 2048"),
        ({"prompt": [-1]}, "holds the token -1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1."),
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"seed": None}, "seed"),
        ({"bundle": "/nowhere"}, "/nowhere is not a bundle"),
    ],
)
def test_bad_requests_are_one_sentence(bundle: Path, tmp_path: Path, request_: dict, said: str):
    settings = {"bundle": str(bundle), "adapters": [], "prompt": [1], "max_tokens": 5}
    settings |= {"temperature": 0, "top_p": 1, "seed": 0, "stop": []}
    done = engine(tmp_path, "generate", **(settings | request_))
    assert done.returncode == 2 and said in done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_a_prompt_without_words_is_refused(bundle: Path):
    assert "prompt is empty" in refused(run("generate", bundle, "--no-chat", "--prompt", ""))
