"""Writes the keys that transformers' configuration classes read, with their defaults.

`exporter/mesp/models/classes.json` has an entry for each class of a supported model. A key without
a default has null. "=KEY" marks another name of KEY, which comes first if both are given.
"""

import ast
import inspect
import json
import re
import textwrap
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mesp.models.families import FAMILIES

FILE = Path(__file__).resolve().parents[1] / "exporter" / "mesp" / "models" / "classes.json"
NO_ARCHITECTURE = re.compile(
    r".*(_token_id|_token_index|dropout|pdrop|_coef|logits)|initializer_range|use_cache|vision_.*|"
    r"pretraining_tp|audio_config|mm_tokens.*|multimodal_.*|projector.*|spatial_.*|text_config|"
    r"scale_factor|downsample_factor"
)
# Keys that transformers reads for every class with RoPE, from the attributes of a configuration.
OF_ALL = ("original_max_position_embeddings", "per_layer_config", "rope_parameters", "rope_scaling")


def defaults_of(name: str) -> dict[str, Any]:
    its: Any = CONFIG_MAPPING[name]
    base = {each.name for each in fields(PreTrainedConfig)}
    found = {
        each.name: None if each.default is MISSING else each.default
        for each in fields(its)
        if each.name not in base and not NO_ARCHITECTURE.fullmatch(each.name)
    }
    if FAMILIES.get(name) and FAMILIES[name].texts and name not in FAMILIES[name].texts:
        return found
    for key, default in _popped(its).items():
        found.setdefault(key, default)
    for names in its.attribute_map.items():
        field, other = names if names[0] in found else reversed(names)
        found[other] = f"={field}"
    module = inspect.getsourcefile(its) or ""
    code = Path(module.replace("/configuration_", "/modeling_")).read_text()
    for key in re.findall(r'getattr\((?:self\.)?config, "(head_dim|layer_types|num_\w+)"', code):
        found.setdefault(key, None)
    found |= {key: found.get(key) for key in OF_ALL}
    given = {"rope_type": "default"}
    rope = its().rope_parameters
    if its(rope_theta=3.0).rope_parameters == rope:  # the class has a RoPE of its own
        found["rope_parameters"] = rope
        kinds = {kind: dict(given) for kind in ("full_attention", "sliding_attention")}
        given = kinds if "full_attention" in rope else given
    read = its(rope_parameters=json.loads(json.dumps(given))).rope_parameters
    theta = read.get("full_attention", read).get("rope_theta")
    found.pop("rope_theta", None)
    return found | ({} if theta is None else {"rope_theta": theta})


def _popped(its: Any) -> dict[str, Any]:
    found, names = {}, {each.name for each in fields(its)}
    for method in (its.__post_init__, its.convert_rope_params_to_dict):
        if method is PreTrainedConfig.__post_init__:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        for call in ast.walk(tree):
            match call:
                case ast.Call(
                    func=ast.Attribute(
                        value=ast.Name(id="kwargs"), attr="pop" | "get" | "setdefault"
                    ),
                    args=[ast.Constant(value=str(key)), *rest],
                ):
                    match rest:
                        case [ast.Attribute(value=ast.Name(id="self"), attr=attr)] if attr in names:
                            found.setdefault(key, f"={attr}")
                        case _:
                            code = ast.Expression(rest[0]) if rest else "None"
                            known = {"self": its, "default_theta": its.default_theta}
                            known["getattr"] = lambda its, key, default: default
                            code = code if isinstance(code, str) else compile(code, "", "eval")
                            found.setdefault(key, eval(code, known))
    return found


def make_table() -> dict[str, dict[str, Any]]:
    names = [name for family, its in FAMILIES.items() for name in (family, *its.texts)]
    return {name: defaults_of(name) for name in sorted({*names}) if name in CONFIG_MAPPING}


def write_table(table: dict[str, dict[str, Any]]) -> str:
    lines = [f'  "{name}": {json.dumps(keys, sort_keys=True)}' for name, keys in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(write_table(make_table()))
