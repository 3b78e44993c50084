import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from helpers.exports import NEAREST, export, exported
from helpers.models import FAMILIES, TINY, random_tensors, write_model
from mesp.bundle.reader import Bundle
from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.source_model.safetensors import SafetensorsWeights

pytestmark = pytest.mark.usefixtures("working_folder")
LLAMA = FAMILIES["llama-linear"]
SHAPE = (LLAMA["vocab_size"], LLAMA["hidden_size"])
HEAD = mx.random.normal(SHAPE, key=mx.random.key(9))


def opened(config: dict, tensors: dict[str, mx.array], name: str = "model") -> SafetensorsWeights:
    folder = write_model(Path(name), config, tensors, tokenizer=False)
    return SafetensorsWeights(folder, Architecture.from_config(config))


def table(weights: SafetensorsWeights, name: str) -> mx.array:
    return weights.rows(f"{name}.weight", SHAPE, slice(0, SHAPE[0]))


def test_a_head_is_used_where_the_config_says_nothing():
    config = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    tensors = random_tensors(LLAMA) | {"lm_head.weight": HEAD}
    weights = opened(config, tensors)
    assert not weights.arch.tie_word_embeddings
    assert mx.array_equal(table(weights, "lm_head"), HEAD)
    del tensors["lm_head.weight"]
    with pytest.raises(MespError, match=r"lack lm_head\.weight, which its config\.json asks for"):
        opened(config, tensors, "headless")
    gemma = {key: v for key, v in FAMILIES["gemma2"].items() if key != "tie_word_embeddings"}
    assert opened(gemma, random_tensors(gemma), "gemma").arch.tie_word_embeddings


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_used():
    tensors = random_tensors(LLAMA)
    embedding = tensors["model.embed_tokens.weight"]
    copy = opened(LLAMA, tensors | {"lm_head.weight": embedding}, "copy")
    assert copy.arch.tie_word_embeddings
    other = opened(LLAMA, tensors | {"lm_head.weight": HEAD}, "other")
    assert not other.arch.tie_word_embeddings
    assert mx.array_equal(table(other, "lm_head"), HEAD)
    assert mx.array_equal(table(other, "model.embed_tokens"), embedding)
    bundle = exported("--model", "other", "--seq-len", 8, *NEAREST)
    assert not bundle.architecture.tie_word_embeddings
    assert not bundle.config()["tie_word_embeddings"]
    assert {path.name for path in bundle.path.glob("*.bin")} >= {"embedding.bin", "head.bin"}


def test_the_head_alone_of_a_tied_pair_is_both():
    tensors = random_tensors(LLAMA)
    embedding = tensors.pop("model.embed_tokens.weight")
    weights = opened(LLAMA, tensors | {"lm_head.weight": embedding})
    assert weights.arch.tie_word_embeddings
    assert mx.array_equal(table(weights, "model.embed_tokens"), embedding)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.weight_scale_inv",
        "model.layers.2.input_layernorm.weight",
        "lm_head.bias",
        "score.weight",
    ],
)
@pytest.mark.parametrize("shape", [(), (4,)])
def test_a_tensor_that_nothing_uses_is_named(name, shape):
    with pytest.raises(MespError, match=f"have {name}, which a llama model with its config"):
        opened(LLAMA, random_tensors(LLAMA) | {name: mx.ones(shape)})


def test_what_changes_nothing_is_left_out_without_a_word():
    names = ("rotary_emb.inv_freq", "masked_bias", "k_scale", "v_scale")
    more = {f"model.layers.1.self_attn.{name}": mx.array(1.0) for name in names}
    assert opened(LLAMA, random_tensors(LLAMA) | more).left_out == 0


def test_keys_of_a_block_that_takes_those_of_another_change_nothing():
    config = FAMILIES["gemma4"]
    tensors = random_tensors(config)
    assert "model.layers.4.self_attn.k_proj.weight" not in tensors
    for name in ("k_proj", "k_norm"):
        tensors[f"model.layers.4.self_attn.{name}.weight"] = mx.ones((2, 2))
    assert opened(config, tensors).left_out == 0
    tensors["model.layers.4.self_attn.o_norm.weight"] = mx.ones((2,))
    with pytest.raises(MespError, match="o_norm"):
        opened(config, tensors, "more")


def test_experts_beyond_their_number_are_named():
    config = FAMILIES["qwen3_moe"]
    tensors = random_tensors(config)
    name = "model.layers.1.mlp.experts.8.up_proj.weight"
    with pytest.raises(MespError, match=name):
        opened(config, tensors | {name: tensors[name.replace("8", "7")]})
    config = FAMILIES["qwen3_5_moe"]
    tensors = random_tensors(config)
    name = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(MespError, match=name):
        opened(config, tensors | {name: mx.concatenate([tensors[name], tensors[name][:1]])}, "m")


def test_a_model_without_its_head_has_names_without_a_prefix():
    tensors = random_tensors(LLAMA)
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    weights = opened(LLAMA, bare)
    found = table(weights, "model.embed_tokens")
    assert mx.array_equal(found, tensors["model.embed_tokens.weight"])


def test_one_file_is_read_rather_than_an_index_of_an_older_model():
    new, old = random_tensors(LLAMA), random_tensors(LLAMA, seed=1)
    folder = write_model(Path("model"), LLAMA, old, shards=2, tokenizer=False)
    mx.save_safetensors(str(folder / "model.safetensors"), new)
    weights = SafetensorsWeights(folder, Architecture.from_config(LLAMA))
    assert mx.array_equal(table(weights, "model.embed_tokens"), new["model.embed_tokens.weight"])


def test_an_index_that_names_a_missing_file_says_so():
    folder = write_model(Path("model"), LLAMA, random_tensors(LLAMA), shards=2, tokenizer=False)
    (folder / "model-00002-of-00002.safetensors").unlink()
    result = export("--model", folder, "--out", "out.mesp")
    assert "names model-00002-of-00002.safetensors, which is not in the folder" in result.stderr
    assert result.exit_code == 2


def test_two_files_with_the_same_tensor_are_not_of_one_model():
    folder = write_model(Path("model"), LLAMA, random_tensors(LLAMA), shards=2, tokenizer=False)
    (folder / "model.safetensors.index.json").unlink()
    one, other = (folder / f"model-00001-of-0000{count}.safetensors" for count in (2, 3))
    shutil.copy(one, other)
    with pytest.raises(MespError, match="twice; take the files of one"):
        SafetensorsWeights(folder, Architecture.from_config(LLAMA))


def test_numbers_of_8_bits_are_named_for_what_they_are():
    folder = write_model(Path("model"), LLAMA, random_tensors(LLAMA), tokenizer=False)
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    name = "model.layers.0.self_attn.q_proj.weight"
    begin, end = header[name]["data_offsets"]
    header[name] |= {"dtype": "F8_E4M3", "data_offsets": [begin, begin + (end - begin) // 4]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])
    with pytest.raises(MespError, match=f"{name} in model is of type F8_E4M3, which is not"):
        SafetensorsWeights(folder, Architecture.from_config(LLAMA))


def test_parts_that_do_not_divide_are_no_damage():
    config = FAMILIES["granitemoehybrid"]
    folder = write_model(Path("model"), config, tokenizer=False)
    tensors = mx.load(str(folder / "model.safetensors"))
    name = "model.layers.0.shared_mlp.input_linear.weight"
    with pytest.raises(MespError, match=r"do not fit its config.json: .* 2 equal parts"):
        opened(config, tensors | {name: mx.ones((5, 64))}, "odd")


def test_the_blocks_behind_those_asked_for_are_none_too_many():
    write_model(Path("model"), TINY)
    assert exported("--model", "model", "--layers", 1, "--seq-len", 8, *NEAREST)
    assert isinstance(Bundle("out.mesp"), Bundle)


def test_a_head_that_mlx_lm_has_no_place_for_is_said():
    config = FAMILIES["lfm2"]
    tensors = random_tensors(config)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"][::-1]}
    folder = write_model(Path("model"), config, tensors | head, tokenizer=False)
    bundle = exported("--model", folder, "--seq-len", 8, *NEAREST)
    with pytest.raises(MespError, match="but mlx-lm ties both in lfm2 models"):
        bundle.to_mlx_lm()
