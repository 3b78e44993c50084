from __future__ import annotations

import json
import os
from collections import Counter

import pytest

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from helpers import configurations
from helpers.models import FAMILIES
from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.models.config_json import complete
from mesp.models.families import FAMILIES as KNOWN

TEXTS = {
    name: {key: value for key, value in config.items() if value is not None}
    | ({"model_type": "gemma4_text"} if name == "gemma4" else {})
    for name, config in FAMILIES.items()
    if config["model_type"] in CONFIG_MAPPING
    and (name == "gemma4" or not KNOWN[config["model_type"]].texts)
    and name != "lfm3"  # in transformers, RoPE of type "default" differs
}


def read_by_transformers(config: dict) -> dict:
    its = CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    return json.loads(its.to_json_string(use_diff=False))


def reading(config: dict) -> Architecture | str:
    try:
        return Architecture.from_config(config)
    except MespError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_left_out_is_as_in_transformers(name):
    config = TEXTS[name]
    whole = reading(config)
    assert isinstance(whole, Architecture)
    assert reading(read_by_transformers(config)) == whole
    compared = 0
    for key in config.keys() - {"model_type"}:
        less = {other: value for other, value in config.items() if other != key}
        found = reading(less)
        if isinstance(found, str):
            continue
        try:
            theirs = read_by_transformers(less)
        except Exception:  # transformers raises various errors
            continue
        assert found == reading(theirs), key
        compared += 1
    assert compared >= 3


@pytest.mark.parametrize("name", TEXTS)
def test_a_completed_config_is_complete(name):
    config = TEXTS[name]
    assert reading(complete(config)) == reading(config)
    assert reading(read_by_transformers(complete(config))) == reading(config)


@pytest.mark.parametrize("kind", ["Infinity", "-Infinity", "NaN"])
def test_numbers_that_json_has_not_are_as_transformers_5_writes_them(kind):
    config = FAMILIES["granite-mamba"] | {"time_step_limit": [0.0, {"__float__": kind}]}
    found = reading(config)
    assert isinstance(found, Architecture) == (kind == "Infinity")
    if kind == "Infinity":  # a bundle's config.json must be valid JSON
        assert json.dumps(complete(config), allow_nan=False)


def test_the_number_of_experts_by_either_name():
    """transformers 5 writes `num_local_experts` for Qwen3 MoE."""
    config = dict(FAMILIES["qwen3_moe"])
    number = config.pop("num_experts")
    assert reading(config | {"num_local_experts": number}) == reading(FAMILIES["qwen3_moe"])
    both = FAMILIES["qwen3_moe"] | {"num_local_experts": number + 1}
    assert reading(both) == reading(config | {"num_experts": number + 1})


NOTHING = frozenset(
    ("attention_dropout", "embd_pdrop", "resid_pdrop", "initializer_range", "use_cache",
     "output_router_logits", "router_aux_loss_coef", "pad_token_id", "bos_token_id", "eos_token_id",
     "architectures", "chunk_size_feed_forward", "dtype", "id2label", "label2id", "is_decoder",
     "is_encoder_decoder", "output_attentions", "output_hidden_states", "problem_type",
     "return_dict", "transformers_version", "_name_or_path", "mamba_chunk_size",
     "pretraining_tp", "vocab_size_per_layer_input", "rope_parameters", "tie_encoder_decoder",
     "num_labels")
)  # fmt: skip
# Keys that do not matter for these configs, because another key overrides them or the model lacks
# the part.
UNREAD = frozenset(
    ("max_position_embeddings", "sliding_window", "max_window_layers", "no_rope_layer_interval",
     "sliding_window_pattern", "_sliding_window_pattern", "query_pre_attn_scalar", "rope_theta",
     "top_k_experts", "moe_intermediate_size", "num_experts_per_tok", "intermediate_size",
     "decoder_sparse_step", "position_embedding_type", "block_dim", "rms_norm_eps",
     "mamba_d_head", "mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_n_heads")
)  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_every_key_changes_something_or_is_refused(name):
    config = read_by_transformers(TEXTS[name])
    whole = reading(config)
    unread = set()
    for key, value in config.items():
        others = {bool: [not value], str: ["?"], type(None): [7, [7], {"7": {}}]}
        numbers = [value * 2, value + 1] if type(value) in (int, float) else []
        for other in others.get(type(value), numbers):
            if reading(config | {key: other}) != whole:
                break
        else:
            unread |= {key} - NOTHING if others.get(type(value), numbers) else set()
    assert unread <= UNREAD


OTHERS = configurations.VALUES | {
    "attn_output_gate": False, "block_auto_adjust_ff_dim": True, "dim_model_base": 8,
    "per_layer_config": {"0": {"head_dim": 8}}, "rope_traditional": True, "scale_depth": 3,
    "scale_emb": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
def test_a_key_of_another_family_changes_nothing_or_is_refused(name):
    config = TEXTS[name]
    its = read_by_transformers(config)
    wrong = set()
    of_all = {"head_dim", "original_max_position_embeddings"}
    for key in OTHERS.keys() - its.keys() - of_all:
        more = config | {key: OTHERS[key]}
        try:
            theirs = read_by_transformers(more)
        except Exception:  # transformers raises various errors
            continue
        theirs.pop(key, None)  # absent if transformers renamed it
        found = reading(more)
        if isinstance(found, Architecture) and found != reading(theirs):
            wrong.add(key)
    assert not wrong


TABLE = configurations.read_table()


@pytest.mark.parametrize("name", TABLE)
def test_answers_to_changed_configurations(name):
    base, answers = TABLE[name]["config"], TABLE[name]["answers"]
    for change, expected in answers:
        found = configurations.answer(configurations.changed(base, change), base)
        assert found == ("refused" if expected == "not a model" else expected), change
    kinds = Counter(expected for _, expected in answers if isinstance(expected, str))
    assert kinds.total() and kinds["refused"] < (len(answers) - kinds["not a model"]) / 2
