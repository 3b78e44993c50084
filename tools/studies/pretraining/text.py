from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mesp.data import source_files
from mesp.errors import MespError

END_OF_TEXT = "<|endoftext|>"


# Qwen2's pre-tokenization: contractions, words, single digits, punctuation, line ends, spaces.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_text(path: Path) -> str:
    """Returns a text file's text, without control characters other than line ends and tabs, and
    without blank space at both ends but with a final line end.
    """
    text = source_files.read_text(path)
    text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc").strip()
    if not text:
        raise MespError(f"{path} holds no text.")
    return text + "\n"


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise MespError(
            f"The text is too short for {vocab_size} tokens: "
            f"it gives only {tokenizer.get_vocab_size()}."
        )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Returns the token ids [tokens] of all texts, each followed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(texts):
        ids.extend(encoding.ids)
        ids.append(end)
    return np.array(ids, dtype=np.int32)


def shuffled_batches(
    tokens: np.ndarray, batch_size: int, seq_len: int, seed: int
) -> Iterator[mx.array]:
    """Yields endless batches [batch_size, seq_len + 1].

    An epoch cuts the text into windows from a random offset, and shuffles the windows.
    """
    rng = np.random.default_rng(seed)
    window = np.arange(seq_len + 1)
    pending: list[int] = []
    while True:
        while len(pending) < batch_size:
            starts = np.arange(rng.integers(seq_len), len(tokens) - seq_len, seq_len)
            pending.extend(rng.permutation(starts).tolist())
        starts, pending = np.array(pending[:batch_size]), pending[batch_size:]
        yield mx.array(tokens[starts[:, None] + window])
