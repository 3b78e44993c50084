"""The package xllamacpp contains llama.cpp. llama.cpp must write the tokens of `mesp generate`,
with mlx-lm's log-probabilities.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import unicodedata
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

pytestmark = pytest.mark.llama
pytest.importorskip("xllamacpp", reason="`make test-slow` installs xllamacpp")

import xllamacpp
from gguf import GGMLQuantizationType as Type
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import dequantize_model
from tokenizers import Tokenizer

from helpers.adapters import exported, with_weighted_sum, write_adapters
from helpers.commands import call
from helpers.gguf_files import INTERLEAVED, MODELS, q8_0, write_gguf
from helpers.models import FAMILIES, random_tensors
from mesp.adapters.weighted import WeightedAdapters, weigh
from mesp.bundle.reader import Bundle
from mesp.data.prompts import encode_prompt
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.engine.process import generate
from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.models.quantization_formats import Quantization
from mesp.quantization.choose import Quantizations
from mesp.source_model.forward_pass import SideInputs, SourceModel
from mesp.source_model.gguf.blocks import UNQUANTIZED
from mesp.source_model.gguf.config import config_of
from mesp.source_model.gguf.header import GGUF, copy
from mesp.source_model.gguf.tensor_names import ARCHITECTURES
from mesp.source_model.gguf.tokenizer import PRE_TOKENIZERS, write_tokenizer
from mesp.source_model.gguf.weights import GGUFWeights
from studies.real_models import GEMMA, SMOLLM2, gguf_file

COUNT = 48
END = 0
# The tolerance of a log-probability, by the activation. MeSP and llama.cpp compute in float32, and
# different orders of sums make errors of 1e-5. But llama.cpp looks GELU up in a float16 table. This
# rounding of GELU changes a log-probability by 0.012.
TOLERANCE = {"silu": 1e-4, "gelu": 0.02}
# Weights in bfloat16 have 8 bits of mantissa, which changes a log-probability by about 0.04.
BFLOAT16 = 0.1
# Changes to the config.json of these families. RoPE is not scaled, because `write_base` writes no
# scaling. Windows are longer than the text, because mlx-lm ignores some windows. The other keys
# have the values that llama.cpp assumes.
_GEMMA = {"query_pre_attn_scalar": 32, "sliding_window": 64}
TINY = {
    "qwen3": {},
    "llama": {"rope_scaling": None},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "rope_local_base_freq": 10000.0},
    "mistral": {"rope_scaling": None, "sliding_window": 64},
    "phi3": {"rope_scaling": None, "sliding_window": 64},
}


@dataclass
class Case:
    bundle: Path
    adapters: Path
    fused: Path

    @property
    def prompt(self) -> list[int]:
        return Bundle(self.bundle).tokens("train")[:4].tolist()

    def model(self) -> nn.Module:
        return Bundle(self.bundle).to_mlx_lm()

    def adapted(self) -> nn.Module:
        return load_adapters(self.model(), str(self.adapters))


@pytest.fixture(scope="module", params=["demo", *TINY])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, name = tmp_path_factory.mktemp(request.param), request.param
    if name == "demo":
        bundle = folder / "bundle.mesp"
        call("export", "--model", "demo", "--out", bundle, "--seq-len", 64)
        call("train", bundle, "--steps", 40, "--val-batches", 0, "--out", folder / "run")
        adapters = folder / "run" / "adapters"
    else:
        bundle = exported(folder, FAMILIES[name] | TINY[name])
        adapters = write_adapters(folder / "adapters", bundle, 1.0 if "gemma" in name else 0.1)
    options = ("--bits", "bfloat16", "--gguf", "--val-batches", 0)
    call("fuse", bundle, "--adapters", adapters, "--out", folder / "fused", *options)
    return Case(bundle, adapters, folder / "fused")


def write_base(path: Path, model: nn.Module, folder: Path) -> Path:
    """Writes mlx-lm's model as GGUF in float32, with metadata from the config.json in `folder`.

    A token's text is its id, because the tests give llama.cpp ids and get ids from it.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = Architecture.from_config(config)
    name = ARCHITECTURES[arch.model_type]
    architecture = gguf.MODEL_ARCH[name]
    names = gguf.get_tensor_name_map(architecture, arch.num_hidden_layers)

    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(arch.num_hidden_layers)
    writer.add_embedding_length(arch.hidden_size)
    writer.add_feed_forward_length(arch.mlps[0].intermediate_size)
    mixer = arch.mixers[0]
    writer.add_head_count(mixer.num_attention_heads)
    writer.add_head_count_kv(mixer.num_key_value_heads)
    writer.add_key_length(mixer.head_dim)
    writer.add_value_length(mixer.head_dim)
    writer.add_layer_norm_rms_eps(arch.rms_norm_eps)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(2 * len(mixer.frequencies))
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if arch.final_logit_softcapping:
        writer.add_attn_logit_softcapping(mixer.attn_logit_softcapping)
        writer.add_final_logit_softcapping(arch.final_logit_softcapping)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([str(token) for token in range(arch.vocab_size)])
    writer.add_eos_token_id(END)

    heads = {"q_proj": mixer.num_attention_heads, "k_proj": mixer.num_key_value_heads}
    model.set_dtype(mx.float32)
    for key, weight in tree_flatten(dequantize_model(model).parameters()):
        array = np.array(weight)
        module = key.split(".")[-2]
        if module in heads and name.lower() in INTERLEAVED:
            halves = array.reshape(heads[module], 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if module.endswith("norm"):
            array = array + np.float32(arch.norm_offset)
        writer.add_tensor(names.get_name(key, (".weight", ".bias")), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write(model: Path, prompt: list[int], adapters: Path | None = None) -> list[dict]:
    request = {"prompt": prompt, "n_predict": COUNT, "temperature": 0, "n_probs": 2}
    answer = serve(model, adapters).handle_completions(request)
    return answer["choices"][0]["logprobs"]["content"]


def serve(model: Path, adapters: Path | None = None) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.verbosity = 128, 1, 0, -1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    # One thread only: on a busy machine, several threads wait for each other without sleeping,
    # which takes minutes.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if adapters is not None:
        lora = xllamacpp.CommonAdapterLoraInfo()
        lora.path, lora.scale = str(adapters), 1.0
        params.lora_adapters = [lora]
    return xllamacpp.Server(params)


def log_probabilities(model: nn.Module, prompt: list[int], tokens: list[int]) -> list[float]:
    model.set_dtype(mx.float32)
    logits = model(mx.array([prompt + tokens]))[0, len(prompt) - 1 : -1]
    return np.array(nn.log_softmax(logits, -1))[range(len(tokens)), tokens].tolist()


def check(
    case: Case,
    steps: list[dict],
    model: nn.Module,
    adapters: Sequence[WeightedAdapters],
    rounding: float = 0,
) -> None:
    """Compares the log-probabilities of llama.cpp's tokens with those of `model`, and the tokens
    with those of mesp generate.

    After a tie the tokens may differ. In a tie, the log-probabilities of the two likeliest tokens
    differ by at most the larger of the tolerance and `rounding`.
    """
    tolerance = TOLERANCE[Bundle(case.bundle).architecture.hidden_act]
    expected = log_probabilities(model, case.prompt, [step["id"] for step in steps])
    assert [step["logprob"] for step in steps] == pytest.approx(expected, abs=tolerance)

    settings = {"adapters": adapters, "max_tokens": COUNT, "stop": [END]}
    *records, _ = generate(case.bundle, case.prompt, **settings)
    tokens = [record["token"] for record in records]
    tokens += [END] * (len(tokens) < COUNT)  # llama.cpp includes the end token
    for token, step in zip(tokens, steps, strict=True):
        if token != step["id"]:
            first, second = step["top_logprobs"]
            assert second["id"] == token
            assert first["logprob"] - second["logprob"] <= max(tolerance, rounding)
            break


def test_adapters(case: Case, tmp_path: Path):
    base = write_base(tmp_path / "base.gguf", case.model(), case.bundle)
    plain = write(base, case.prompt)
    tuned = write(base, case.prompt, case.fused / "adapters.gguf")
    check(case, plain, case.model(), ())
    check(case, tuned, case.adapted(), weigh(case.adapters))
    assert [step["id"] for step in plain] != [step["id"] for step in tuned]


def test_several_adapters_with_weights(case: Case, tmp_path: Path):
    other = write_adapters(tmp_path / "other", case.bundle, rank=3, seed=2, without=("q_proj",))
    weights = {case.adapters: 0.7, other: 0.3}
    options = ("--weights", "0.7,0.3", "--gguf", "--val-batches", 0)
    folders = f"{case.adapters},{other}"
    call("fuse", case.bundle, "--adapters", folders, *options, "--out", tmp_path / "fused")
    base = write_base(tmp_path / "base.gguf", case.model(), case.bundle)
    steps = write(base, case.prompt, tmp_path / "fused" / "adapters.gguf")
    model = with_weighted_sum(case.bundle, weights)
    check(case, steps, model, weigh([*weights], [*weights.values()]))


def test_a_fused_model(case: Case, tmp_path: Path):
    fused, _ = mlx_lm.load(str(case.fused))
    steps = write(write_base(tmp_path / "fused.gguf", fused, case.fused), case.prompt)
    check(case, steps, fused, weigh(case.adapters), BFLOAT16)


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_and_its_bundle_agree(name: str, tmp_path: Path):
    """llama.cpp gets Q8_0 weights as float32, because for Q8_0 it would round activations to 8
    bits.
    """
    tensors = random_tensors(MODELS[name][1])
    quantized = write_gguf(tmp_path / "quantized.gguf", name, tensors)
    # llama.cpp gets and returns ids here, so its tokens may be numbers. An export needs a tokenizer
    # for text.
    base = write_gguf(tmp_path / "base.gguf", name, tensors, vocabulary="numbers")
    plain = write_gguf(tmp_path / "plain.gguf", name, tensors, dequantized, "numbers")
    bundle = tmp_path / "bundle.mesp"
    call("export", "--model", quantized, "--out", bundle, "--seq-len", 8)
    prompt = [5, 17, 30, 2, 90, 44]
    steps = write(plain, prompt)
    model = Bundle(bundle).to_mlx_lm()
    expected = log_probabilities(model, prompt, [step["id"] for step in steps])
    tolerance = TOLERANCE[Bundle(bundle).architecture.hidden_act]
    assert [step["logprob"] for step in steps] == pytest.approx(expected, abs=tolerance)

    size = 0.3 if name.startswith(("gemma", "granite")) else 0.1
    adapters, fused = write_adapters(tmp_path / "adapters", bundle, size), tmp_path / "fused"
    options = ("--bits", "bfloat16", "--gguf", "--gguf-base", base)
    call("fuse", bundle, "--adapters", adapters, "--out", fused, *options)
    adapted = load_adapters(Bundle(bundle).to_mlx_lm(), str(adapters))
    for file, lora, allowed in (
        (plain, fused / "adapters.gguf", tolerance),
        (fused / "model.gguf", None, 0.3),  # rounds weights to bfloat16, and activations to 8 bits
    ):
        steps = write(file, prompt, lora)
        written = [step["id"] for step in steps]
        tuned = log_probabilities(adapted, prompt, written)
        assert [step["logprob"] for step in steps] == pytest.approx(tuned, abs=allowed)
        assert max(map(abs, np.subtract(tuned, log_probabilities(model, prompt, written)))) > 0.3


ROPE: dict[str, list] = {
    "scaling.type": ["none", "linear", "yarn", "yarn", "longrope"],
    "scaling.factor": [0.0, 1.0, 2.0, 4.0],
    "scale_linear": [2.0],
    "scaling.original_context_length": [16, 64],
    "scaling.attn_factor": [1.0, 1.5],
    "scaling.finetuned": [True],
    "scaling.yarn_log_multiplier": [0.5, 1.0],
    "scaling.yarn_beta_fast": [8.0],
    "scaling.yarn_beta_slow": [2.0],
    "freq_base": [100.0, 1e6],
}
_KINDS = {str: "STRING", int: "UINT32", float: "FLOAT32", bool: "BOOL"}


def test_metadata_of_rope_are_read_as_llama_cpp_reads_them(tmp_path: Path):
    tensors = random_tensors(MODELS["qwen2"][1])
    rng, counts, prompt = random.Random(0), Counter(), [5, 17, 30, 2, 90, 44]
    for number in range(60):
        keys = {key: rng.choice(ROPE[key]) for key in rng.sample(sorted(ROPE), rng.randint(1, 5))}
        changed = {
            f"qwen2.rope.{key}": gguf.GGUFValue(value, gguf.GGUFValueType[_KINDS[type(value)]])
            for key, value in keys.items()
        }
        file = tmp_path / f"{number}.gguf"
        write_gguf(file, "qwen2", tensors, dequantized, "numbers", changed=changed)
        read = GGUF.read(file)
        try:
            arch = Architecture.from_config(config_of(read))
        except MespError:
            counts["refused"] += 1
            continue
        steps = write(file, prompt)
        tokens = prompt + [step["id"] for step in steps]
        model = SourceModel(GGUFWeights(read, arch), arch, Quantizations(Quantization()))
        x = model.embed(tokens)
        side = SideInputs(tokens, x)
        for index in range(arch.num_hidden_layers):
            x = model.block(index, x, side)
        found = nn.log_softmax(model.logits(model.final(x), slice(0, arch.vocab_size))[0], -1)
        rows = range(len(prompt) - 1, len(tokens) - 1)
        ours = np.array(found)[rows, tokens[len(prompt) :]].tolist()
        assert [step["logprob"] for step in steps] == pytest.approx(ours, abs=1e-4), keys
        counts["equal"] += 1
    print(
        f"\n{counts.total()} tried, {counts['refused']} refused, {counts['equal']} equal, 0 wrong"
    )


def dequantized(name: str, matrix: np.ndarray) -> tuple[np.ndarray, Type]:
    return gguf.dequantize(*q8_0(name, matrix)), Type.F32


@dataclass
class RealModel:
    file: Path
    bundle: Path

    def served(self) -> xllamacpp.Server:
        return serve(self.file)


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RealModel:
    try:
        file = gguf_file(request.param)
    except MespError as error:
        pytest.skip(error.message)
    bundle = tmp_path_factory.mktemp("real") / "bundle.mesp"
    call("export", "--model", file, "--out", bundle, "--seq-len", 64)
    return RealModel(file, bundle)


def test_a_real_models_distributions_are_llama_cpps(real: RealModel):
    """The mean KL divergence, in nats, is small. It covers the likeliest 1,000 tokens one by one,
    and the rest together. llama.cpp rounds the inputs of quantized matrices to 8 bits.
    """
    model = Bundle(real.bundle).to_mlx_lm()
    model.set_dtype(mx.float32)
    ids = load_bundle_tokenizer(real.bundle).encode(inspect.getdoc(json) or "")[:96]
    ours = np.array(nn.log_softmax(model(mx.array([ids]))[0].astype(mx.float32), -1), np.float64)
    server, divergences = real.served(), []
    for end in range(8, len(ids), 6):
        request = {"prompt": ids[:end], "n_predict": 1, "temperature": 0, "n_probs": 1000}
        answer = server.handle_completions(request)["choices"][0]["logprobs"]["content"][0]
        listed = {each["id"]: each["logprob"] for each in answer["top_logprobs"]}
        theirs, here = np.array([*listed.values()]), ours[end - 1][[*listed]]
        apart = np.exp(theirs) @ (theirs - here)
        rest, rest_here = (max(1 - np.exp(each).sum(), 1e-12) for each in (theirs, here))
        divergences.append(apart + rest * np.log(rest / rest_here))
    # Nearly all of the divergence comes from llama.cpp's rounding of inputs. With a file in
    # float32, Gemma's divergence is 0.0001 instead of 0.011.
    assert np.mean(divergences) <= (0.005 if "SmolLM2" in real.file.name else 0.02)


PROMPTS = (
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "The quick brown fox",
    "List three fruits.",
    "In 1969, the first man",
    "Explain why the sky is blue.",
    "Once upon a time, there was a",
    "2, 4, 6, 8,",
    "Water boils at",
    "Translate to French: good morning.",
)


def test_a_real_model_writes_what_llama_cpp_writes(real: RealModel, tmp_path: Path):
    """llama.cpp reads a float32 file, because it would round the inputs of quantized weights."""
    file = GGUF.read(real.file)
    quantized = [n for n, tensor in file.tensors.items() if tensor.type not in UNQUANTIZED]
    copy(file, tmp_path / "plain.gguf", dict.fromkeys(quantized, np.ascontiguousarray), Type.F32)
    tokenizer, server, same = load_bundle_tokenizer(real.bundle), serve(tmp_path / "plain.gguf"), 0
    for prompt in PROMPTS:
        ids = encode_prompt(tokenizer, prompt, None)
        request = {"prompt": ids, "n_predict": 32, "temperature": 0, "n_probs": 1}
        written = server.handle_completions(request)["choices"][0]["logprobs"]["content"]
        theirs = [step["id"] for step in written]
        *records, _ = generate(real.bundle, ids, max_tokens=len(theirs))
        same += [record["token"] for record in records] == theirs
    assert same >= 9


def test_a_real_models_tokens_are_llama_cpps(real: RealModel):
    tokenizer = Tokenizer.from_file(str(real.bundle / "tokenizer.json"))
    tokenize = tokenize_with(real.served())
    lines = mixed_lines(1000)
    assert [tokenizer.encode(line).ids for line in lines] == [tokenize(line) for line in lines]


@pytest.mark.parametrize("vocabulary", [*PRE_TOKENIZERS, "pieces"])
def test_a_text_has_llama_cpps_tokens(vocabulary: str, tmp_path: Path):
    tensors = random_tensors(MODELS["qwen2"][1])
    file = write_gguf(tmp_path / "tiny.gguf", "qwen2", tensors, vocabulary=vocabulary)
    write_tokenizer(GGUF.read(file), tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenize = tokenize_with(serve(file))
    lines = [unicodedata.normalize("NFC", line) for line in mixed_lines(300)]
    assert [tokenizer.encode(line).ids for line in lines] == [tokenize(line) for line in lines]


def tokenize_with(server: xllamacpp.Server) -> Callable[[str], list[int]]:
    def tokenize(text: str) -> list[int]:
        asked = {"content": text, "add_special": True, "parse_special": True}
        headers = {"Content-Type": "application/json"}
        address = f"{server.listening_address}/tokenize"
        request = urllib.request.Request(address, json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["tokens"]

    return tokenize


def mixed_lines(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    words = """the Brown can't we'll I'M they'VE naïve café Straße ΑΒΓ Привет мир こんにちは 世界
    안녕하세요 مرحبا שלום नमस्ते ﬁ e\u0301 x² ½ Ⅷ ٣٤ 1 23 456 12345 3.14 1e-9 0xFF
    foo_bar fooBar HTTPServer __init__ a+b==c != <= -> :: // # % $x {} [0] (y) "q" 'z' \\n ... ,,
    ;; — 😀 👩‍👩‍👧 🇫🇷"""
    spaces = [" "] * 12
    spaces += ["  ", "   ", "\t", " \t ", "\n", "\n\n", " \n", "\n ", "\r\n", "", "\u3000"]
    code = [line for line in inspect.getsource(argparse).splitlines() if line]

    def line(index: int) -> str:
        if index % 3 == 0:
            return "\n".join(rng.sample(code, rng.randint(1, 4)))
        return "".join(
            rng.choice(words.split()) + rng.choice(spaces) for _ in range(rng.randint(1, 16))
        )

    return [line(index) for index in range(count)]
