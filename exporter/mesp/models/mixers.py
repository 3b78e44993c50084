from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, get_args

Modules = tuple[tuple[str, tuple[str, ...]], ...]
Shape = tuple[int, int]


class Part:
    """A part of a block, with linear layers."""

    modules: Modules

    def _require(self, *sizes: Any, **sound: bool) -> None:
        """Raises what `refuse_unsound` raises unless the sizes are sizes, all of `sound` holds, and
        the modules compute the projections that `shapes` has.
        """
        refuse_unsound({"sizes": all(map(is_size, sizes)), **sound})
        refuse_unsound({"modules": sorted(projections_of(self.modules)) == sorted(self.shapes(1))})


class _Mixer(Part):
    """What a mixer without sliding windows, norms of heads and other vectors has."""

    def within(self, length: int) -> Self:
        """Returns the mixer for sequences of `length` tokens."""
        return self

    def norms(self) -> dict[str, int]:
        return {}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the weights outside of linear layers and of `norms`."""
        return {}


@dataclass(frozen=True)
class AttentionMixer(_Mixer):
    type: ClassVar[str] = "attention"
    out: ClassVar[str] = "o"

    modules: Modules
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_norm: bool
    output_gate: bool
    attention_scale: float
    attn_logit_softcapping: float | None
    # RoPE's frequencies in radians per position, one for each pair of dimensions. Dimensions beyond
    # these pairs are not rotated, nor is a pair with frequency 0. An empty tuple means no RoPE.
    frequencies: tuple[float, ...]
    rope_scale: float = 1.0  # multiplies the rotated part of q and k
    sliding_window: int | None = None
    v_norm: bool = False
    # The index of the block whose keys and values this block uses. None: this block computes its
    # own.
    keys_of: int | None = None

    @property
    def head_gate(self) -> bool:
        """Whether the projection g computes one gate value for each head."""
        return "g" in projections_of(self.modules)

    @property
    def gate_dim(self) -> int:
        """The number of gate values for each head. 0: the output has no gate."""
        return self.head_dim if self.output_gate else int(self.head_gate)

    def within(self, length: int) -> AttentionMixer:
        """As in the base class. A sliding window of at least `length` tokens is removed."""
        unlimited = self.sliding_window is None or self.sliding_window >= length
        return replace(self, sliding_window=None) if unlimited else self

    def shapes(self, hidden: int) -> dict[str, Shape]:
        heads = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        queries = 2 * heads if self.output_gate else heads
        shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden)}
        shapes |= {"o": (hidden, heads), "g": (self.num_attention_heads, hidden)}
        return {name: shapes[name] for name in self._projections}

    @property
    def _projections(self) -> str:
        own = "qkvo" if self.keys_of is None else "qo"
        return f"{own}g" if self.head_gate else own

    def norms(self) -> dict[str, int]:
        normed = [each for each in "qk" if self.qk_norm and each in self._projections]
        return {f"self_attn.{each}_norm.weight": self.head_dim for each in normed}

    def check(self) -> None:
        sizes = [self.num_attention_heads, self.num_key_value_heads, self.head_dim]
        sizes += [] if self.sliding_window is None else [self.sliding_window]
        cap = self.attn_logit_softcapping
        numbers = [self.attention_scale, self.rope_scale]
        numbers += [] if cap is None else [cap]
        self._require(
            *sizes,
            numbers=all(map(is_positive, numbers)),
            flags=type(self.qk_norm) is type(self.output_gate) is type(self.v_norm) is bool,
            gates=not (self.output_gate and self.head_gate),
            num_key_value_heads=self.num_attention_heads % self.num_key_value_heads == 0,
            frequencies=2 * len(self.frequencies) <= self.head_dim
            and all(is_positive(f) or (type(f) is float and f == 0) for f in self.frequencies),
            keys_of=self.keys_of is None or type(self.keys_of) is int,
        )


@dataclass(frozen=True)
class GatedDeltaNet(_Mixer):
    """Gated DeltaNet (Yang et al., arXiv:2412.06464), with a recurrent state for each value head.

    A causal depthwise convolution and silu follow the projection qkv.
    """

    type: ClassVar[str] = "gated_delta_net"
    out: ClassVar[str] = "out"

    modules: Modules
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int

    @property
    def conv_dim(self) -> int:
        return 2 * self.num_key_heads * self.key_head_dim + self.values

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_head_dim

    def shapes(self, hidden: int) -> dict[str, Shape]:
        outputs = {"qkv": self.conv_dim, "z": self.values}
        outputs |= {"b": self.num_value_heads, "a": self.num_value_heads}
        return {name: (out, hidden) for name, out in outputs.items()} | {
            "out": (hidden, self.values)
        }

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        shapes = {
            "conv1d.weight": (self.conv_dim, self.kernel_size),
            "norm.weight": (self.value_head_dim,),
            "dt_bias": (self.num_value_heads,),
            "A_log": (self.num_value_heads,),
        }
        return {f"linear_attn.{name}": shape for name, shape in shapes.items()}

    def check(self) -> None:
        self._require(
            self.num_key_heads, self.num_value_heads, self.key_head_dim, self.value_head_dim,
            self.kernel_size, num_value_heads=self.num_value_heads % self.num_key_heads == 0,
        )  # fmt: skip


@dataclass(frozen=True)
class ShortConvolution(_Mixer):
    """A causal depthwise convolution between two gates, as in LFM2."""

    type: ClassVar[str] = "short_convolution"
    out: ClassVar[str] = "out"

    modules: Modules
    kernel_size: int

    def shapes(self, hidden: int) -> dict[str, Shape]:
        return {"in": (3 * hidden, hidden), "out": (hidden, hidden)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        return {"conv.conv.weight": (hidden, self.kernel_size)}

    def check(self) -> None:
        self._require(kernel_size=is_size(self.kernel_size))


@dataclass(frozen=True)
class Mamba2Mixer(_Mixer):
    """Mamba-2 (Dao & Gu, arXiv:2405.21060), with a recurrent state for each head.

    The input projection computes z, xBC and dt, in this order. A causal depthwise convolution and
    silu are applied to xBC.
    """

    type: ClassVar[str] = "mamba2"
    out: ClassVar[str] = "out"

    modules: Modules
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel_size: int
    norm_eps: float

    @property
    def values(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        return self.values + 2 * self.num_groups * self.state_size

    def shapes(self, hidden: int) -> dict[str, Shape]:
        outputs = self.values + self.conv_dim + self.num_heads
        return {"in": (outputs, hidden), "out": (hidden, self.values)}

    def vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        shapes = {
            "conv1d.weight": (self.conv_dim, self.kernel_size),
            "conv1d.bias": (self.conv_dim,),
            "norm.weight": (self.values,),
            "dt_bias": (self.num_heads,),
            "A_log": (self.num_heads,),
            "D": (self.num_heads,),
        }
        return {f"mamba.{name}": shape for name, shape in shapes.items()}

    def check(self) -> None:
        self._require(
            self.num_heads, self.head_dim, self.num_groups, self.state_size, self.kernel_size,
            num_groups=self.num_heads % self.num_groups == 0, norm_eps=is_positive(self.norm_eps),
        )  # fmt: skip


Mixer = AttentionMixer | GatedDeltaNet | ShortConvolution | Mamba2Mixer


def mixer_from_manifest(entry: dict[str, Any]) -> Mixer:
    fields = {**entry, "modules": modules_from_manifest(entry["modules"])}
    if "frequencies" in fields:
        fields["frequencies"] = tuple(fields["frequencies"])
    types = {each.type: each for each in get_args(Mixer)}
    return types[fields.pop("type")](**fields)


def modules_from_manifest(entry: list[list]) -> Modules:
    return tuple((name, tuple(computes)) for name, computes in entry)


def projections_of(modules: Modules) -> Iterator[str]:
    return (name for _, computes in modules for name in computes)


NUMBERS = (2.0**-126, 2.0**63)
WIDTH = 1 << 20


def is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 31


def is_positive(value: Any) -> bool:
    if type(value) not in (int, float) or not NUMBERS[0] <= value < NUMBERS[1]:
        return False
    return float(value) < NUMBERS[1]  # an integer may round up to the bound


def refuse_unsound(checks: dict[str, Any]) -> None:
    for what, is_sound in checks.items():
        if not is_sound:
            raise ValueError(f"its {what} cannot be used")
