from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mesp.adapters.weighted import StrPath, weigh
from mesp.bundle.manifest import read_manifest
from mesp.bundle.reader import Bundle
from mesp.data.fields import OPTIONS
from mesp.data.prompts import as_trained, encode_prompt
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.engine import process
from mesp.engine.images import open_images
from mesp.engine.process import Record
from mesp.errors import plain_errors


class TextStream:
    """The text that a bundle's model writes after a prompt, in pieces as they arrive.

    `prompt_tokens` is the number of tokens in the prompt. After the last piece, `end` is the
    engine's ``end`` record. Its ``reason`` is ``stopped`` if a signal such as Ctrl-C ended the
    text.

    Args:
        bundle: A bundle or its folder.
        prompt: The text to continue or, in the chat template, to answer.
        adapters: A folder of adapters from MeSP, mlx-lm or PEFT, or several folders, whose weighted
            sum is added to the model; None for the base model.
        weights: A factor from 0 to 10 for each folder of `adapters`, by default 1; 0 leaves the
            folder out.
        max_tokens: The largest number of tokens in the text.
        temperature: From 0, which always takes the likeliest token, to 100.
        top_p: Draw from the fewest tokens whose probabilities sum to at least this, above 0 up to
            1.
        seed: Seed of sampling.
        device: ``cpu`` or ``gpu``; None: a GPU if MLX can use one.
        system_prompt: The system message of the chat template.
        chat: Whether the prompt goes into the chat template; None: as the bundle's data, or if the
            tokenizer has one.
        split_special_tokens: Whether special tokens in the prompts are encoded as ordinary text;
            None: as the bundle's data.
        chat_template_kwargs: Options of the chat template; None: as the bundle's data.
        images: Image files, or their bytes, that come before the prompt.
        vision: The model whose vision tower reads images, as `export` takes it; None: the one that
            the bundle is of.

    Raises:
        MespError: The bundle, the adapters, their weights or the prompt cannot be used, or the
            engine fails.
    """

    def __init__(
        self,
        bundle: Bundle | StrPath,
        prompt: str,
        *,
        adapters: StrPath | Sequence[StrPath] | None = None,
        weights: Sequence[float] = (),
        max_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        device: str | None = None,
        system_prompt: str | None = None,
        chat: bool | None = None,
        split_special_tokens: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        images: Sequence[Path | bytes] = (),
        vision: str | None = None,
    ) -> None:
        stack = weigh(adapters, weights)
        path = bundle.path if isinstance(bundle, Bundle) else Path(bundle)
        manifest = read_manifest(path)
        self._tokenizer = load_bundle_tokenizer(path)
        how = as_trained(
            manifest.encoding, bool(manifest.data), chat=chat,
            split_special_tokens=split_special_tokens, chat_template_kwargs=chat_template_kwargs,
        )  # fmt: skip
        split, encoder = bool(how["split_special_tokens"]), None
        if images:
            encoder = open_images(manifest, vision, self._tokenizer)
        tokens = encode_prompt(
            self._tokenizer, prompt, how["chat"], system_prompt, split, how[OPTIONS], images,
            encoder,
        )  # fmt: skip
        self.prompt_tokens = len(tokens)
        self.end: Record = {}

        def records() -> Iterator[Record]:
            with encoder.rows_file() if encoder else nullcontext() as file:
                yield from process.generate(
                    path, tokens, adapters=stack, device=device,
                    stop=self._tokenizer.eos_token_ids, images=file, max_tokens=max_tokens,
                    temperature=temperature, top_p=top_p, seed=seed,
                )  # fmt: skip

        self._records = records()

    def __iter__(self) -> Iterator[str]:
        detokenizer = self._tokenizer.detokenizer
        for record in self._records:
            if record["type"] == "token":
                with plain_errors(f"Token {record['token']} is not in the tokenizer's vocabulary"):
                    detokenizer.add_token(record["token"])
                yield detokenizer.last_segment
            else:
                self.end = record
        detokenizer.finalize()
        yield detokenizer.last_segment


def generate(
    bundle: Bundle | StrPath,
    prompt: str,
    *,
    adapters: StrPath | Sequence[StrPath] | None = None,
    weights: Sequence[float] = (),
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    device: str | None = None,
    system_prompt: str | None = None,
    chat: bool | None = None,
    split_special_tokens: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    images: Sequence[Path | bytes] = (),
    vision: str | None = None,
) -> str:
    """Returns the text that a bundle's model writes after a prompt, in whole.

    The arguments are those of `TextStream`. Raises what `TextStream` raises, and KeyboardInterrupt
    if a signal such as Ctrl-C ended the text.
    """
    stream = TextStream(
        bundle, prompt, adapters=adapters, weights=weights, max_tokens=max_tokens,
        temperature=temperature, top_p=top_p, seed=seed, device=device,
        system_prompt=system_prompt, chat=chat, split_special_tokens=split_special_tokens,
        chat_template_kwargs=chat_template_kwargs, images=images, vision=vision,
    )  # fmt: skip
    text = "".join(stream)
    if stream.end["reason"] == "stopped":
        raise KeyboardInterrupt
    return text
