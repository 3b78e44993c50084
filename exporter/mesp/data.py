"""Data as mlx-lm takes it, to token ids and examples in a bundle; mesp-data, which replaces them.

A split of the data is one stream of token ids. Packed, training takes windows of the stream;
otherwise it takes one example a sequence, and says where in the stream each lies.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from rich.console import Console

from mesp.bundle import describe_files, locked, read_manifest, sync, write_manifest
from mesp.errors import MespError, plain_os_errors
from mesp.hub import download

SPLITS = ("train", "valid", "test")
HELD_OUT = 10  # where the data has no valid split of its own, one part in this many becomes it
SOURCES = (
    "a folder or a dataset on the Hugging Face Hub with train, valid and test as .jsonl (a folder "
    "also as .txt), a JSONL file, a text file, or python-docs"
)
RECORDS = 'records have "text", "prompt" and "completion", or "messages"'


class Document(NamedTuple):
    """What is tokenized at once: the text of a file, or a record; `where` it is, for messages."""

    where: str
    content: str | dict[str, Any]

    @property
    def kind(self) -> str:
        """Which of mlx-lm's kinds of record it is, found as mlx-lm finds it."""
        if isinstance(self.content, str):
            return "text"
        if "prompt" in self.content and "completion" in self.content:
            return "prompt and completion"
        return "messages" if "messages" in self.content else "text"


@dataclass(frozen=True)
class DataOptions:
    """How data is taken: packed (None: only text is), the loss on completions only, and what
    becomes of examples longer than the longest sequence, ``cut`` or ``split``."""

    pack: bool | None = None
    mask_prompt: bool = False
    long: str = "cut"


@dataclass(frozen=True)
class Split:
    """A split, tokenized: `tokens` uint32 [N], and unless it is packed `examples` uint32 [M, 3].

    An example is (start, length, prompt): the tokens [start, start + length), of which the
    prediction of the first `prompt` is not in the loss; max(prompt, 1) < length. `too_long` of the
    records were cut or split, and `left_out` have nothing that can be predicted.
    """

    tokens: np.ndarray
    examples: np.ndarray | None = None
    too_long: int = 0
    left_out: int = 0


def load(
    data: str, tokenizer: Any, seq_len: int, vocab_size: int, options: DataOptions | None = None
) -> dict[str, Split]:
    """The splits train, valid and, where there is one, test of `data`, tokenized.

    `data` is one of `SOURCES`; what exists here wins over a name. `tokenizer` is as
    `load_tokenizer` gives it. Records become what mlx-lm's datasets make of them; the text of a
    file ends with the end-of-text token. Without a valid split of its own the data's last tenth is
    held out. Says on standard error how many examples were cut, split or left out. Raises
    MespError where the data cannot be read or used, a packed split is shorter than one sequence
    of `seq_len` tokens and the token after, or ids do not fit the model's `vocab_size`.
    """
    options = options or DataOptions()
    documents = _read(data)
    kind = _kind(documents)
    pack = kind == "text" if options.pack is None else options.pack
    _check_options(data, documents, kind, pack, options.mask_prompt)
    if kind != "text" and not tokenizer.has_chat_template:
        raise MespError(
            f"The model's tokenizer has no chat template, which the {kind} of {data} need; take "
            "an -Instruct model, or write the records as text."
        )
    encode = _encoder(kind, tokenizer, options.mask_prompt)
    if pack:
        splits = {split: _stream(map(encode, each)) for split, each in documents.items()}
        _hold_out_tokens(data, splits, seq_len)
        _check_lengths(data, splits, seq_len)
    else:
        _hold_out_records(data, documents)
        splits = {
            split: _examples(data, split, map(encode, each), seq_len, options.long)
            for split, each in documents.items()
        }
    largest = max(int(split.tokens.max()) for split in splits.values())
    if largest >= vocab_size:
        raise MespError(
            f"The model's tokenizer gives id {largest}, and the model knows {vocab_size} ids; the "
            "two do not belong together."
        )
    if report := _report(splits, seq_len, options.long):
        click.echo(report, err=True)
    return splits


def random_data(vocab_size: int, seq_len: int, seed: int) -> dict[str, Split]:
    """Streams of random ids for 64 windows each, to time training without a text."""
    generator = np.random.default_rng(seed)
    tokens = 64 * seq_len + 1
    return {
        split: Split(generator.integers(vocab_size, size=tokens, dtype=np.uint32))
        for split in ("train", "valid")
    }


def python_docs() -> dict[str, list[Document]]:
    """The prose of Python's language reference, which comes with Python (`help("topics")`).

    Code and grammar are left out, and lines are joined: a small model would learn little but their
    layout. Topics repeat each other's passages; each is kept once, so that none is on both sides.
    One section in ten is held out.
    """
    from pydoc_data.topics import topics

    sections, seen = [], set()
    for _, text in sorted(topics.items()):
        section: list[str] = []
        for block in re.split(r"\n{2,}", text.strip()):
            paragraph = " ".join(block.split())
            prose = not block.startswith("      ") and re.match(r"[A-Z].{40,}\.$", paragraph)
            if prose and paragraph not in seen:
                seen.add(paragraph)
                section.append(paragraph)
            if sum(map(len, section)) > 4000:
                sections.append(section)
                section = []
        sections.append(section)
    texts = ["\n\n".join(section) + "\n" for section in sections if section]
    documents = [Document("python-docs", {"text": text}) for text in texts]
    return {
        "train": [each for i, each in enumerate(documents) if i % HELD_OUT != HELD_OUT // 2],
        "valid": documents[HELD_OUT // 2 :: HELD_OUT],
    }


BUILT_IN = {"python-docs": python_docs}


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model's folder or a bundle, as mlx-lm wraps it."""
    if not (folder / "tokenizer_config.json").is_file():
        raise MespError(
            f"{folder} has no tokenizer, so --data cannot be used with it; take a model with one."
        )
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from mlx_lm import tokenizer_utils

    try:
        return tokenizer_utils.load(folder, {"local_files_only": True})
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise MespError(f"The tokenizer in {folder} cannot be loaded: {reason}") from error


# Reading


def _read(data: str) -> dict[str, list[Document]]:
    path = Path(data)
    if path.is_dir():
        return _read_folder(path)
    if path.exists():
        return {"train": _read_file(path)}
    if data in BUILT_IN:
        return BUILT_IN[data]()
    if re.fullmatch(r"[\w.-]+/[\w.-]+", data) and path.suffix not in (".txt", ".jsonl"):
        return _read_dataset(data)
    raise MespError(f"There is no data {data}; name {SOURCES}.")


def _read_dataset(repo: str) -> dict[str, list[Document]]:
    folders = ("", "data/")
    patterns = [f"{folder}{split}.jsonl" for folder in folders for split in SPLITS]
    snapshot = download("dataset", repo, patterns)
    for folder in folders:
        if (snapshot / folder / "train.jsonl").is_file():
            return _read_folder(snapshot / folder)
    raise MespError(
        f"The dataset {repo} on the Hugging Face Hub has no train.jsonl; download it, and write "
        "its records to a folder with train.jsonl."
    )


def _read_folder(folder: Path) -> dict[str, list[Document]]:
    documents = {}
    for split in SPLITS:
        files = [f for f in (folder / f"{split}.jsonl", folder / f"{split}.txt") if f.exists()]
        if len(files) > 1:
            raise MespError(f"{folder} has both {files[0].name} and {files[1].name}; keep one.")
        if files:
            documents[split] = _read_file(files[0])
    if "train" not in documents:
        raise MespError(f"{folder} has neither train.txt nor train.jsonl; add one.")
    return documents


def _read_file(path: Path) -> list[Document]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MespError(f"{path} is not UTF-8 text; convert it first.") from error
    except OSError as error:
        raise MespError(f"{path} cannot be read: {error.strerror}.") from error
    if not text.strip():
        raise MespError(f"{path} has no text in it.")
    if path.suffix != ".jsonl":
        return [Document(str(path), text)]
    # Not str.splitlines, which also splits at characters that JSON allows in a string.
    lines = enumerate(text.split("\n"), 1)
    return [_record(f"Line {number} of {path}", line) for number, line in lines if line.strip()]


def _record(where: str, line: str) -> Document:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise MespError(f"{where} is not JSON.") from error
    if not isinstance(record, dict):
        raise MespError(f"{where} is no object; {RECORDS}.")
    document = Document(where, record)
    if document.kind == "messages":
        messages = record["messages"]
        if not (
            isinstance(messages, list)
            and messages
            and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
        ):
            raise MespError(
                f'{where} has messages that are not a list of objects with a "role" each.'
            )
        return document
    for key in document.kind.split(" and "):
        if key not in record:
            raise MespError(f"{where} has {', '.join(record) or 'nothing'}; {RECORDS}.")
        if not isinstance(record[key], str):
            raise MespError(f'{where} has a "{key}" that is not a string.')
    return document


def _kind(documents: dict[str, list[Document]]) -> str:
    """The kind of all documents. Raises MespError where it is not one."""
    first = documents["train"][0]
    for document in (each for split in documents.values() for each in split):
        if document.kind != first.kind:
            raise MespError(
                f"{document.where} has {document.kind}, and the data began with {first.kind}; "
                "keep one kind of record."
            )
    return first.kind


def _check_options(
    data: str, documents: dict[str, list[Document]], kind: str, pack: bool, mask_prompt: bool
) -> None:
    """Raises MespError where the data cannot be taken in the way asked for."""
    if mask_prompt and kind == "text":
        raise MespError(f"{data} has text, which has no prompt: leave out --mask-prompt.")
    if mask_prompt and pack:
        raise MespError("--mask-prompt needs one example a sequence: leave out --pack.")
    files = any(isinstance(each.content, str) for split in documents.values() for each in split)
    if files and not pack:
        raise MespError(
            f"{data} has text without records, so it is packed: leave out --no-pack, or write it "
            'as a JSONL file of {"text": …}.'
        )


def _hold_out_records(data: str, documents: dict[str, list[Document]]) -> None:
    if "valid" not in documents:
        train = documents["train"]
        held_out = max(len(train) // HELD_OUT, 1)
        if len(train) == held_out:
            raise MespError(
                f"{data} has one record, too few to train on and hold out one; give it more."
            )
        documents["train"], documents["valid"] = train[:-held_out], train[-held_out:]


# Tokens

Encoded = tuple[list[int], int]  # the ids, and how many of them are the masked prompt


def _encoder(kind: str, tokenizer: Any, mask_prompt: bool) -> Callable[[Document], Encoded]:
    from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset

    if kind == "text":
        process = functools.partial(_encode_text, tokenizer)
    elif kind == "messages":
        process = ChatDataset([], tokenizer, mask_prompt=mask_prompt).process
    else:
        process = CompletionsDataset(
            [], tokenizer, "prompt", "completion", mask_prompt=mask_prompt
        ).process

    def encode(document: Document) -> Encoded:
        if mask_prompt and kind == "messages" and len(document.content["messages"]) == 1:
            raise MespError(
                f"{document.where} has one message and so no prompt before it: leave it out, or "
                "leave out --mask-prompt."
            )
        try:
            return process(document.content)
        except Exception as error:  # a chat template can raise anything
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise MespError(f"{document.where} cannot be tokenized: {reason}") from error

    return encode


def _encode_text(tokenizer: Any, content: str | dict[str, str]) -> Encoded:
    """A record as mlx-lm's TextDataset has it, which cannot take an empty one; a file in pieces."""
    if isinstance(content, str):
        ids = []
        for piece in _pieces(content):
            ids += tokenizer.encode(piece, add_special_tokens=False)
    else:
        ids = tokenizer.encode(content["text"])
    end = tokenizer.eos_token_id
    if ids and end is not None and ids[-1] != end:
        ids.append(end)
    return ids, 0


def _pieces(text: str, size: int = 1 << 14) -> Iterator[str]:
    """Cuts a long text at starts of lines, as tokenizing it whole takes much memory.

    Byte-level BPE cuts there too; at most the white space before a cut is tokenized differently.
    """
    start = 0
    while start < len(text):
        cut = re.compile(r"\n(?= ?\S)").search(text, start + size)
        stop = cut.end() if cut else len(text)
        yield text[start:stop]
        start = stop


def _stream(encoded: Iterable[Encoded]) -> Split:
    parts = [np.array(ids, np.uint32) for ids, _ in encoded]
    return Split(np.concatenate(parts), left_out=sum(not len(part) for part in parts))


def _examples(data: str, split: str, encoded: Iterable[Encoded], seq_len: int, long: str) -> Split:
    """One example a sequence, none longer than `seq_len` tokens and the token after.

    A longer one is cut to that, or split into examples that follow each other as windows do: each
    begins with the last token of the one before, and those in which nothing counts are left out,
    so every token that counts counts once.
    """
    longest = seq_len + 1
    parts, examples = [], []
    start = too_long = left_out = 0
    for ids, prompt in encoded:
        stop = min(len(ids), longest) if long == "cut" else len(ids)
        pieces = [
            (start + at, min(stop - at, longest), max(prompt - at, 0))
            for at in range(0, stop - 1, seq_len)
        ]
        pieces = [piece for piece in pieces if max(piece[2], 1) < piece[1]]
        if not pieces:
            left_out += 1
            continue
        too_long += len(ids) > longest
        examples += pieces
        parts.append(np.array(ids[:stop], np.uint32))
        start += stop
    if not examples:
        raise MespError(
            f"The {split} data of {data} has no example with something to predict in its first "
            f"{longest} tokens; give it others or export with a larger --seq-len."
        )
    return Split(np.concatenate(parts), np.array(examples, np.uint32), too_long, left_out)


def _hold_out_tokens(data: str, splits: dict[str, Split], seq_len: int) -> None:
    if "valid" in splits:
        return
    train = splits["train"]
    held_out = max(len(train.tokens) // HELD_OUT, seq_len + 1)
    if len(train.tokens) < held_out + seq_len + 1:
        raise MespError(
            f"{data} has {len(train.tokens):,} tokens, too few to train on and hold out one "
            f"sequence of {seq_len} each; give it more text or export with a smaller --seq-len."
        )
    splits["train"] = replace(train, tokens=train.tokens[:-held_out])
    splits["valid"] = Split(train.tokens[-held_out:])


def _check_lengths(data: str, splits: dict[str, Split], seq_len: int) -> None:
    for split, each in splits.items():
        if len(each.tokens) < seq_len + 1:
            raise MespError(
                f"The {split} data of {data} has {len(each.tokens):,} tokens, less than one "
                f"sequence of {seq_len} and the token after; give it more text or export with a "
                "smaller --seq-len."
            )


def _report(splits: dict[str, Split], seq_len: int, long: str) -> str:
    """What was not taken as it is, in one line; empty where all was."""

    def counts(of: Callable[[Split], int]) -> str:
        return ", ".join(f"{of(each):,} in {split}" for split, each in splits.items() if of(each))

    too_long, left_out = counts(lambda split: split.too_long), counts(lambda split: split.left_out)
    sentences = []
    if too_long:
        sentences.append(f"Records longer than {seq_len + 1} tokens were {long}: {too_long}.")
    if left_out:
        sentences.append(f"Records with nothing to predict were left out: {left_out}.")
    return " ".join(sentences)


# In a bundle

# A bundle's data lies in one of these folders; new data is written to the other.
FOLDERS = ("data", "data.2")


def write_data(bundle: Path, folder: str, splits: dict[str, Split]) -> dict[str, Any]:
    """Writes the splits to a new `folder` of the bundle; returns the manifest's ``data``."""
    entries = {}
    for split, each in splits.items():
        (bundle / folder).mkdir(exist_ok=True)
        entries[split] = {"file": f"{folder}/{split}.bin", "tokens": len(each.tokens)}
        (bundle / folder / f"{split}.bin").write_bytes(each.tokens.astype("<u4").tobytes())
        if each.examples is not None:
            file = f"{folder}/{split}.examples.bin"
            entries[split]["examples"] = {"file": file, "count": len(each.examples)}
            (bundle / file).write_bytes(each.examples.astype("<u4").tobytes())
    return entries


def replace_data(bundle: Path, splits: dict[str, Split]) -> dict[str, Any]:
    """Replaces the data of a finished bundle; returns the manifest's new ``data``.

    The new manifest, put in place by one rename, is what makes the new data the bundle's: ended at
    any time, this leaves a whole bundle. What else it leaves is removed by the next call.
    """
    with (
        plain_os_errors(f"Cannot write the data to {bundle}"),
        locked(bundle, f"mesp-data is writing to {bundle}"),
    ):
        manifest = read_manifest(bundle, to_run=False)
        new = _remove_unused(bundle)
        try:
            data = write_data(bundle, new, splits)
            kept = [f for f in manifest["files"] if f["path"].split("/")[0] not in FOLDERS]
            files = sorted(kept + describe_files(bundle, new), key=lambda file: file["path"])
            write_manifest(bundle / new, {**manifest, "data": data, "files": files})
            for written in (*(bundle / new).iterdir(), bundle / new):
                sync(written)
            os.replace(bundle / new / "manifest.json", bundle / "manifest.json")
            sync(bundle)
        finally:
            _remove_unused(bundle)
    return data


def _remove_unused(bundle: Path) -> str:
    """Removes the folder for data that is not the manifest's, if it is there; returns its name."""
    files = json.loads((bundle / "manifest.json").read_text(encoding="utf-8"))["files"]
    used = {file["path"].split("/")[0] for file in files}
    unused = next(folder for folder in FOLDERS if folder not in used)
    shutil.rmtree(bundle / unused, ignore_errors=True)
    return unused


def describe(data: dict[str, Any]) -> str:
    """The manifest's ``data`` in words; empty where there is none."""
    return ", ".join(
        f"{entry['examples']['count']:,} {split} examples of {entry['tokens']:,} tokens"
        if "examples" in entry
        else f"{entry['tokens']:,} {split} tokens"
        for split, entry in data.items()
    )


# The command


def data_options(function: Callable) -> Callable:
    """Adds the options of how data is taken to a command, which gets them as `data_options`."""

    @click.option(
        "--pack/--no-pack", default=None, show_default="--pack for text, --no-pack otherwise",
        help="Pack records into full sequences, or take one a sequence.",
    )  # fmt: skip
    @click.option(
        "--mask-prompt", is_flag=True,
        help="Leave the prompt, or all messages but the last, out of the loss.",
    )  # fmt: skip
    @click.option(
        "--long", type=click.Choice(["cut", "split"]), default="cut",
        help="What becomes of a record longer than the longest sequence, where none are packed.",
    )  # fmt: skip
    @functools.wraps(function)
    def command(*, pack: bool | None, mask_prompt: bool, long: str, **others: Any) -> None:
        function(data_options=DataOptions(pack, mask_prompt, long), **others)

    return command


@click.command(context_settings={"show_default": True})
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--data", required=True, metavar="FILE|DIR|NAME", help=f"The new data: {SOURCES}.")
@data_options
def main(bundle: Path, data: str, data_options: DataOptions) -> None:
    """Replace the data in BUNDLE, a folder that mesp-export wrote, using its tokenizer."""
    manifest = read_manifest(bundle, to_run=False)
    vocab_size = manifest["architecture"]["vocab_size"]
    with Console(stderr=True).status("Tokenizing"):
        tokenizer = load_tokenizer(bundle)
        splits = load(data, tokenizer, max(manifest["seq_lens"]), vocab_size, data_options)
    written = replace_data(bundle, splits)
    click.echo(f"{bundle} now has {describe(written)}.")
