from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mesp.data.loss_mask import Encoded
from mesp.data.special_tokens import special_pattern

SPLIT = "--split-special-tokens"
LOSS_ON = ("answers", "last", "all")


@dataclass(frozen=True)
class Encoder:
    """How records are encoded.

    `loss_on` is ``answers``, ``last`` (the last message) or ``all``. `chat` says whether prompts
    and answers go through the chat template or are joined; None: they go through it if there is
    one. With `split_special`, special tokens in texts are encoded as ordinary text. `options` are
    arguments of the chat template for records that have none.
    """

    tokenizer: Any
    loss_on: str = "answers"
    chat: bool | None = None
    split_special: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return bool(self.tokenizer.has_chat_template) if self.chat is None else self.chat

    def noted(self, encoded: Encoded, *texts: str) -> Encoded:
        within, are_read = [*texts], f"{SPLIT} encodes as text"
        if not self.split_special:
            are_read = f"the model reads as such without {SPLIT}"
            begin, end = self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""
            within = [text.strip().removeprefix(begin).removesuffix(end) for text in texts]
        if not any(map(special_pattern(self.tokenizer).search, within)):
            return encoded
        note = f"Records with control tokens in their text, which {are_read}"
        return replace(encoded, notes=(*encoded.notes, note))
