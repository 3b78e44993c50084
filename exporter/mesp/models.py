"""One description of a model's blocks, for every family: read from Hugging Face's config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import mlx.core as mx

from mesp.errors import MespError

# The linear layers of a block, and the projections that each computes, in the order of their rows.
SEPARATE = {
    "self_attn.q_proj": ("q",),
    "self_attn.k_proj": ("k",),
    "self_attn.v_proj": ("v",),
    "self_attn.o_proj": ("o",),
    "mlp.gate_proj": ("gate",),
    "mlp.up_proj": ("up",),
    "mlp.down_proj": ("down",),
}
FUSED = {
    "self_attn.qkv_proj": ("q", "k", "v"),
    "self_attn.o_proj": ("o",),
    "mlp.gate_up_proj": ("gate", "up"),
    "mlp.down_proj": ("down",),
}


def short(module: str) -> str:
    """`q` of ``self_attn.q_proj``."""
    return module.split(".")[-1].removesuffix("_proj")


# The short names of all modules that some model has, in the order of the projections.
TRAINABLE = ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down")


@dataclass(frozen=True)
class Family:
    """What a ``model_type`` says by its name alone; the rest is in the config.json."""

    modules: dict[str, tuple[str, ...]] = field(default_factory=lambda: SEPARATE)
    biases: tuple[str, ...] = ()  # modules that have one, whatever the config.json says
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: int = 0  # a norm multiplies by this plus the weight in the checkpoint
    activation: str = "silu"
    full_every: float = 1  # each how many-th layer attends beyond the window; inf: none
    embedding_scale: Callable[[int], float] = lambda hidden: 1.0
    takes: tuple[str, ...] = ()  # of VARIANTS
    defaults: dict[str, Any] = field(default_factory=dict)  # of keys that may be missing


_LLAMA = Family(takes=("attention_bias", "mlp_bias"))
_GEMMA = Family(
    post_norms=True,
    norm_offset=1,
    activation="gelu_pytorch_tanh",
    full_every=2,
    embedding_scale=math.sqrt,
    defaults={
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
    },
)
FAMILIES = {
    "qwen2": Family(
        biases=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        defaults={"rope_theta": 1e6},
    ),
    "qwen3": Family(qk_norm=True, defaults={"head_dim": 128}),
    "llama": _LLAMA,
    "smollm3": replace(_LLAMA, defaults={"rope_theta": 2e6}),
    "mistral": replace(_LLAMA, full_every=math.inf, defaults={"sliding_window": 4096}),
    "gemma2": _GEMMA,
    "gemma3_text": replace(
        _GEMMA,
        qk_norm=True,
        full_every=6,
        embedding_scale=lambda hidden: mx.array(math.sqrt(hidden), mx.bfloat16).item(),
        defaults={
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
        },
    ),
    "phi3": Family(
        modules=FUSED,
        full_every=math.inf,
        takes=("partial_rotary_factor",),
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    ),
}
_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True}

# What some families have and others don't, with the value that is as if it weren't there.
VARIANTS = {
    "use_sliding_window": False,
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "rope_traditional": False,
    "use_bidirectional_attention": False,
}


@dataclass(frozen=True)
class Attention:
    """One kind of attention; most models have one, those with a sliding window two."""

    frequencies: tuple[float, ...]  # radians a position of each rotated pair; empty: no RoPE
    rope_scale: float = 1.0  # multiplies the rotated part of q and k
    sliding_window: int | None = None  # a query at t sees the keys t - window + 1 … t

    def within(self, length: int) -> Attention:
        """The same for sequences of `length` tokens: a window of that many or more is none."""
        unlimited = self.sliding_window is None or self.sliding_window >= length
        return replace(self, sliding_window=None) if unlimited else self


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
                raise _unsupported(key, config[key])
        activation = config.get("hidden_activation") or config.get("hidden_act")
        if activation not in (None, family.activation):
            raise _unsupported("hidden_act", activation)
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        kinds = _kinds(config, head_dim)
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


def complete(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json with what it leaves out, and RoPE by the keys that mlx-lm reads.

    (transformers 5 keeps RoPE in `rope_parameters`.) Raises MespError where the architecture is
    not supported.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        missing = ""
        if "text_config" in config:
            missing = " (it is of several modalities, and the trainer takes text alone)"
        elif any("expert" in key for key in config):
            missing = " (it mixes experts, and the trainer has one MLP a block)"
        raise MespError(
            f"The architecture {model_type!r} is not supported{missing}; "
            f"supported are {', '.join(FAMILIES)}."
        )
    config = {**_DEFAULTS, **FAMILIES[model_type].defaults, **config}
    rope = config.pop("rope_parameters", None) or {}
    if "full_attention" in rope:
        sliding, rope = rope.get("sliding_attention"), rope["full_attention"]
        if sliding:
            if sliding.get("rope_type", "default") != "default":
                raise _unsupported("rope_parameters", sliding)
            config["rope_local_base_freq"] = sliding["rope_theta"]
    config |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    scaling = config.get("rope_scaling") or rope
    kind = scaling.get("type") or scaling.get("rope_type", "default")
    if kind not in _SCALED:
        raise _unsupported("rope_scaling", scaling)
    named = {**scaling, "type": kind, "rope_type": kind}
    config["rope_scaling"] = None if kind == "default" else named
    return config


def _unsupported(key: str, value: object) -> MespError:
    return MespError(
        f"The model's config.json sets {key} to {value!r}, which is not supported; take a model "
        "without it."
    )


def _kinds(config: dict[str, Any], head_dim: int) -> list[Attention]:
    """The attention of each layer, as Hugging Face's implementation has it."""
    count = config["num_hidden_layers"]
    every = config.get("sliding_window_pattern") or FAMILIES[config["model_type"]].full_every
    types = config.get("layer_types") or [
        "sliding_attention" if (i + 1) % every else "full_attention" for i in range(count)
    ]
    interval = config.get("no_rope_layer_interval", 4)
    has_rope = [True] * count
    if config["model_type"] == "smollm3":
        has_rope = config.get("no_rope_layers") or [(i + 1) % interval for i in range(count)]
    for key, each in (("layer_types", types), ("no_rope_layers", has_rope)):
        if len(each) != count:
            raise MespError(
                f"The model's config.json is not in order: {key} has {len(each)} entries for "
                f"{count} blocks; take an unchanged config.json."
            )

    kinds = []
    for layer_type, rotates in zip(types, has_rope, strict=True):
        if layer_type not in ("full_attention", "sliding_attention"):
            raise _unsupported("layer_types", layer_type)
        slides = layer_type == "sliding_attention"
        frequencies, scale = (), 1.0
        if rotates:
            frequencies, scale = rope_frequencies(config, head_dim, local=slides)
        window = config.get("sliding_window") if slides else None
        kinds.append(Attention(frequencies, scale, window or None))
    return kinds


def rope_frequencies(
    config: dict[str, Any], head_dim: int, local: bool = False
) -> tuple[tuple[float, ...], float]:
    """The frequencies of the rotated pairs, in radians a position, and what scales the pairs.

    θ^(-2i/D) for i < D/2, D = head_dim · partial_rotary_factor, and scaled by `rope_scaling`; where
    sliding windows have a base of their own (`local`), that base without scaling.
    """
    theta, scaling = config["rope_theta"], config["rope_scaling"] or {"type": "default"}
    if local and "rope_local_base_freq" in config:
        theta, scaling = config["rope_local_base_freq"], {"type": "default"}
    rotated = int(head_dim * (config.get("partial_rotary_factor") or 1.0))
    base = [theta ** (-i / rotated) for i in range(0, rotated, 2)]
    frequencies, scale = _SCALED[scaling["type"]](base, scaling, {**config, "rope_theta": theta})
    return tuple(frequencies), scale


def _linear(base: list[float], scaling: dict, config: dict) -> tuple[list[float], float]:
    return [f / scaling["factor"] for f in base], 1.0


def _llama3(base: list[float], scaling: dict, config: dict) -> tuple[list[float], float]:
    """Slow pairs turn slower by `factor`, fast ones as ever, and between them in between."""
    low, high = scaling.get("low_freq_factor", 1.0), scaling.get("high_freq_factor", 4.0)
    length = scaling.get("original_max_position_embeddings", 8192)
    frequencies = []
    for f in base:
        turns = length * f / (2 * math.pi)
        kept = min(max((turns - low) / (high - low), 0.0), 1.0)
        frequencies.append(f * (kept + (1 - kept) / scaling["factor"]))
    return frequencies, 1.0


def _longrope(base: list[float], scaling: dict, config: dict) -> tuple[list[float], float]:
    """As mlx-lm: the long factors, whatever the length of the sequence."""
    length = scaling.get("original_max_position_embeddings")
    length = length or config.get("original_max_position_embeddings", 4096)
    longer = config["max_position_embeddings"] / length
    scale = math.sqrt(1 + math.log(longer) / math.log(length)) if longer > 1 else 1.0
    return [f / long for f, long in zip(base, scaling["long_factor"], strict=True)], scale


def _yarn(base: list[float], scaling: dict, config: dict) -> tuple[list[float], float]:
    """As mlx-lm: a ramp over the pairs, from those that turn as ever to those slowed down."""
    factor, size = scaling["factor"], 2 * len(base)
    length = scaling.get("original_max_position_embeddings", 4096)

    def pair(turns: float) -> float:  # which turns so often within the original length
        return (
            size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config["rope_theta"]))
        )

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    low = max(math.floor(pair(scaling.get("beta_fast", 32))), 0)
    high = min(math.ceil(pair(scaling.get("beta_slow", 1))), size - 1)
    ramp = [min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0) for i in range(len(base))]
    scale = magnitude(scaling.get("mscale", 1)) / magnitude(scaling.get("mscale_all_dim", 0))
    return [f * (1 - r + r / factor) for f, r in zip(base, ramp, strict=True)], scale


# Formulas of RoPE by their names in config.json.
_SCALED: dict[str, Callable[[list[float], dict, dict], tuple[list[float], float]]] = {
    "default": lambda base, scaling, config: (base, 1.0),
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,
    "yarn": _yarn,
}
