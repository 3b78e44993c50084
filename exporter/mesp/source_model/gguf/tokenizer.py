from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from mesp.errors import MespError
from mesp.source_model.gguf.header import GGUF

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_LONGEST, _MOST = 1024, 1 << 20
_MERGED = 1 << 24

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{L}\p{N}]?"
_LLAMA3 = _WORDS + r"\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"\p{L}+|\p{N}" + _REST
_QWEN35 = _WORDS + r"[\p{L}\p{M}]+|\p{N}" + _REST.replace(r"\p{L}\p{N}", r"\p{L}\p{M}\p{N}", 1)
_TEKKEN = f"{_CASED}{_UPPER}*{_LOWER}+|{_CASED}{_UPPER}+{_LOWER}*" + r"|\p{N}" + _REST_WITH_SLASH
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    f"{_CASED}{_UPPER}*{_LOWER}+{_ENDING}|{_CASED}{_UPPER}+{_LOWER}*{_ENDING}"
    + r"|\p{N}{1,3}"
    + _REST_WITH_SLASH
)
# `tokenizer.ggml.pre` -> the pattern that splits a text into words before BPE. None stands for
# GPT-2's pattern. "digits" stands for GPT-2's pattern after single digits are split off.
PRE_TOKENIZERS = {
    "gpt-2": None,
    **dict.fromkeys(("smollm", "refact", "starcoder"), "digits"),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "lfm2", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
# Tokenizers that keep a word whole if it is a token. By default, they also add the begin token.
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "lfm2", "tekken")
_COMPOSED = ("qwen2", "qwen35")

_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>",
    "<|eom_id|>", "<EOT>",
)  # fmt: skip


def write_tokenizer(file: GGUF, folder: Path) -> None:
    """Raises MespError if the tokenizer is invalid, or of an unsupported kind."""
    kind = file.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise MespError(
            f"{file.path} has a tokenizer of kind {kind!r:.40}, which is not supported."
        )
    try:
        tokens, types = _vocabulary(file)
        special = _special_tokens(file, tokens)
        tokenizer = _byte_level(file, tokens) if kind == "gpt2" else _pieces(file, tokens, types)
        _add_tokens(tokenizer, file, tokens, types)
        if template := _template(file, kind, tokens, special):
            tokenizer.post_processor = template
        tokenizer.save(str(folder / "tokenizer.json"))
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise MespError(f"The tokenizer of {file.path} is not valid ({error}).") from error
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": tokens[i] for role, i in special.items() if role in _ROLES},
    }
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    ends = [i for role, i in special.items() if role in ("eos", "eot", "eom")]
    ends += [i for i in np.flatnonzero(types == _CONTROL).tolist() if tokens[i] in _ENDS]
    generation = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")


_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _vocabulary(file: GGUF) -> tuple[list[str], np.ndarray]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= _MOST:
        raise ValueError("it has no list of tokens")
    if not all(isinstance(token, str) and len(token) <= _LONGEST for token in tokens):
        raise ValueError("a token is not text, or too long")
    if len(set(tokens)) != len(tokens):
        raise ValueError("two tokens are the same")
    types = file.metadata.get("tokenizer.ggml.token_type", np.full(len(tokens), _NORMAL))
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise ValueError("tokens and their types differ in number")
    return tokens, types


def _special_tokens(file: GGUF, tokens: list[str]) -> dict[str, int]:
    found = {}
    for role, name in {**_ROLES, "eot": "eot", "eom": "eom"}.items():
        number = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if type(number) is int and 0 <= number < len(tokens):
            found[role] = number
    return found


def _byte_level(file: GGUF, tokens: list[str]) -> Tokenizer:
    name = file.metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise ValueError(f"its pre-tokenizer {name!r:.40} is not supported")
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not all(isinstance(merge, str) for merge in merges):
        raise ValueError("it has no merges")
    vocabulary, pairs = {token: i for i, token in enumerate(tokens)}, []
    for merge in merges:
        cut = merge.find(" ", 1)
        first, second = merge[:cut], merge[cut + 1 :]
        if not {first, second, first + second} <= vocabulary.keys():
            raise ValueError("a merge has a part that is not a token")
        pairs.append((first, second))
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=name in _WHOLE_WORDS))
    pattern = PRE_TOKENIZERS[name]
    steps: list[Any] = []
    if pattern == "digits":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    elif pattern:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    by_gpt2 = pattern in (None, "digits")
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_gpt2))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if name in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pieces(file: GGUF, tokens: list[str], types: np.ndarray) -> Tokenizer:
    """Returns a SentencePiece BPE tokenizer, which first merges the pair whose token has the
    highest score.
    """
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise ValueError("tokens and their scores differ in number")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    normal = {tokens[i]: i for i in np.flatnonzero(types == _NORMAL).tolist()}
    found, merged = array("i"), 0
    for token, i in normal.items():
        for cut in range(1, len(token)):
            left = normal.get(token[:cut])
            if left is not None:
                right = normal.get(token[cut:])
                if right is not None:
                    found.extend((i, left, right))
                    merged += len(token)
        if merged > _MERGED:
            raise ValueError("its tokens can be merged in too many ways")
    order = np.array(found).reshape(-1, 3)
    order = order[np.lexsort((order[:, 2], order[:, 1], -scores[order[:, 0]]))]
    merges = [(tokens[left], tokens[right]) for _, left, right in order.tolist()]
    unknown = [tokens[i] for i in np.flatnonzero(types == _UNKNOWN).tolist()]
    unknown += ["<unk>"] if "<unk>" in vocabulary else [None]
    model = models.BPE(vocabulary, merges, unk_token=unknown[0], fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, file: GGUF, tokens: list[str], types: np.ndarray) -> None:
    # In Phi-3, most added tokens include the white space after them.
    strips = file.metadata.get("general.architecture") == "phi3" and (
        file.metadata.get("tokenizer.ggml.model") == "llama"
    )
    for kind in (_CONTROL, _UNKNOWN, _USER_DEFINED):
        is_special = kind != _USER_DEFINED
        add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
        its = [tokens[i] for i in np.flatnonzero(types == kind).tolist() if tokens[i]]
        keeps = ("<unk>", "<s>", "<|endoftext|>")
        add(
            [
                AddedToken(
                    t, special=is_special, normalized=False, rstrip=strips and t not in keeps
                )
                for t in its
            ]
        )


def _template(file: GGUF, kind: str, tokens: list[str], special: dict[str, int]) -> Any:
    begins = kind == "llama" or file.metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    begins = file.metadata.get("tokenizer.ggml.add_bos_token", begins) and "bos" in special
    ends = file.metadata.get("tokenizer.ggml.add_eos_token", False) and "eos" in special
    if not begins and not ends:
        return None
    around = [special["bos"]] * bool(begins), [special["eos"]] * bool(ends)
    first, last = ([tokens[i] for i in each] for each in around)
    return processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *first, "$B:1", *last],
        special_tokens=[(tokens[i], i) for each in around for i in each],
    )
