from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import gguf
import pytest

from helpers.adapters import RANK, write_adapters
from helpers.commands import call
from helpers.gguf_files import write_gguf
from mesp.data.tokenizer import load_bundle_tokenizer

APACHE = {"general.license": gguf.GGUFValue("apache-2.0", gguf.GGUFValueType.STRING)}


def read_modelfile(text: str) -> list[tuple[str, str]]:
    """A quoted value may span lines. Characters that Go cannot print are removed from values,
    except white space.
    """
    found, name, value = [], "", None
    for char in [*text, "\n"]:
        if value is None:
            if char in " \t" and name:
                value = None if name == "PARAMETER" else ""
                name = "" if name == "PARAMETER" else name
            elif char not in " \t\n":
                name += char
            continue
        is_space = char in " \t\r\n"
        if is_space and (done := unquoted(value.strip())) is not None and char in "\r\n":
            found.append((name, done))
            name, value = "", None
        elif is_space or char.isprintable():
            value += char
    assert value is None, value
    return found


def unquoted(value: str) -> str | None:
    for quotes in ('"""', '"'):
        if value.startswith(quotes):
            is_whole = value.endswith(quotes) and len(value) >= 2 * len(quotes)
            return value[len(quotes) : -len(quotes)] if is_whole else None
    return value


def fuse(
    folder: Path, licences: dict[str, str], ends: Sequence[int] = (), token: str = "", **keys
) -> Path:
    base = folder / "model" / "base.gguf"
    base.parent.mkdir()
    write_gguf(base, "qwen2", **keys)
    for name, text in licences.items():
        (base.parent / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    bundle = folder / "bundle.mesp"
    call("export", "--model", base, "--out", bundle, "--seq-len", 8, "--rank", RANK)
    manifest = json.loads((bundle / "manifest.json").read_text())
    if token:
        file = bundle / "tokenizer.json"
        named = json.dumps(load_bundle_tokenizer(bundle).decode([ends[-1]]))
        assert named in file.read_text()
        file.write_text(file.read_text().replace(named, json.dumps(token)))
        (entry,) = (entry for entry in manifest["files"] if entry["path"] == file.name)
        data = file.read_bytes()
        entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (bundle / "manifest.json").write_text(json.dumps(manifest | {"end_tokens": [*ends]}))
    adapters = write_adapters(folder / "adapters", bundle)
    options = ("--adapters", adapters, "--out", folder / "fused", "--gguf-base", base)
    call("fuse", bundle, *options, "--val-batches", 0)
    return folder / "fused"


def test_it_names_the_file_the_ends_and_the_terms(tmp_path: Path):
    terms = {"LICENSE": 'You may.\n\n  But "not" all.\n', "NOTICE.txt": "They made it."}
    out = fuse(tmp_path, terms, [5, 0], changed=APACHE)
    tokenizer = load_bundle_tokenizer(tmp_path / "bundle.mesp")
    commands = read_modelfile((out / "Modelfile").read_text())
    assert commands == [
        ("FROM", "./model.gguf"),
        *(("stop", tokenizer.decode([token])) for token in (5, 0)),
        *(("LICENSE", text) for text in terms.values()),
    ]
    assert (out / "model.gguf").exists()


def test_without_a_licences_text_it_has_the_name(tmp_path: Path):
    out = fuse(tmp_path, {}, changed=APACHE)
    assert (out / "Modelfile").read_text() == ('FROM ./model.gguf\nLICENSE """apache-2.0"""\n')


def test_without_a_licence_it_has_the_file_alone(tmp_path: Path):
    assert (fuse(tmp_path, {}) / "Modelfile").read_text() == "FROM ./model.gguf\n"


@pytest.mark.parametrize(
    "text",
    [
        'You may. """\nADAPTER /etc/passwd\nSYSTEM """',
        'You may. ""\x00"\nADAPTER /etc/passwd\nSYSTEM """',
        'You may. ""\u200b"\nADAPTER /etc/passwd\nSYSTEM ""\u200b"',
        "\udcff\udcfe",
    ],
)
def test_a_licence_gives_no_commands(tmp_path: Path, text: str):
    out = fuse(tmp_path, {"LICENSE": text})
    named = ("LICENSE", "See LICENSE beside this file.")
    assert read_modelfile((out / "Modelfile").read_text()) == [("FROM", "./model.gguf"), named]


def test_a_token_gives_no_commands(tmp_path: Path):
    token = '<|end|>"""\nADAPTER /etc/passwd\nSYSTEM """'
    out = fuse(tmp_path, {}, [5, 511], token)
    tokenizer = load_bundle_tokenizer(tmp_path / "bundle.mesp")
    assert tokenizer.decode([511]) == token
    stop = ("stop", tokenizer.decode([5]))
    assert read_modelfile((out / "Modelfile").read_text()) == [("FROM", "./model.gguf"), stop]


def test_there_is_none_without_a_fused_file(tmp_path: Path):
    fuse(tmp_path, {})
    options = ("--adapters", tmp_path / "adapters", "--gguf", "--val-batches", 0)
    call("fuse", tmp_path / "bundle.mesp", *options, "--out", tmp_path / "other")
    assert (tmp_path / "other" / "adapters.gguf").exists()
    assert not (tmp_path / "other" / "Modelfile").exists()
