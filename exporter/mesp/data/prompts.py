from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mesp.data.chat_template import Rendering
from mesp.data.fields import OPTIONS, refuse_unread
from mesp.data.image_encoder import ImageEncoder
from mesp.data.images import IMAGE, Image
from mesp.data.messages import check_options
from mesp.data.plain_text import encode_plain_prompt
from mesp.data.records import Conversation
from mesp.errors import MespError, plain_errors

log = logging.getLogger(__name__)


def as_trained(encoding: Mapping[str, Any], is_trained: bool, **given: Any) -> dict[str, Any]:
    check_options("--chat-template-kwargs has options", given.get(OPTIONS))
    asked = {key: value for key, value in given.items() if value is not None}
    trained = {OPTIONS: {}, **encoding}
    for key in asked.keys() & trained.keys():
        if is_trained and asked[key] != trained[key]:
            log.warning(
                "The bundle's data has the %s %s, and the prompts have %s.",
                key, json.dumps(trained[key]), json.dumps(asked[key]),
            )  # fmt: skip
    return {**given, **encoding, **asked}


def encode_prompt(
    tokenizer: Any,
    prompt: str,
    chat: bool | None,
    system: str | None = None,
    split_special: bool = False,
    options: Mapping[str, Any] | None = None,
    images: Sequence[Image] = (),
    encoder: ImageEncoder | None = None,
) -> list[int]:
    """Returns the token ids of `prompt`, for generation.

    With `chat`, the prompt becomes a user's message in the chat template. If `chat` is None, the
    template is used if there is one. With `split_special`, special tokens in `prompt` and `system`
    are encoded as ordinary text. `images` come before the prompt.
    """
    try:
        prompt.encode()
    # Bytes from the shell or escapes in JSON may be invalid text.
    except UnicodeEncodeError as error:
        raise MespError("The prompt is not UTF-8 text; convert it first.") from error
    if chat and not tokenizer.has_chat_template:
        raise MespError("The bundle's tokenizer has no chat template; leave out --chat.")
    is_chat = chat is not False and tokenizer.has_chat_template
    if images and not is_chat:
        raise MespError("Images are part of a chat template, which is not used here.")
    if system and not is_chat:
        raise MespError("A system prompt is part of a chat template, which is not used here.")
    with plain_errors("The prompt cannot be tokenized"):
        if is_chat:
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": IMAGE * len(images) + prompt})
            try:
                conversation = Conversation(messages, options=options or {}, images=(*images,))
                tokens = encode_in_template(tokenizer, conversation, split_special, encoder)
            except MespError as error:
                raise MespError(f"The prompt cannot be tokenized: {error.message}") from error
        else:
            tokens = encode_plain_prompt(tokenizer, prompt, split_special)
    if not tokens:
        raise MespError("The prompt is empty; give at least one word.")
    return tokens


def encode_in_template(
    tokenizer: Any, conversation: Conversation, split_special: bool = False,
    encoder: ImageEncoder | None = None,
) -> list[int]:  # fmt: skip
    rendering = render_checked(tokenizer, conversation, split_special)
    ids = rendering.encode(len(conversation.messages), asks=True)
    if not conversation.images:
        return ids
    if encoder is None:
        raise MespError("it has images, which this cannot take.")
    return encoder.prompt(ids, conversation.images)


def render_checked(tokenizer: Any, conversation: Conversation, split_special: bool) -> Rendering:
    """Raises MespError if there is no template, if the template refuses the conversation, or if
    `Rendering.check` finds that it leaves something out.
    """
    if not tokenizer.has_chat_template:
        raise MespError("the bundle's tokenizer has no chat template; give prompts without --chat")
    with plain_errors("the chat template refuses the messages"):
        rendering = Rendering(tokenizer, conversation, split_special)
        _, unread = rendering.check()
        refuse_unread([("it", unread)])
        rendering.render(conversation.messages, asks=True)
    return rendering
