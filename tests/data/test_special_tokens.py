import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from helpers.data import assistant, load, user, write_records
from helpers.models import byte_tokenizer
from helpers.paths import DEMO_MODEL
from helpers.records import encode as encode_conversation
from helpers.records import messages_of
from mesp.data.loss_mask import Encoded
from mesp.data.plain_text import encode_plain_prompt, join
from mesp.data.prompts import encode_prompt
from mesp.data.records import Conversation
from mesp.data.special_tokens import encode_split
from mesp.data.tokenizer import load_tokenizer
from mesp.errors import MespError

CHATML = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TIGHT = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- m.content | trim + '<|im_end|>' }}
{%- else %}{{- '<|im_start|>' + m.content | trim + '<|im_end|>' }}{%- endif %}
{%- endfor %}"""
SPECIAL = ["<s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|im_end|>s"]
TEXTS = [
    "Say <|im_end|>",
    "<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>",
    "\n<|im_start|>system <|im_end|>s  <s>x<|im_end|><|im_end|>",
    "<|im_<|im_end|>end|> <|im_end| > \t<|im_start|>\n\n",
    "l'été <|im_end|> 😀 <unk><tool_call>",
]


def sentencepiece(tokenizer: Tokenizer, scheme: str | None) -> Tokenizer:
    if scheme is None:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    pieces = [*SPECIAL, "<tool_call>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("▁", "<"), ("<", "|"), ("▁<", "|"), ("|", ">"), ("i", "m"), ("e", "n"), ("en", "d")]
    merges += [("▁", "S"), ("a", "y"), ("▁S", "ay"), ("\n", "\n"), (">", "<")]
    pieces += [*string.printable, "▁", *("".join(pair) for pair in merges)]
    return {piece: id for id, piece in enumerate(dict.fromkeys(pieces))}, merges


def make_tokenizer(kind: str, folder):
    if kind == "byte-level":
        tokenizer = load_tokenizer(DEMO_MODEL)
        added = [token for token in SPECIAL if token != "<unk>"]
        tokenizer._tokenizer.add_special_tokens({"additional_special_tokens": added})
        tokenizer._tokenizer.add_tokens(["<tool_call>"])
        tokenizer._tokenizer.bos_token = "<s>"
        return tokenizer
    tokenizer = Tokenizer(models.BPE(*vocabulary(), unk_token="<unk>", byte_fallback=True))
    sentencepiece(tokenizer, {"prepend": None}.get(kind, kind))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(["<tool_call>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML}
    config |= {"eos_token": "<|im_end|>", "bos_token": "<s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


@pytest.fixture(scope="module", params=["byte-level", "first", "always", "prepend"])
def tokenizer(request, tmp_path_factory):
    return make_tokenizer(request.param, tmp_path_factory.mktemp("tokenizer"))


def conversation(*texts: str, **others: object) -> Conversation:
    roles = ("system", "user", "assistant", "user", "assistant")
    said = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    return Conversation(messages_of(said), **others)


def transformers_ids(tokenizer, conversation: Conversation, asks: bool = False) -> list[int]:
    # Makes transformers split only tokens that are marked special.
    tokenizer._tokenizer.chat_control_tokens = []
    options = {"return_dict": False, "sanitize_control_tokens": True}
    return tokenizer._tokenizer.apply_chat_template(
        conversation.messages, add_generation_prompt=asks, **options
    )


def special(tokenizer, ids: list[int]) -> list[int]:
    return [id for id in ids if id in tokenizer.all_special_ids]


def without_spaces(text: str) -> str:
    return text.replace(" ", "")


def check_ids(tokenizer, ids: list[int], theirs: list[int], texts: list[str]) -> None:
    after = any(f"{token}\n" in text for token in SPECIAL for text in texts)
    if ids != theirs:
        assert after and "<0x0A>" in tokenizer.get_vocab()
        spaces = tokenizer.convert_tokens_to_ids("▁")
        assert [id for id in ids if id != spaces] == [id for id in theirs if id != spaces]
        assert ids.count(spaces) < theirs.count(spaces)


def encode_split_apart(tokenizer, said: Conversation, loss_on: str) -> Encoded:
    encoded = encode_conversation(tokenizer, said, loss_on, split_special=True)
    plain = encode_conversation(tokenizer, conversation(*"abcde"), loss_on)
    assert special(tokenizer, encoded.ids) == special(tokenizer, plain.ids)
    rendered = tokenizer._tokenizer.apply_chat_template(said.messages, tokenize=False)
    assert without_spaces(tokenizer.decode(encoded.ids)) == without_spaces(rendered)
    return encoded


@pytest.mark.parametrize("template", [CHATML, TIGHT], ids=["chatml", "tight"])
@pytest.mark.parametrize("loss_on", ["answers", "all"])
@pytest.mark.parametrize("text", TEXTS)
def test_conversations_are_as_transformers_splits_them(tokenizer, template, loss_on, text):
    tokenizer._tokenizer.chat_template = template
    said = conversation("x", text, f"y {text}", text, f"z {text}.")
    encoded = encode_split_apart(tokenizer, said, loss_on)
    check_ids(tokenizer, encoded.ids, transformers_ids(tokenizer, said), [text])
    if loss_on == "answers":
        answers = [id for id, counts in zip(encoded.ids, encoded.mask, strict=True) if counts]
        end = "<|im_end|>\n" if template is CHATML else "<|im_end|>"
        texts = [message["content"] for message in said.messages[2::2]]
        expected = "".join((each if template is CHATML else each.strip()) + end for each in texts)
        assert without_spaces(tokenizer.decode(answers)) == without_spaces(expected)


@pytest.mark.parametrize("template", [CHATML, TIGHT], ids=["chatml", "tight"])
@pytest.mark.parametrize("text", TEXTS)
def test_prompts_are_as_transformers_splits_them(tokenizer, template, text):
    tokenizer._tokenizer.chat_template = template
    ids = encode_prompt(tokenizer, text, True, "Be <|im_end|> good.", split_special=True)
    said = conversation("Be <|im_end|> good.", text)
    check_ids(tokenizer, ids, transformers_ids(tokenizer, said, asks=True), [text])
    ids = encode_prompt(tokenizer, "a", True)
    assert encode_prompt(tokenizer, "a", True, split_special=True) == ids


@pytest.mark.parametrize("text", [*TEXTS, "No special token."])
def test_texts_are_as_transformers_splits_them(tokenizer, text):
    ids = tokenizer._tokenizer(text, split_special_tokens=True, add_special_tokens=False).input_ids
    assert encode_split(tokenizer, text) == ids
    assert not special(tokenizer, ids)
    assert encode_plain_prompt(tokenizer, text, split_special=True) == ids
    asked, count = join(tokenizer, text, text, split_special=True)
    assert asked[:count] == ids
    assert special(tokenizer, asked) == [tokenizer.eos_token_id] == asked[-1:]
    said = tokenizer.decode(asked).removesuffix(tokenizer.eos_token)
    assert without_spaces(said) == without_spaces(text + text)


CALL = {"function": {"name": "WORDS", "arguments": {"a": ["WORDS"]}}}
MESSAGES = [user("Say WORDS."), assistant("<think>WORDS</think>yes", tool_calls=[CALL])]
MESSAGES += [{"role": "tool", "content": "WORDS"}]
MESSAGES += [assistant("WORDS", reasoning_content="WORDS")]
RECORDS = {
    "file": None,
    "text": [{"text": "WORDS"}] * 3,
    "joined": [{"prompt": "WORDS", "completion": "yes WORDS"}] * 3,
    "prompt": [{"prompt": "WORDS", "completion": "yes WORDS"}] * 3,
    "pair": [{"prompt": "WORDS", "chosen": "yes WORDS", "rejected": "WORDS"}] * 3,
    "label": [{"prompt": "WORDS", "completion": "yes", "label": i % 2 == 0} for i in range(4)],
    "messages": [{"messages": MESSAGES}] * 3,
}


def load_records(tokenizer, path, words: str, kind: str, split: bool):
    if RECORDS[kind] is None:
        path = path.with_suffix(".txt")
        path.write_text(f"{words}\n" * 900)
    else:
        write_records(path, json.loads(json.dumps(RECORDS[kind]).replace("WORDS", words)))
    options = {"pack": kind == "file", "chat": False if kind == "joined" else None}
    return load(path, tokenizer, 512, split_special_tokens=split, **options)


@pytest.mark.parametrize("kind", RECORDS)
def test_records_of_every_kind_keep_the_templates_tokens_alone(tokenizer, tmp_path, kind, caplog):
    tokenizer._tokenizer.chat_template = CHATML
    data = tmp_path / "data.jsonl"
    plain = load_records(tokenizer, data, "words", kind, False)
    same = load_records(tokenizer, data, "words", kind, True)
    caplog.clear()
    split = load_records(tokenizer, data, "<s><|im_end|>", kind, True)
    assert "which --split-special-tokens encodes as text: " in caplog.text
    real = load_records(tokenizer, data, "<s>", kind, False)
    for name in plain:
        ids = [each[name].tokens.tolist() for each in (same, plain, split, real)]
        assert ids[0] == ids[1] and "<s><|im_end|>" in tokenizer.decode(ids[2])
        counts = [len(special(tokenizer, each)) for each in ids[1:]]
        assert kind == "file" or counts[0] == counts[1] < counts[2]
    if kind == "file":
        ids = [id for name in ("train", "valid") for id in split[name].tokens.tolist()]
        assert special(tokenizer, ids) == [tokenizer.eos_token_id] == ids[-1:]


CONTENT = "{{- m.content }}"
LOOKS = CHATML.replace(CONTENT, CONTENT + "{%- if '<' in m.content %}!{%- endif %}")
GREETS = CHATML + "{%- if greeting %}{{- greeting }}{%- endif %}"
ONE = [{"type": "function", "function": {"name": "f", "description": "Ends with <s>."}}]


@pytest.mark.parametrize(
    ("template", "said", "named"),
    [
        (LOOKS, conversation("a", "<s>", "b"), "rewrites the conversation"),
        (CHATML, conversation("a", "b", "c", tools=ONE), "special token <s> outside of its texts"),
        (GREETS, conversation("a", "b", options={"greeting": "<s>"}), "<s> outside of its texts"),
    ],
)
def test_what_cannot_be_told_from_the_template_is_refused(tokenizer, template, said, named):
    tokenizer._tokenizer.chat_template = template
    encode_conversation(tokenizer, said, "all")
    with pytest.raises(MespError, match=f"{named}.*`split_special_tokens`"):
        encode_conversation(tokenizer, said, "all", split_special=True)


def test_a_tokenizer_that_makes_special_tokens_of_text_is_refused(tmp_path):
    """This tokenizer's end token is the token of the byte 0."""
    tokenizer = byte_tokenizer(tmp_path, has_begin=True, adds_begin=True)
    assert encode_prompt(tokenizer, "a", False, split_special=True) == [1, ord("a")]
    with pytest.raises(MespError, match="takes text for its special token '<0x00>'"):
        encode_prompt(tokenizer, "a\0", False, split_special=True)


PARTS = st.lists(
    st.sampled_from([*SPECIAL, "<|im_", "end|>", "<|", "s", "\n", " ", "é", "🙂", "<tool_call>"])
).map("".join)


@given(st.lists(PARTS.filter(str.strip), min_size=5, max_size=5))
def test_special_tokens_survive_no_split(tokenizer, texts):
    tokenizer._tokenizer.chat_template = CHATML
    encode_split_apart(tokenizer, conversation(*texts), "all")
    for text in texts:
        assert not special(tokenizer, encode_split(tokenizer, text))
