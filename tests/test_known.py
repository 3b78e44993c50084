"""The built-in models against what is published of them."""

import pytest

from mesp.known import KNOWN
from mesp.models import Architecture

# Of the safetensors files' metadata on the Hub; Qwen3's below 4B have the tied head a second time.
PUBLISHED = {
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen3-0.6B": 751_632_384 - 151_936 * 1024,
    "Qwen3-1.7B": 2_031_739_904 - 151_936 * 2048,
    "Qwen3-4B": 4_022_468_096,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "SmolLM3-3B": 3_075_098_624,
    "Gemma-3-270m": 268_098_176,
    "Gemma-3-1B": 999_885_952,
    "Gemma-2-2B": 2_614_341_888,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "Phi-4-mini-instruct": 3_836_021_760,
    "Mistral-7B-v0.3": 7_248_023_552,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_a_model_has_the_published_number_of_parameters(name, parameters):
    assert Architecture.from_config(KNOWN[name][2]).num_parameters == parameters


def test_a_variant_for_chats_has_the_geometry_of_its_model():
    for name, (_, _, config) in KNOWN.items():
        base = name.replace("-Instruct", "").removesuffix("-it")
        assert base in PUBLISHED
        assert config is KNOWN[base][2]
