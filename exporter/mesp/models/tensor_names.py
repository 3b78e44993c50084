from __future__ import annotations

import re

from mesp.models.architecture import Architecture
from mesp.models.families import FAMILIES

# Prefixes of the text model's tensors in a multimodal checkpoint -> MeSP's prefixes. The last
# prefix is from mlx-lm, the others are from transformers.
TEXT = {"model.language_model.": "model.", "model.text_model.": "model.", "language_model.": ""}
UNUSED = (
    "mtp.", "language_model.mtp.", "visual.", "model.visual.",
    "vision_tower.", "model.vision_tower.", "multi_modal_projector.",
    "model.multi_modal_projector.", "audio_tower.", "model.audio_tower.", "embed_vision.",
    "model.embed_vision.", "embed_audio.", "model.embed_audio.", "vision_embedder.",
    "model.vision_embedder.", "vision_model.", "model.vision_model.", "connector.",
    "model.connector.",
)  # fmt: skip
LIMITS = (".input_min", ".input_max", ".output_min", ".output_max")
# Suffixes of tensors that change nothing: buffers for RoPE, masks, and the scales of an 8-bit KV
# cache.
BUFFERS = (
    "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", ".masked_bias",
    "self_attn.k_scale", "self_attn.v_scale", "self_attn.kv_scale",
)  # fmt: skip
HEADLESS = ("layers.", "embed_tokens.", "norm.", "embedding_norm.")
_EXPERT = re.compile(r"(model\.layers\.\d+)\.\w+\.experts\.(\d+)\.(\w+)\.(.*)")
_KEYS = re.compile(r"model\.layers\.(\d{1,4})\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)")
_MATRICES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_STACKED = re.compile(r"(.*\.switch_mlp)\.(\d+)\.(.*)")
# Matrices that are [channels, kernel] in MeSP, and [channels, 1, kernel] in checkpoints.
CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")


def name_here(name: str, model_type: str) -> str | None:
    family = FAMILIES[model_type]
    if name.startswith(UNUSED) or name.endswith(LIMITS):
        return None
    if family.texts:
        for prefix, ours in TEXT.items():
            if name.startswith(prefix):
                name = ours + name.removeprefix(prefix)
                break
    if name.startswith(HEADLESS):
        name = f"model.{name}"
    for ours, theirs in family.names.items():
        name = _renamed(name, theirs, ours)
    return name


def changes_nothing(name: str, arch: Architecture) -> bool:
    if name.endswith(BUFFERS):
        return True
    if found := _KEYS.fullmatch(name_here(name, arch.model_type) or ""):
        layer = int(found[1])
        return layer < len(arch.blocks) and arch.blocks[layer].keys_of is not None
    return False


def names_here(name: str, arch: Architecture) -> list[str]:
    ours, family = name_here(name, arch.model_type), FAMILIES[arch.model_type]
    if ours is None:
        return []
    experts = family.experts
    if experts and (found := _EXPERT.fullmatch(ours)):
        layer, number, matrix, suffix = found.groups()
        matrix = _MATRICES.get(matrix, matrix)
        return [f"{layer}.{experts.matrices}.{number}.{matrix}.{suffix}"]
    for theirs, parts in arch.hf_modules + family.hf_experts:
        if ours.endswith(f".{theirs}"):
            ours = f"{ours}.weight"
        layer, is_there, suffix = ours.partition(f".{theirs}.")
        if is_there:
            return [f"{layer}.{part}.{suffix}" for part in parts]
    return [ours]


def name_of_expert(name: str, number: int) -> str:
    matrices, _, matrix = name.rpartition(".")
    return f"{matrices}.{number}.{matrix}"


def name_of_stacked(name: str) -> tuple[str, int | None]:
    found = _STACKED.fullmatch(name)
    return (f"{found[1]}.{found[3]}", int(found[2])) if found else (name, None)


def name_there(name: str, model_type: str) -> str:
    for ours, theirs in FAMILIES[model_type].names.items():
        name = _renamed(name, ours, theirs)
    return name


def _renamed(name: str, old: str, new: str) -> str:
    return f".{name}.".replace(f".{old}.", f".{new}.").strip(".")
