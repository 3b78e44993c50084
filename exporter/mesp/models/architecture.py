"""One description of a model's blocks, for every family."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from mesp.errors import MespError
from mesp.models.attention_kinds import Attention, attention_by_layer
from mesp.models.config_json import complete, unsupported
from mesp.models.families import FAMILIES, FUSED, SEPARATE, VARIANTS, short


class Rows(NamedTuple):
    """Where one of the seven projections lies: these rows of the W of a module, [out, in]."""

    module: str
    rows: slice
    shape: tuple[int, int]


@dataclass(frozen=True)
class Architecture:
    """A model's blocks; the fields are the manifest's ``architecture``.

    docs/architecture.md says what each means.
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    modules: dict[str, tuple[str, ...]]
    biases: tuple[str, ...]
    qk_norm: bool
    post_norms: bool
    hidden_act: str
    attention_scale: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    embedding_scale: float
    attention: tuple[Attention, ...]
    layers: tuple[int, ...]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Architecture:
        """The description of the model of a Hugging Face ``config.json``.

        Raises MespError where the architecture, or a variant of it, is not supported.
        """
        try:
            return cls._from_complete(complete(config))
        except KeyError as error:
            raise MespError(f"The model's config.json lacks {error.args[0]!r}.") from error
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise MespError(f"The model's config.json is not in order ({error}).") from error

    @classmethod
    def _from_complete(cls, config: dict[str, Any]) -> Architecture:
        family = FAMILIES[config["model_type"]]
        for key, neutral in VARIANTS.items():
            if key not in family.takes and config.get(key) not in (None, neutral):
                raise unsupported(key, config[key])
        activation = config.get("hidden_activation") or config.get("hidden_act")
        if activation not in (None, family.activation):
            raise unsupported("hidden_act", activation)
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        kinds = attention_by_layer(config, head_dim)
        attention = tuple(dict.fromkeys(kinds))
        return cls(
            model_type=config["model_type"],
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            vocab_size=config["vocab_size"],
            rms_norm_eps=config["rms_norm_eps"],
            tie_word_embeddings=config["tie_word_embeddings"],
            modules=family.modules,
            biases=tuple(
                name
                for name in family.modules
                if name in family.biases
                or config.get("mlp_bias" if name.startswith("mlp") else "attention_bias")
            ),
            qk_norm=family.qk_norm,
            post_norms=family.post_norms,
            hidden_act="gelu" if family.activation.startswith("gelu") else "silu",
            attention_scale=(config.get("query_pre_attn_scalar") or head_dim) ** -0.5,
            attn_logit_softcapping=config.get("attn_logit_softcapping"),
            final_logit_softcapping=config.get("final_logit_softcapping"),
            embedding_scale=family.embedding_scale(hidden),
            attention=attention,
            layers=tuple(attention.index(kind) for kind in kinds),
        )._checked()

    @classmethod
    def from_manifest(cls, entry: dict[str, Any]) -> Architecture:
        """The inverse of `to_manifest`. Raises ValueError, TypeError or KeyError where damaged."""
        attention = [Attention(**kind) for kind in entry["attention"]]
        return cls(
            **{
                **entry,
                "modules": {name: tuple(computes) for name, computes in entry["modules"]},
                "biases": tuple(entry["biases"]),
                "attention": tuple(replace(a, frequencies=tuple(a.frequencies)) for a in attention),
                "layers": tuple(entry["layers"]),
            }
        )._checked()

    def to_manifest(self) -> dict[str, Any]:
        modules = [[name, list(computes)] for name, computes in self.modules.items()]
        return {**asdict(self), "modules": modules}

    def _checked(self) -> Architecture:
        """Itself. Raises ValueError where a field can't be what it says."""
        sizes = [self.hidden_size, self.intermediate_size, self.num_attention_heads]
        sizes += [self.num_key_value_heads, self.head_dim, self.vocab_size]
        sizes += [a.sliding_window for a in self.attention if a.sliding_window is not None]
        numbers = [self.rms_norm_eps, self.attention_scale, self.embedding_scale]
        caps = (self.attn_logit_softcapping, self.final_logit_softcapping)
        numbers += [cap for cap in caps if cap is not None]
        numbers += [n for a in self.attention for n in (a.rope_scale, *a.frequencies)]
        flags = (self.tie_word_embeddings, self.qk_norm, self.post_norms)
        checks = {
            "model_type": self.model_type in FAMILIES,
            "sizes": all(type(n) is int and 0 < n < 1 << 31 for n in sizes),
            "numbers": all(type(n) in (int, float) and 0 < n < math.inf for n in numbers),
            "flags": all(type(flag) is bool for flag in flags),
            "hidden_act": self.hidden_act in ("silu", "gelu"),
            "num_key_value_heads": self.num_attention_heads % self.num_key_value_heads == 0,
            "modules": self.modules in (SEPARATE, FUSED),
            "biases": self.modules.keys() >= set(self.biases),
            "frequencies": all(2 * len(a.frequencies) <= self.head_dim for a in self.attention),
            "layers": self.layers
            and all(type(i) is int and 0 <= i < len(self.attention) for i in self.layers),
        }
        for what, is_sound in checks.items():
            if not is_sound:
                raise ValueError(f"its {what} cannot be used")
        return self

    @property
    def trainable(self) -> list[str]:
        """The modules' short names, as in `q` and `gate_up`, in their order."""
        return [short(module) for module in self.modules]

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def norm_offset(self) -> int:
        """What a norm's weight in the model's checkpoints and in mlx-lm lacks: 1 for Gemma."""
        return FAMILIES[self.model_type].norm_offset

    def kind(self, layer: int) -> Attention:
        return self.attention[self.layers[layer]]

    def first(self, count: int) -> Architecture:
        """The same without the blocks after the first `count`."""
        kinds = [self.kind(layer) for layer in range(count)]
        attention = tuple(dict.fromkeys(kinds))
        layers = tuple(attention.index(kind) for kind in kinds)
        return replace(self, attention=attention, layers=layers)

    def projections(self) -> dict[str, Rows]:
        """Where each of the seven projections (`q`, …, `down`) lies."""
        hidden, ff = self.hidden_size, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        shapes = dict(
            q=(queries, hidden), k=(keys, hidden), v=(keys, hidden), o=(hidden, queries),
            gate=(ff, hidden), up=(ff, hidden), down=(hidden, ff),
        )  # fmt: skip
        found = {}
        for module, computes in self.modules.items():
            start = 0
            for name in computes:
                stop = start + shapes[name][0]
                found[name] = Rows(module, slice(start, stop), shapes[name])
                start = stop
        return found

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Each module's (output size, input size), in the order of every flat LoRA vector."""
        sizes = dict.fromkeys(self.modules, (0, 0))
        for module, rows, (_, inp) in self.projections().values():
            sizes[module] = (max(sizes[module][0], rows.stop), inp)
        return sizes

    def norms(self) -> dict[str, int]:
        """The lengths of a block's norms by the names of their weights."""
        names = ["input_layernorm", "post_attention_layernorm"]
        if self.post_norms:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        sizes = {f"{name}.weight": self.hidden_size for name in names}
        if self.qk_norm:
            sizes |= {f"self_attn.{name}_norm.weight": self.head_dim for name in "qk"}
        return sizes

    @property
    def mlp_norm(self) -> str:
        """The norm before the MLP; where there are post norms, Llama's name for it is theirs."""
        return "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"

    @property
    def num_parameters(self) -> int:
        """The numbers in the model, with those of a tied head counted once."""
        sizes = self.sizes()
        block = sum(out * inp for out, inp in sizes.values()) + sum(self.norms().values())
        block += sum(sizes[name][0] for name in self.biases)
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * block + (tables * self.vocab_size + 1) * self.hidden_size

    def lora_size(self, rank: int) -> int:
        """How many LoRA parameters of this rank one block has."""
        return rank * sum(out + inp for out, inp in self.sizes().values())
