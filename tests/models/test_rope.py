import math

import numpy as np
import pytest

from helpers.models import FAMILIES
from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.models.config_json import check_lengths, complete, find_positions, for_mlx_lm

SIZE, THETA, LONGEST = 64, 5e5, 131072
BASE = THETA ** (-np.arange(0, SIZE, 2) / SIZE)
LLAMA = {**FAMILIES["llama-linear"], "head_dim": SIZE, "rope_theta": THETA}
LLAMA |= {"max_position_embeddings": LONGEST}


def turns(scaling: dict | None, length: int = 1, **others: object) -> tuple[np.ndarray, float]:
    config = LLAMA | {"rope_scaling": scaling} | others
    mixer = Architecture.from_config(config, length).mixers[0]
    again = Architecture.from_config(complete(config), length).mixers[0]
    assert again == mixer
    return np.array(mixer.frequencies), mixer.rope_scale


def yarn(factor: float, length: float, fast=32.0, slow=1.0, truncate=True) -> np.ndarray:
    """Returns YaRN's frequencies (Peng et al., arXiv:2309.00071), as transformers computes them."""

    def dimension(rotations: float) -> float:
        return SIZE * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = dimension(fast), dimension(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, SIZE - 1)
    ramp = np.clip((np.arange(SIZE // 2) - low) / (high - low), 0, 1)
    return BASE / factor * ramp + BASE * (1 - ramp)


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16384}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAST, SLOW = [1 + i / 32 for i in range(32)], [1 + i / 8 for i in range(32)]
LONGROPE = {"rope_type": "longrope", "short_factor": FAST, "long_factor": SLOW}
SHORT = LONGROPE | {"original_max_position_embeddings": 4096}
MAGNITUDE = 0.1 * math.log(8) + 1
RATIO = (0.2 * math.log(8) + 1) / (0.05 * math.log(8) + 1)


@pytest.mark.parametrize(
    ("scaling", "expected", "factor"),
    [
        (YARN, yarn(8, 16384), MAGNITUDE),
        (YARN | {"attention_factor": 1.0}, yarn(8, 16384), 1),
        (YARN | {"attention_factor": 0.7, "mscale": 2.0}, yarn(8, 16384), 0.7),
        (YARN | {"truncate": False}, yarn(8, 16384, truncate=False), MAGNITUDE),
        (YARN | {"truncate": True}, yarn(8, 16384), MAGNITUDE),
        (YARN | {"beta_fast": 16, "beta_slow": 2}, yarn(8, 16384, 16, 2), MAGNITUDE),
        (YARN | {"beta_fast": 0, "beta_slow": None}, yarn(8, 16384), MAGNITUDE),
        (YARN | {"mscale": 0.5}, yarn(8, 16384), MAGNITUDE),
        (YARN | {"mscale_all_dim": 0.5}, yarn(8, 16384), MAGNITUDE),
        (YARN | {"mscale": 2.0, "mscale_all_dim": 0.5}, yarn(8, 16384), RATIO),
        (YARN | {"factor": None}, yarn(8, 16384), MAGNITUDE),
        ({"type": "yarn", "factor": 8.0}, yarn(8, LONGEST), MAGNITUDE),
        (YARN | {"type": "default"}, yarn(8, 16384), MAGNITUDE),
        ({"rope_type": "default", "type": "yarn"}, BASE, 1),
        (YARN | {"factor": 1.0}, BASE, 1),
        (YARN | {"finetuned": True}, yarn(8, 16384), MAGNITUDE),
        ({"type": "linear", "factor": 4.0}, BASE / 4, 1),
        (LONGROPE | {"original_max_position_embeddings": LONGEST}, BASE / FAST, 1),
        (SHORT, BASE / FAST, math.sqrt(1 + math.log(32) / math.log(4096))),
        (SHORT | {"factor": 4.0}, BASE / FAST, math.sqrt(1 + math.log(4) / math.log(4096))),
        (SHORT | {"attention_factor": 1.5}, BASE / FAST, 1.5),
    ],
)
def test_frequencies(scaling, expected, factor):
    found, scale = turns(scaling)
    assert found == pytest.approx(expected, rel=1e-12)
    assert scale == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(("most", "found"), [(0, None), (-1, None), ("8", None), (1, 1)])
def test_positions_are_a_positive_number(most, found):
    assert find_positions({"max_position_embeddings": most}) == found


def test_llama3_slows_down_what_turns_seldom_in_the_original_length():
    for length in (8192, None):
        scaling = LLAMA3 | ({"original_max_position_embeddings": length} if length else {})
        found, scale = turns(scaling)
        rounds = (length or LONGEST) * BASE / (2 * math.pi)
        share = np.clip((rounds - 1) / (4 - 1), 0, 1)
        assert found == pytest.approx((1 - share) * BASE / 32 + share * BASE, rel=1e-12)
        assert scale == 1


def test_the_original_length_beside_the_scaling_comes_first():
    scaling = YARN | {"original_max_position_embeddings": 1}
    found, _ = turns(scaling, original_max_position_embeddings=16384)
    assert found == pytest.approx(yarn(8, 16384), rel=1e-12)


def test_longrope_has_other_factors_beyond_the_original_length():
    for length, factors in ((4096, FAST), (4097, SLOW)):
        assert turns(SHORT, length)[0] == pytest.approx(BASE / factors, rel=1e-12)
    config = LLAMA | {"rope_scaling": SHORT}
    check_lengths(config, [256, 4096])
    check_lengths(config, [4097, 8192])
    with pytest.raises(MespError, match=r"Beyond 4,096 tokens .* as two bundles"):
        check_lengths(config, [256, 4097])


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        (YARN | {"attn_factor": 2.0}, r"attn_factor of rope_scaling \(of the type 'yarn'\)"),
        (YARN | {"low_freq_factor": 1.0}, "low_freq_factor"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 2}, "beta_fast"),
        ({"factor": 2.0}, r"factor of rope_scaling \(of the type 'default'\)"),
        (LLAMA3 | {"truncate": False}, "truncate"),
        ({"type": "dynamic", "factor": 4.0}, "dynamic"),
        ({"type": "linear"}, "lacks 'factor'"),
        ({"type": "llama3", "factor": 8.0}, "lacks 'low_freq_factor'"),
        (LONGROPE | {"short_mscale": 1.1}, "short_mscale"),
    ],
)
def test_what_no_formula_reads_is_named(scaling, named):
    with pytest.raises(MespError, match=named):
        turns(scaling)
    if "lacks" not in named:
        where = named.replace("rope_scaling", "rope_parameters")
        with pytest.raises(MespError, match=where):
            turns(None, rope_parameters={"rope_theta": THETA} | scaling)


def test_what_no_formula_reads_of_windows_is_named():
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "factor": 2.0},
    }
    gemma = {k: v for k, v in FAMILIES["gemma3_text"].items() if k != "rope_local_base_freq"}
    with pytest.raises(MespError, match="factor of rope_parameters"):
        Architecture.from_config(gemma | {"rope_parameters": rope})


def test_mlx_lm_is_told_what_is_equal_or_refused():
    """mlx-lm has no attention_factor for YaRN, always truncates, and uses only the long factors."""
    from mlx_lm.models.rope_utils import initialize_rope

    def told(scaling: dict, length: int = 1) -> dict:
        return for_mlx_lm(complete(LLAMA | {"rope_scaling": scaling}), length)["rope_scaling"]

    rope = initialize_rope(SIZE, THETA, False, told(YARN | {"attention_factor": 0.7}), LONGEST)
    assert rope.mscale == pytest.approx(0.7, rel=1e-12)
    for length, factors in ((4096, FAST), (4097, SLOW)):
        rope = initialize_rope(SIZE, THETA, False, told(SHORT, length), LONGEST)
        assert np.array(rope._freqs) == pytest.approx(factors / BASE, rel=1e-5)
        assert rope._scale == pytest.approx(turns(SHORT, length)[1], rel=1e-12)
    for refused in (
        YARN | {"truncate": False},
        YARN | {"factor": 1.0, "attention_factor": 0.7},
        SHORT | {"attention_factor": 1.5},
    ):
        with pytest.raises(MespError, match=r"mlx-lm ignores RoPE's (truncate|attention_factor)"):
            told(refused)
