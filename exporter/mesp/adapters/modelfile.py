from __future__ import annotations

import re
from pathlib import Path

from mesp.bundle.reader import Bundle
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.errors import plain_errors
from mesp.files import create, read_bytes
from mesp.license import is_terms

MODELFILE = "Modelfile"
_QUOTES = '"""'


def write_modelfile(folder: Path, gguf: str, bundle: Bundle) -> None:
    """The Modelfile contains the licence and the texts at which answers in the bundle's
    data end.
    """
    lines = [f"FROM ./{gguf}"]
    lines += [f"PARAMETER stop {_quoted(text)}" for text in _ends(bundle)]
    lines += [f"LICENSE {_quoted(text)}" for text in _terms(folder, bundle)]
    with create(folder / MODELFILE) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def _ends(bundle: Bundle) -> list[str]:
    tokens = bundle.manifest.end_tokens
    if not tokens:
        return []
    tokenizer = load_bundle_tokenizer(bundle.path)
    with plain_errors(f"The manifest of {bundle.path} names end tokens that it does not have"):
        texts = map(tokenizer.decode, ([token] for token in tokens))
        return [text for text in texts if text and _can_be_quoted(text)]


def _terms(folder: Path, bundle: Bundle) -> list[str]:
    names = sorted(filter(is_terms, (entry.path for entry in bundle.manifest.files)))
    if names:
        return [_text(folder / name) for name in names]
    model = bundle.manifest.model
    named = (model.license, model.license_name, model.license_link)
    line = " ".join(filter(None, named))
    return [line] if line and _can_be_quoted(line) else []


def _text(file: Path) -> str:
    try:
        text = read_bytes(file).decode()
    except ValueError:
        text = ""
    return text if text and _can_be_quoted(text) else f"See {file.name} beside this file."


def _can_be_quoted(text: str) -> bool:
    """Returns whether `text` can stand between quotes in a Modelfile.

    Ollama removes characters that it cannot print. The removal may create a closing quote.
    """
    return _QUOTES not in re.sub(r"[^\t\n\r -~]", "", text)


def _quoted(text: str) -> str:
    return f"{_QUOTES}{text}{_QUOTES}"
