"""Prompts to the token ids that the engine takes, as mlx_lm.generate makes them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mesp.data.tokens import load_tokenizer as load_any_tokenizer
from mesp.data.tokens import plain_errors
from mesp.errors import MespError
from mesp.files import read_object

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def load_tokenizer(bundle: Path) -> TokenizerWrapper:
    """The bundle's tokenizer, with the tokens that end a text as mlx-lm finds them."""
    try:
        config = read_object(bundle / "config.json")
        if (bundle / "generation_config.json").exists():
            said = read_object(bundle / "generation_config.json").get("eos_token_id")
            config["eos_token_id"] = said or config.get("eos_token_id")
        ends = config.get("eos_token_id")
        if not all(type(end) is int for end in (ends if isinstance(ends, list) else [ends or 0])):
            raise ValueError("its eos_token_id is neither a number nor a list of them")
    except (OSError, ValueError) as error:
        raise MespError(f"The tokenizer in {bundle} cannot be loaded: {error}.") from error
    without = "which generating needs; export a model that has one"
    return load_any_tokenizer(bundle, without, ends)


def encode(
    tokenizer: TokenizerWrapper, prompt: str, chat: bool | None, system: str | None = None
) -> list[int]:
    """Token ids of `prompt`, as mlx_lm.generate makes them.

    With `chat` it is a user's message in the chat template, after a `system` message where there is
    one; None means where there is a template.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # of bytes that the shell, or an escape, made no text of
        raise MespError("The prompt is not UTF-8 text; convert it first.") from error
    if chat and not tokenizer.has_chat_template:
        raise MespError("The bundle's tokenizer has no chat template; leave out --chat.")
    is_chat = chat is not False and tokenizer.has_chat_template
    if system and not is_chat:
        raise MespError("A system prompt is part of a chat template, which is not used here.")
    with plain_errors("The prompt cannot be tokenized"):
        if is_chat:
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": prompt})
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            tokens = tokenizer.encode(text, add_special_tokens=False)
        else:
            tokens = tokenizer.encode(prompt)
    if not tokens:
        raise MespError("The prompt is empty; give at least one word.")
    return tokens
