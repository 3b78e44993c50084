from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mesp.adapters.weighted import WeightedAdapters
from mesp.engine.process import Evaluator, Score, evaluator
from mesp.errors import MespError

AT_ONCE = 8

Encode = Callable[..., list[int]]


class EvaluatedModel:
    """The model sees at most `max_length` tokens at once, so long prompts are cut. `at_once` texts
    are generated together.
    """

    def __init__(
        self, engine: Evaluator, tokenizer: Any, max_length: int, at_once: int = AT_ONCE
    ) -> None:
        self.engine, self.tokenizer, self.max_length = engine, tokenizer, max_length
        self.at_once = at_once
        self.cut = 0

    @property
    def prefix_token(self) -> int:
        """The token to put before a text, so that the text's first token is predicted too."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise MespError("The bundle's tokenizer has no token that begins or ends a text.")

    def encode_pair(
        self, prompt: str, continuation: str, special: bool = True, encode: Encode | None = None
    ) -> tuple[list[int], list[int]]:
        """Returns the token ids of a prompt and of its continuation, as lm-evaluation-harness does.

        White space at the end of the prompt moves to the continuation. The continuation's ids are
        those after the prompt's when both are encoded as one text. An empty prompt becomes
        `prefix_token`.
        """
        kept = prompt.rstrip()
        continuation = prompt[len(kept) :] + continuation
        encode = encode or self.tokenizer.encode
        if not kept:
            return [self.prefix_token], encode(continuation, add_special_tokens=False)
        before = encode(kept, add_special_tokens=special)
        both = encode(kept + continuation, add_special_tokens=special)
        return before, both[len(before) :]

    def scores(self, prompt: list[int], continuations: Sequence[list[int]]) -> list[Score]:
        """Raises MespError if a continuation has no tokens, or more than `max_length`."""
        longest = max(map(len, continuations))
        if not all(continuations):
            raise MespError(
                "a choice becomes one token with the end of the prompt; begin it with a space"
            )
        if longest > self.max_length:
            raise MespError(
                f"a choice has {longest:,} tokens; shorten it, or raise --max-length, which is "
                f"{self.max_length:,}"
            )
        return self.engine.choices(
            self._end_of(prompt, self.max_length + 1 - longest), continuations
        )

    def log_likelihood(self, text: str, encode: Encode | None = None) -> tuple[float, int]:
        """Returns the log-likelihood of a text in nats, and its number of tokens."""
        tokens = (encode or self.tokenizer.encode)(text, add_special_tokens=False)
        if not tokens:
            return 0.0, 0
        return self.engine.text([self.prefix_token, *tokens], self.max_length), len(tokens)

    def divergence(self, text: str, encode: Encode | None = None) -> float:
        """Returns the sum of KL(base ‖ model) over a text's tokens, in nats."""
        tokens = (encode or self.tokenizer.encode)(text, add_special_tokens=False)
        return (
            self.engine.divergence([self.prefix_token, *tokens], self.max_length) if tokens else 0.0
        )

    def write(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        stops: Sequence[str],
        advance: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """Returns the text that greedy decoding gives after each prompt. A text ends before the
        first occurrence of any of `stops`, or after `max_tokens` tokens.

        Raises MespError if `max_tokens` leaves no room for a prompt.
        """
        if max_tokens >= self.max_length:
            raise MespError(
                f"{max_tokens:,} tokens to write leave no room for a prompt; lower --max-tokens, "
                f"or raise --max-length, which is {self.max_length:,}."
            )
        tokens: list[list[int]] = [[] for _ in prompts]

        def go_on(index: int, token: int) -> bool:
            tokens[index].append(token)
            text = self.tokenizer.decode(tokens[index]) if stops else ""
            return not any(stop in text for stop in stops)

        for _ in self.engine.generate(
            [self._end_of(prompt, self.max_length - max_tokens) for prompt in prompts],
            max_tokens,
            sorted(self.tokenizer.eos_token_ids),
            self.at_once,
            go_on,
        ):
            advance()
        return [self._until(stops, self.tokenizer.decode(each)) for each in tokens]

    @staticmethod
    def _until(stops: Sequence[str], text: str) -> str:
        ends = [text.find(stop) for stop in stops if stop in text]
        return text[: min(ends, default=len(text))]

    def _end_of(self, prompt: list[int], length: int) -> list[int]:
        self.cut += len(prompt) > length
        return prompt[-length:]


@contextmanager
def running_model(
    bundle: Path,
    adapters: Sequence[WeightedAdapters],
    tokenizer: Any,
    max_length: int,
    at_once: int = AT_ONCE,
    device: str | None = None,
    images: dict[str, Any] | None = None,
) -> Iterator[EvaluatedModel]:
    with evaluator(bundle, adapters, device, images) as engine:
        yield EvaluatedModel(engine, tokenizer, max_length, at_once)
