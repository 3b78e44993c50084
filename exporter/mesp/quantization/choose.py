from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mesp.errors import MespError
from mesp.models.architecture import Architecture
from mesp.models.config_json import unsupported
from mesp.models.quantization_formats import MODES, ONE_BIT, Quantization, describe_quantization
from mesp.models.tensor_names import name_here

BITS = (4, 5, 6, 8)
HEAD_BITS = 6
# Bits per weight of the router, as in mlx-lm. Larger rounding errors could change which experts are
# chosen.
ROUTER_BITS = 8


@dataclass(frozen=True)
class Quantizations:
    """The quantizations of a model's matrices: those in its files or, for an unquantized model, the
    requested ones.

    `main` applies to every module that is not in `others`.
    """

    main: Quantization
    others: dict[str, Quantization | None] = field(default_factory=dict)
    config: dict[str, Any] | None = None

    def of(self, module: str) -> Quantization:
        return self.in_files(module).in_bundle

    @property
    def has_one_bit(self) -> bool:
        return any(each is not None and each.bits == ONE_BIT for each in self.all)

    @property
    def all(self) -> tuple[Quantization | None, ...]:
        return self.main, *self.others.values()

    def in_files(self, module: str) -> Quantization:
        quantization = self.others.get(module, self.main)
        if quantization is None:
            raise not_quantized(module)
        return quantization

    def to_config(self, arch: Architecture) -> dict[str, Any]:
        """Returns the value of ``quantization`` in mlx-lm's config.json.

        The value is the main quantization, with entries for the modules in `others`.
        """
        prefix = arch.mlx_root
        others = {f"{prefix}{name}": each and asdict(each) for name, each in self.others.items()}
        if arch.tie_word_embeddings and not arch.is_tied_in_mlx_lm:
            others.pop(f"{prefix}lm_head", None)
            if (table := f"{prefix}model.embed_tokens") in others:
                others[f"{prefix}lm_head"] = others[table]
        return asdict(self.main) | others


def in_2_bits(section: dict[str, Any]) -> dict[str, Any]:
    section = {k: in_2_bits(v) if isinstance(v, dict) else v for k, v in section.items()}
    return section | {"bits": 2} if section.get("bits") == ONE_BIT else section


def not_quantized(module: str) -> MespError:
    return MespError(
        f"{module} is not quantized, unlike the rest of the model, which is not supported; take "
        "the model it was made from."
    )


def _not_in_order(key: str) -> MespError:
    return MespError(
        f"The model's config.json is not valid (its {key} cannot be used); take an unchanged "
        "config.json."
    )


_KEYS = ("bits", "group_size", "mode")
_MODULES = ("lm_head", "embed_tokens")


def _check_sections(name: str, config: dict[str, Any]) -> None:
    """Raises MespError if a config.json has a quantization setting that is not supported.

    In a multimodal model, text_config may have such settings too.
    """
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, dict) else [config]
    for key in ("quantization_config", "quantization"):
        for section in (part[key] for part in parts if part.get(key)):
            if not isinstance(section, dict):
                raise _not_in_order(key)
            if method := section.get("quant_method"):
                raise _not_of_mlx(name, method)
            for each, value in sorted(section.items()):
                if isinstance(value, dict | bool) and ("." in each or each in _MODULES):
                    of_module = sorted(value.items()) if isinstance(value, dict) else ()
                    for inner, its in of_module:
                        if inner not in _KEYS and its:
                            raise unsupported(f"{key}'s {inner} of {each}", its)
                elif each not in _KEYS and value:
                    raise unsupported(f"{key}'s {each}", value)
            if not config.get("quantization"):
                raise unsupported(key, section)


def _not_of_mlx(name: str, method: object) -> MespError:
    instead = "the model it was made from, or one quantized by mlx-lm"
    if method == "bitnet":
        instead = (
            "a GGUF file of it with blocks of TQ1_0 or TQ2_0, whose activations are not rounded "
            "here, or a model quantized by mlx-lm"
        )
    return MespError(f"{name} is quantized by {method}, which is not supported; take {instead}.")


def find_quantizations(
    name: str,
    config: dict[str, Any],
    arch: Architecture,
    mode: str | None,
    bits: int | None,
    group_size: int | None,
    head_bits: int | None,
) -> Quantizations:
    """Returns the model's own quantizations or, for an unquantized model, the requested ones.

    Raises MespError if the model's own quantization is not supported, or if the request is invalid
    or contradicts it.
    """
    given = config.get("quantization")
    _check_sections(name, config)
    asked = (mode, bits, group_size)
    if not given:
        return choose_quantizations(arch, choose_quantization(*asked), head_bits)

    def read(entry: dict[str, Any]) -> Quantization:
        size, group, mode = entry.get("bits"), entry.get("group_size"), entry.get("mode", "affine")
        sound = all(n is None or type(n) is int for n in (size, group)) and isinstance(mode, str)
        if not sound:
            raise _not_in_order("quantization")
        default = MODES.get(mode) or (4, 64)
        quantization = Quantization(size or default[0], group or default[1], mode)
        if not quantization.in_bundle.is_of_mlx:
            raise MespError(
                f"{name} is quantized to {describe_quantization(quantization)}, which MLX "
                "does not have; take the model it was made from."
            )
        return quantization

    main = read(given)
    had = (main.mode, main.bits, main.group_size)
    if head_bits or any(a is not None and a != b for a, b in zip(asked, had, strict=True)):
        raise MespError(
            f"{name} is quantized already, to {describe_quantization(main)}; leave out "
            "--mode, --bits, --head-bits and --group-size."
        )
    # As in mlx-lm, a module's entry is a quantization, true for the main one, or false for none.
    others = {
        name_here(name, config["model_type"]): (
            read(entry) if isinstance(entry, dict) else main if entry else None
        )
        for name, entry in given.items()
        if isinstance(entry, dict | bool)
    }
    return Quantizations(main, others, given)


def choose_quantization(mode: str | None, bits: int | None, group_size: int | None) -> Quantization:
    """Raises MespError if the mode is not "affine" and does not have the requested bits or group
    size.
    """
    mode = mode or "affine"
    if mode == "affine":
        return Quantization(bits or 4, group_size or 64)
    quantization = Quantization(*MODES[mode], mode)
    if (bits or quantization.bits, group_size or quantization.group_size) != MODES[mode]:
        raise MespError(
            f"--mode {mode} is {quantization.bits} bits in groups of {quantization.group_size}; "
            "leave out --bits and --group-size."
        )
    return quantization


def choose_quantizations(
    arch: Architecture, main: Quantization, head_bits: int | None
) -> Quantizations:
    """Returns the quantizations of a model's matrices: `ROUTER_BITS` in affine mode for the
    matrices in `Block.frozen`, and `main` for the others.

    If `main` is in affine mode, the head has `head_bits`, by default the bits of `main` but at
    least `HEAD_BITS`. So has an embedding that is tied to the head. Raises MespError for
    `head_bits` in another mode.
    """
    routers = [
        f"model.layers.{i}.{name}" for i, block in enumerate(arch.blocks) for name in block.frozen()
    ]
    others: dict[str, Quantization | None] = dict.fromkeys(routers, Quantization(ROUTER_BITS))
    if main.mode != "affine":
        if head_bits:
            raise MespError("--head-bits is of --mode affine; leave out one of them.")
        return Quantizations(main, others)
    head = replace(main, bits=head_bits or max(main.bits, HEAD_BITS))
    name = "model.embed_tokens" if arch.tie_word_embeddings else "lm_head"
    return Quantizations(main, others | ({} if head == main else {name: head}))


def check_quantizations(arch: Architecture, quantizations: Quantizations) -> None:
    """Raises MespError unless every matrix is quantized and its row length is a multiple of the
    group size.
    """
    for name, size in arch.columns.items():
        group_size = quantizations.of(name).group_size
        if size % group_size:
            raise MespError(
                f"Groups of {group_size} weights do not divide the rows of {size} of {name}; take "
                "another --group-size, such as 32."
            )
