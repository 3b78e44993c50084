from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from mesp.errors import MespError
from mesp.models.config_json import check_numbers, complete, unsupported
from mesp.models.families import ACTIVATIONS, EXPERTS, FAMILIES, VARIANTS, short
from mesp.models.mixers import (
    WIDTH,
    AttentionMixer,
    Mixer,
    Modules,
    is_positive,
    is_size,
    mixer_from_manifest,
    modules_from_manifest,
    projections_of,
    refuse_unsound,
)
from mesp.models.mlps import MLP, PerLayerEmbedding, mlp_from_manifest, per_layer_from_manifest
from mesp.models.parts_by_layer import mixers_by_layer, mlps_by_layer

PER_LAYER_EMBEDDING = "model.embed_tokens_per_layer"
PER_LAYER_PROJECTION = "model.per_layer_model_projection"


class Rows(NamedTuple):
    """One projection of a block: `rows` of a module's weight W [out, in]."""

    module: str
    rows: slice
    shape: tuple[int, int]


@dataclass(frozen=True)
class Architecture:
    """A model's architecture, with the fields of the manifest's ``architecture``.

    docs/formats.md explains each field.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    hidden_act: str
    post_norms: bool
    final_logit_softcapping: float | None
    embedding_scale: float
    logits_scaling: float
    mlx_prefix: str
    hf_prefix: str
    biases: tuple[str, ...]
    mixers: tuple[Mixer, ...]
    layers: tuple[int, ...]
    mlps: tuple[MLP, ...]
    mlp_layers: tuple[int, ...]
    hf_modules: Modules = ()
    per_layer: PerLayerEmbedding | None = None

    @classmethod
    def from_config(cls, config: dict[str, Any], length: int = 1) -> Architecture:
        """Returns the architecture of a Hugging Face ``config.json``.

        The result is for sequences of `length` tokens, because LongRoPE's frequencies depend on the
        length. Raises MespError if the architecture, or a variant of it, is not supported, or if a
        key is missing or invalid.
        """
        try:
            return cls._from_complete(complete(config) | {"sequence_length": length})
        except KeyError as error:
            raise MespError(f"The model's config.json lacks {error.args[0]!r}.") from error
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise MespError(
                f"The model's config.json is not valid ({error}); take an unchanged config.json."
            ) from error

    @classmethod
    def _from_complete(cls, config: dict[str, Any]) -> Architecture:
        family = FAMILIES[config["model_type"]]
        for key, neutral in sorted(VARIANTS.items()):
            value = config.get(key, neutral)
            if value is None:
                value = False if neutral is True else neutral  # transformers takes null for false
            if key not in family.takes and value != neutral:
                raise unsupported(key, config[key])
        for key in ("hidden_activation", "hidden_act"):
            act = config.get(key, family.activation)
            known = ACTIVATIONS.get(act) if isinstance(act, str) else None
            if known != ACTIVATIONS[family.activation]:
                raise unsupported(key, config[key])
        check_numbers(config)
        by_layer = mixers_by_layer(config)
        # Some models scale a block's outputs by a residual multiplier c: x + c·out(…). This code
        # divides x by c instead, and replaces the norms' ε by ε/c². The scale of a norm's input
        # changes nothing else, so the model's outputs stay the same.
        residual = config.get("residual_multiplier") or 1.0
        embedding_scale = family.embedding_scale(config["hidden_size"])
        embedding_scale *= config.get("embedding_multiplier") or 1.0
        mixers, layers = _kinds(by_layer)
        mlps, mlp_layers = _kinds(mlps_by_layer(config, by_layer))
        biased = set(family.biases)
        if config.get("attention_bias"):
            biased |= {name for name, _ in family.attention}
        if config.get("mlp_bias"):
            biased |= {name for name, _ in family.mlp}
        modules = {name for each in (*mixers, *mlps) for name, _ in each.modules}
        return cls(
            model_type=config["model_type"],
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            rms_norm_eps=config["rms_norm_eps"] / residual**2,
            tie_word_embeddings=config["tie_word_embeddings"],
            hidden_act=ACTIVATIONS[family.activation],
            post_norms=family.post_norms,
            final_logit_softcapping=config.get("final_logit_softcapping"),
            embedding_scale=embedding_scale / residual,
            logits_scaling=config.get("logits_scaling") or 1.0,
            mlx_prefix=family.mlx_prefix,
            hf_prefix=family.hf_prefix,
            biases=tuple(name for name, _ in family.attention + family.mlp if name in biased),
            mixers=mixers,
            layers=layers,
            mlps=mlps,
            mlp_layers=mlp_layers,
            hf_modules=tuple(each for each in family.hf_modules if modules.issuperset(each[1]))
            + tuple(each for mlp in mlps if mlp.experts for each in mlp.experts.hf_modules()),
            per_layer=PerLayerEmbedding(family.per_layer, config["hidden_size_per_layer_input"])
            if family.per_layer
            else None,
        )._checked()

    @classmethod
    def from_manifest(cls, entry: dict[str, Any]) -> Architecture:
        """Raises ValueError, TypeError or KeyError if the entry is damaged."""
        return cls(
            **{
                **entry,
                "hf_modules": modules_from_manifest(entry.get("hf_modules", [])),
                "biases": tuple(entry["biases"]),
                "mixers": tuple(map(mixer_from_manifest, entry["mixers"])),
                "layers": tuple(entry["layers"]),
                "mlps": tuple(map(mlp_from_manifest, entry["mlps"])),
                "mlp_layers": tuple(entry["mlp_layers"]),
                "per_layer": per_layer_from_manifest(entry.get("per_layer")),
            }
        )._checked()

    def to_manifest(self) -> dict[str, Any]:
        mixers = [{"type": mixer.type, **asdict(mixer)} for mixer in self.mixers]
        mlps = [mlp.to_manifest() for mlp in self.mlps]
        return {**asdict(self), "mixers": mixers, "mlps": mlps}

    def _checked(self) -> Architecture:
        for each in (*self.mixers, *self.mlps, *([self.per_layer] if self.per_layer else [])):
            each.check()
        refuse_unsound(
            {
                "layers": self.layers and _index(self.layers, self.mixers),
                "mlp_layers": len(self.mlp_layers) == len(self.layers)
                and _index(self.mlp_layers, self.mlps),
            }
        )
        cap, joined = self.final_logit_softcapping, list(projections_of(self.hf_modules))
        stacked = [name for block in self.kinds for name in block.stacked()]
        numbers = [self.rms_norm_eps, self.embedding_scale, self.logits_scaling]
        numbers += [] if cap is None else [cap]
        refuse_unsound(
            {
                "model_type": self.model_type in FAMILIES,
                "sizes": all(
                    is_size(width) and width <= WIDTH
                    for width in (self.hidden_size, self.vocab_size)
                ),
                "numbers": all(map(is_positive, numbers)),
                "flags": type(self.tie_word_embeddings) is type(self.post_norms) is bool,
                "per_layer": self.per_layer is None or self.post_norms,
                "prefixes": type(self.mlx_prefix) is type(self.hf_prefix) is str,
                "hidden_act": self.hidden_act in ("silu", "gelu"),
                "biases": set(self.modules) >= set(self.biases),
                "hf_modules": {*self.modules, *stacked} >= set(joined)
                and len(set(joined)) == len(joined),
            }
        )
        for layer, block in enumerate(self.blocks):
            refuse_unsound({"keys_of": self._has_keys_for(layer, block.mixer)})
        return self

    def _has_keys_for(self, layer: int, mixer: Mixer) -> bool:
        """Returns whether the block computes its keys and values, or can use another block's: an
        earlier one's, of the same sizes, without gates.
        """
        if not isinstance(mixer, AttentionMixer) or mixer.keys_of is None:
            return True
        owner = mixer.keys_of
        if not 0 <= owner < layer or mixer.gate_dim:
            return False
        its = self.mixers[self.layers[owner]]
        return (
            isinstance(its, AttentionMixer)
            and its.keys_of is None
            and (its.num_key_value_heads, its.head_dim)
            == (mixer.num_key_value_heads, mixer.head_dim)
        )

    @property
    def mlx_root(self) -> str:
        """The prefix of `model.layers` in mlx-lm's model."""
        return self.mlx_prefix[: -len("model")] if self.mlx_prefix.endswith(".model") else ""

    @property
    def has_experts(self) -> bool:
        return any(mlp.experts for mlp in self.mlps)

    @property
    def owners(self) -> set[int]:
        """The indices of the blocks whose keys and values other blocks use too."""
        found = (block.keys_of for block in self.kinds)
        return {owner for owner in found if owner is not None}

    @property
    def kinds(self) -> tuple[Block, ...]:
        return tuple(dict.fromkeys(self.blocks))

    @property
    def blocks(self) -> tuple[Block, ...]:
        kinds = zip(self.layers, self.mlp_layers, strict=True)
        return tuple(Block(self, self.mixers[mixer], self.mlps[mlp]) for mixer, mlp in kinds)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)

    @property
    def modules(self) -> list[str]:
        return list(dict.fromkeys(name for block in self.kinds for name in block.modules))

    @property
    def largest_rank(self) -> int:
        """The largest useful LoRA rank: the largest min(out, in) of a matrix."""
        sizes = (block.sizes() | block.stacked() for block in self.kinds)
        return max(min(size) for its in sizes for size in its.values())

    @property
    def trainable(self) -> list[str]:
        """The short names of the trainable modules, such as `q` and `gate_up`, and `EXPERTS` if
        there are experts.
        """
        return list(dict.fromkeys(map(short, self.modules))) + [EXPERTS] * self.has_experts

    def training_experts(self) -> Architecture:
        mlps = (
            replace(mlp, experts=replace(mlp.experts, trained=True)) if mlp.experts else mlp
            for mlp in self.mlps
        )
        return replace(self, mlps=tuple(mlps))

    @property
    def norm_offset(self) -> int:
        """The number to add to a norm's weight in checkpoints: 1 for Gemma 2, Gemma 3 and Qwen3.5,
        else 0.
        """
        return FAMILIES[self.model_type].norm_offset

    @property
    def is_tied_in_mlx_lm(self) -> bool:
        return self.tie_word_embeddings and FAMILIES[self.model_type].mlx_ties

    def first(self, count: int) -> Architecture:
        kept = self.blocks[:count]
        mixers, layers = _kinds([block.mixer for block in kept])
        mlps, mlp_layers = _kinds([block.mlp for block in kept])
        return replace(self, mixers=mixers, layers=layers, mlps=mlps, mlp_layers=mlp_layers)

    @property
    def mlp_norm(self) -> str:
        """The name of the norm before the MLP. In a model with post norms,
        `post_attention_layernorm` is the norm after the mixer.
        """
        return "pre_feedforward_layernorm" if self.post_norms else "post_attention_layernorm"

    @property
    def num_parameters(self) -> int:
        return sum(map(math.prod, self.tensors().values()))

    @property
    def per_layer_shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of the matrices of per-layer embeddings, by name."""
        if self.per_layer is None:
            return {}
        width = self.num_hidden_layers * self.per_layer.size
        return {
            PER_LAYER_EMBEDDING: (self.vocab_size, width),
            PER_LAYER_PROJECTION: (width, self.hidden_size),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes without quantization, by name. Stacked matrices are
        [experts, out, in].
        """
        tables = ["model.embed_tokens", *(["lm_head"] * (not self.tie_word_embeddings))]
        shapes = {f"{name}.weight": (self.vocab_size, self.hidden_size) for name in tables}
        shapes["model.norm.weight"] = (self.hidden_size,)
        if self.per_layer:
            shapes |= {f"{name}.weight": shape for name, shape in self.per_layer_shapes.items()}
            shapes["model.per_layer_projection_norm.weight"] = (self.per_layer.size,)
        for index, block in enumerate(self.blocks):
            its = block.tensors().items()
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in its}
        return shapes

    @property
    def columns(self) -> dict[str, int]:
        """The number of columns of each matrix, by name. Stacked matrices have one entry."""
        columns = {"model.embed_tokens": self.hidden_size}
        columns |= {} if self.tie_word_embeddings else {"lm_head": self.hidden_size}
        columns |= {name: size for name, (_, size) in self.per_layer_shapes.items()}
        for index, block in enumerate(self.blocks):
            its = block.matrices().items()
            columns |= {f"model.layers.{index}.{name}": size for name, (_, size) in its}
        return columns


@dataclass(frozen=True)
class Block:
    arch: Architecture
    mixer: Mixer
    mlp: MLP

    @property
    def modules(self) -> dict[str, tuple[str, ...]]:
        """The linear layers that can have adapters, each with the projections in its rows, in
        order."""
        per_layer = self.arch.per_layer
        return dict(
            self.mixer.modules + self.mlp.modules + (per_layer.modules if per_layer else ())
        )

    @property
    def keys_of(self) -> int | None:
        """The index of the block whose keys and values this block uses, or None."""
        return self.mixer.keys_of if isinstance(self.mixer, AttentionMixer) else None

    def given_shapes(self, length: int) -> list[tuple[int, ...]]:
        """Returns the shapes of a block's inputs other than the previous block's output.

        These inputs are the per-layer embeddings, and the keys and values of another block.
        """
        shapes: list[tuple[int, ...]] = []
        if self.arch.per_layer:
            shapes.append((1, length, self.arch.per_layer.size))
        if isinstance(self.mixer, AttentionMixer) and self.keys_of is not None:
            shapes += [(1, self.mixer.num_key_value_heads, length, self.mixer.head_dim)] * 2
        return shapes

    def projections(self) -> dict[str, Rows]:
        hidden = self.arch.hidden_size
        shapes = self.mixer.shapes(hidden) | self.mlp.shapes(hidden)
        shapes |= self.arch.per_layer.shapes(hidden) if self.arch.per_layer else {}
        found = {}
        for module, computes in self.modules.items():
            start = 0
            for name in computes:
                stop = start + shapes[name][0]
                found[name] = Rows(module, slice(start, stop), shapes[name])
                start = stop
        return found

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Returns the (output size, input size) of each module, in the order of the flat LoRA
        vector."""
        sizes = dict.fromkeys(self.modules, (0, 0))
        for module, rows, (_, inp) in self.projections().values():
            sizes[module] = (max(sizes[module][0], rows.stop), inp)
        return sizes

    def biases(self) -> dict[str, int]:
        return {name: out for name, (out, _) in self.sizes().items() if name in self.arch.biases}

    def norms(self) -> dict[str, int]:
        """Returns the sizes of the norms' weights, by name. `vectors` has the norms within
        recurrent mixers.
        """
        names = ["input_layernorm", "post_attention_layernorm"]
        if self.arch.post_norms:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        if self.arch.per_layer:
            names += ["post_per_layer_input_norm"]
        return {f"{name}.weight": self.arch.hidden_size for name in names} | self.mixer.norms()

    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the weights that are neither in linear layers nor in `norms`,
        by name."""
        found = self.mixer.vectors(self.arch.hidden_size)
        found |= self.mlp.experts.vectors() if self.mlp.experts else {}
        return found | ({"layer_scalar": (1,)} if self.arch.per_layer else {})

    @property
    def num_experts(self) -> int:
        return self.mlp.experts.num_experts if self.mlp.experts else 0

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Returns the (output size, input size) of all linear layers and of one expert's matrices,
        by name."""
        return self.sizes() | self.frozen() | self.stacked()

    def frozen(self) -> dict[str, tuple[int, int]]:
        """Returns the (output size, input size) of the linear layers that cannot have adapters: the
        router and the gate of the MLP beside the experts.
        """
        return self.mlp.experts.linears(self.arch.hidden_size) if self.mlp.experts else {}

    def stacked(self) -> dict[str, tuple[int, int]]:
        """Returns the (output size, input size) of one expert's matrices, by name."""
        return self.mlp.experts.stacked(self.arch.hidden_size) if self.mlp.experts else {}

    def adapted(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the weights that can have adapters, in the order of the flat LoRA
        vector: of modules [out, in], and of trainable experts [experts, out, in].
        """
        trained = self.mlp.experts is not None and self.mlp.experts.trained
        return self.sizes() | (self._stacks() if trained else {})

    def _stacks(self) -> dict[str, tuple[int, ...]]:
        return {name: (self.num_experts, *size) for name, size in self.stacked().items()}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """As `Architecture.tensors`, with names within the block."""
        matrices = self.sizes() | self.frozen() | self._stacks()
        return {
            **{f"{name}.weight": shape for name, shape in matrices.items()},
            **{f"{name}.bias": (size,) for name, size in self.biases().items()},
            **{name: (size,) for name, size in self.norms().items()},
            **self.vectors(),
        }

    def lora_size(self, rank: int) -> int:
        shapes = self.adapted().values()
        return rank * sum(math.prod(stack) * (out + inp) for *stack, out, inp in shapes)

    def within(self, length: int) -> Block:
        return replace(self, mixer=self.mixer.within(length))


def _kinds(by_layer: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Returns the different parts among those of the layers, and each layer's index in them."""
    kinds = tuple(dict.fromkeys(by_layer))
    return kinds, tuple(map(kinds.index, by_layer))


def _index(layers: tuple[Any, ...], kinds: tuple[Any, ...]) -> bool:
    return all(type(i) is int and 0 <= i < len(kinds) for i in layers)
