"""Prompts to the token ids that the engine takes, as mlx_lm.generate makes them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mesp.errors import MespError

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def load_tokenizer(bundle: Path) -> TokenizerWrapper:
    """The bundle's tokenizer, with the tokens that end a text as mlx-lm finds them."""
    if not (bundle / "tokenizer_config.json").is_file():
        raise MespError(
            f"{bundle} has no tokenizer; export it from a model folder that has one to generate."
        )
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from mlx_lm import utils

    try:
        ends = utils.load_config(bundle).get("eos_token_id")
        return utils.load_tokenizer(bundle, eos_token_ids=ends)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise MespError(f"The tokenizer in {bundle} cannot be loaded: {reason}") from error


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
    if chat is not False and tokenizer.has_chat_template:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer.encode(text, add_special_tokens=False)
    elif system:
        raise MespError("A system prompt is part of a chat template, which is not used here.")
    else:
        tokens = tokenizer.encode(prompt)
    if not tokens:
        raise MespError("The prompt is empty; give at least one word.")
    return tokens
