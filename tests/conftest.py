"""Tiny random models, written as the Hugging Face folders that users have."""

import json
import signal
from pathlib import Path

import mlx.core as mx
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mesp.models import Architecture

# A shell that starts the tests in the background has SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

TINY = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.\n\n" * 80


def random_tensors(config: dict, seed: int = 0) -> dict[str, mx.array]:
    """Weights of a model by their Hugging Face names, float32, such that every part matters."""
    arch = Architecture.from_config(config)
    keys = iter(mx.random.split(mx.random.key(seed), 12 * arch.num_hidden_layers + 3))

    def normal(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys)) * shape[-1] ** -0.5

    def norm() -> mx.array:
        return 1 + 0.2 * mx.random.normal((arch.hidden_size,), key=next(keys))

    tensors = {"model.embed_tokens.weight": normal(arch.vocab_size, arch.hidden_size)}
    for i in range(arch.num_hidden_layers):
        prefix = f"model.layers.{i}."
        for name, (out, inp) in arch.projections().items():
            tensors[f"{prefix}{name}.weight"] = normal(out, inp)
            if name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
                tensors[f"{prefix}{name}.bias"] = normal(out) * 3
        tensors[prefix + "input_layernorm.weight"] = norm()
        tensors[prefix + "post_attention_layernorm.weight"] = norm()
    tensors["model.norm.weight"] = norm()
    if not arch.tie_word_embeddings:
        tensors["lm_head.weight"] = normal(arch.vocab_size, arch.hidden_size)
    mx.eval(tensors)
    return tensors


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer with `vocab_size` tokens at most; <|endoftext|> is 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(
    folder: Path,
    config: dict,
    tensors: dict[str, mx.array] | None = None,
    shards: int = 1,
    tokenizer: bool = True,
) -> Path:
    """Writes a Hugging Face model folder and returns it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config) if tensors is None else tensors
    if shards == 1:
        mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    else:
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            names = list(tensors)[i::shards]
            mx.save_safetensors(str(folder / file), {name: tensors[name] for name in names})
            weight_map |= dict.fromkeys(names, file)
        index = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index)
    if tokenizer:
        write_tokenizer(folder, config["vocab_size"])
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer: float32, tied, in one file."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny", TINY)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of some thousand tokens of the tiny model's tokenizer."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path
