"""The geometry of a model: read from Hugging Face's config.json, or built in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mesp.errors import MespError

# The projections LoRA trains, in the order of every flat array of LoRA parameters.
PROJECTIONS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
BIASED = PROJECTIONS[:3]
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")

SUPPORTED = ("qwen2",)


@dataclass(frozen=True)
class Architecture:
    """Sizes of a Qwen2 model; the fields are the manifest's ``architecture``."""

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Architecture:
        """The geometry in a Hugging Face ``config.json``.

        Raises MespError where the architecture, or a variant of it, is not supported.
        """
        model_type = config.get("model_type")
        if model_type not in SUPPORTED:
            raise MespError(
                f"The architecture {model_type!r} is not supported; "
                f"supported is {', '.join(SUPPORTED)} (Qwen2 and Qwen2.5)."
            )
        rope = config.get("rope_parameters") or {}  # where transformers 5 keeps rope_theta
        scaling = config.get("rope_scaling") or rope
        variants = {
            "rope_scaling": scaling.get("rope_type", scaling.get("type", "default")) != "default",
            "use_sliding_window": bool(config.get("use_sliding_window")),
            "hidden_act": config.get("hidden_act", "silu") != "silu",
        }
        for key, unsupported in variants.items():
            if unsupported:
                raise MespError(
                    f"The model's config.json sets {key} to {config.get(key, rope)!r}, "
                    "which is not supported; take a model without it."
                )
        try:
            hidden, heads = config["hidden_size"], config["num_attention_heads"]
            return cls(
                model_type=model_type,
                hidden_size=hidden,
                num_hidden_layers=config["num_hidden_layers"],
                intermediate_size=config["intermediate_size"],
                num_attention_heads=heads,
                num_key_value_heads=config.get("num_key_value_heads", heads),
                head_dim=config.get("head_dim") or hidden // heads,
                vocab_size=config["vocab_size"],
                rms_norm_eps=config.get("rms_norm_eps", 1e-6),
                rope_theta=float(config.get("rope_theta", rope.get("rope_theta", 1e6))),
                tie_word_embeddings=config.get("tie_word_embeddings", True),
            )
        except KeyError as error:
            raise MespError(f"The model's config.json lacks {error.args[0]!r}.") from error

    def projections(self) -> dict[str, tuple[int, int]]:
        """Each projection's (output size, input size), in the order of `PROJECTIONS`."""
        hidden, ff = self.hidden_size, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        sizes = ((queries, hidden), (keys, hidden), (keys, hidden), (hidden, queries),
                 (ff, hidden), (ff, hidden), (hidden, ff))  # fmt: skip
        return dict(zip(PROJECTIONS, sizes, strict=True))

    def lora_size(self, rank: int) -> int:
        """How many LoRA parameters of this rank one block has."""
        return rank * sum(out + inp for out, inp in self.projections().values())
