from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

_LICENSES = (
    "LICENSE*",
    "LICENCE*",
    "*_LICENSE*",
    "*_LICENCE*",
    "COPYING*",
    "TERMS_OF_USE*",
    "*_TERMS_OF_USE*",
    "GEMMA_TERMS*",
)
_OTHERS = ("NOTICE*", "*_NOTICE*", "USE_POLICY*", "*_USE_POLICY*")
_SUFFIXES = ("", ".txt", ".md", ".pdf")
_UNNAMED = (None, "", "other", "unknown")


def _in_any_case(pattern: str) -> str:
    return "".join(f"[{c.upper()}{c.lower()}]" if c.isalpha() else c for c in pattern)


LICENSE_PATTERNS = [_in_any_case(pattern) for pattern in (*_LICENSES, *_OTHERS)]


def is_terms(name: str) -> bool:
    return _fits(name, (*_LICENSES, *_OTHERS))


def has_license(license: str | None, license_name: str | None, names: Iterable[str]) -> bool:
    is_named = bool(license_name) or license not in _UNNAMED
    return is_named or any(_fits(name, _LICENSES) for name in names)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return (
        "/" not in name
        and name.isprintable()
        and PurePath(name).suffix.lower() in _SUFFIXES
        and any(fnmatchcase(name.upper(), pattern) for pattern in patterns)
    )


@dataclass(frozen=True)
class License:
    """A model's licence, as the model card or the GGUF file states it.

    `license` is an identifier such as ``apache-2.0``, or ``other``.
    """

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None

    @classmethod
    def of(cls, read: Any) -> License:
        found = (read(name) for name in ("license", "license_name", "license_link"))
        return cls(*(v if isinstance(v, str) and v and v.isprintable() else None for v in found))

    @classmethod
    def of_card(cls, model_card: Path) -> License:
        from huggingface_hub import ModelCard

        try:
            text = model_card.read_text(encoding="utf-8")
            return cls.of(ModelCard(text, ignore_metadata_errors=True).data.get)
        except Exception:  # a missing or invalid model card
            return UNKNOWN


UNKNOWN = License()
