import pytest

from conftest import TINY
from mesp.errors import MespError
from mesp.models import PROJECTIONS, Architecture


def test_geometry_of_a_config():
    arch = Architecture.from_config(TINY)
    assert (arch.hidden_size, arch.head_dim, arch.num_hidden_layers) == (128, 32, 3)
    assert list(arch.projections()) == list(PROJECTIONS)
    assert arch.projections()["self_attn.k_proj"] == (64, 128)
    assert arch.projections()["mlp.down_proj"] == (128, 320)
    assert arch.lora_size(8) == 8 * (2 * 256 + 2 * 192 + 3 * 448)


def test_rope_theta_as_transformers_5_writes_it():
    config = {k: v for k, v in TINY.items() if k != "rope_theta"}
    config["rope_parameters"] = {"rope_theta": 5000.0, "rope_type": "default"}
    assert Architecture.from_config(config).rope_theta == 5000.0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama"}, "llama"),
        ({"model_type": None}, "None"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_is_not_supported_is_named(change, named):
    with pytest.raises(MespError, match=named):
        Architecture.from_config({**TINY, **change})


def test_missing_size_is_named():
    with pytest.raises(MespError, match="intermediate_size"):
        Architecture.from_config({k: v for k, v in TINY.items() if k != "intermediate_size"})
