"""Tests that nothing of a record is lost in silence.

Hypothesis generates records of every kind, with columns and keys that nothing reads, nulls, and
parts that a template may leave out. Each string has words of its own, so a test finds it.
"""

import json
import logging
import re
from collections.abc import Iterator
from itertools import count
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from helpers.chat_templates import SPECIAL
from helpers.paths import DEMO_MODEL
from mesp.data.fields import KEYS, NEVER_CONTENT
from mesp.data.load import DataOptions, load
from mesp.data.sources import Selection
from mesp.data.tokenizer import load_tokenizer
from mesp.errors import MespError

# A template that writes all that a conversation can have. ⟦ and ⟧ are the marks of an answer.
TEMPLATE = """\
{%- for t in tools or [] %}{{- t | tojson + '\\n' }}{%- endfor %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}⟦{{- m.content }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + c.function | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}⟧{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# The same, where a tool's result comes within the model's turn, as in Gemma 4's template.
WITHIN = """\
{%- set ns = namespace(open=false) %}
{%- for t in tools or [] %}{{- t | tojson + '\\n' }}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '[' + m.content + ']' }}
{%- else %}
{%- if not (ns.open and m.role == 'assistant') %}{{- '<|im_start|>' + m.role + '\\n' }}{%- endif %}
{%- if m.role == 'assistant' %}⟦{{- m.content }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + c.function | tojson }}{%- endfor %}
{%- set ns.open = m.tool_calls %}
{%- if not m.tool_calls %}{{- '<|im_end|>\\n' }}{%- endif %}⟧
{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- set ns.open = false %}{%- endif %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not ns.open %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
MARKS = {"⟦": "{%- generation %}", "⟧": "{%- endgeneration %}"}
OTHERS = ["context", "persona", "notes", "solution", "Question", "input", "meta_prompt", "history"]
WORD = re.compile(r"Wq\d+z")


def tokenizer_of(template: str, marked: bool) -> Any:
    tokenizer = load_tokenizer(DEMO_MODEL)._tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    for mark, tag in MARKS.items():
        template = template.replace(mark, tag if marked else "")
    tokenizer.chat_template = template
    return TokenizerWrapper(
        tokenizer, eos_token_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")]
    )


MODELS = [(tokenizer_of(each, False), tokenizer_of(each, True)) for each in (TEMPLATE, WITHIN)]


@st.composite
def records(draw: Any) -> dict[str, Any]:
    numbers = count()

    def word() -> str:
        return f"Wq{next(numbers)}z"

    def maybe(chance: int = 4) -> bool:
        return draw(st.integers(1, chance)) == chance

    def value(depth: int = 0) -> Any:
        kinds = ["text", "text", "null", "number", "empty"] + ["list", "object"] * (depth < 2)
        kind = draw(st.sampled_from(kinds))
        simple = {"text": word(), "null": None, "number": 7, "empty": ""}
        if kind in simple:
            return simple[kind]
        inner = [value(depth + 1) for _ in range(draw(st.integers(0, 2)))]
        return inner if kind == "list" else {f"k{i}": each for i, each in enumerate(inner)}

    def extra(into: dict[str, Any]) -> dict[str, Any]:
        while maybe():
            name = draw(st.sampled_from([*OTHERS, *NEVER_CONTENT[::7]]))
            if name not in into:
                into[name] = value()
        return into

    def call() -> dict[str, Any]:
        arguments = {f"a{i}": value() for i in range(draw(st.integers(0, 2)))}
        function = {"name": word(), "arguments": arguments}
        return {"type": "function", "function": function} if maybe(2) else function

    def text() -> str:
        return f"Say {word()}."

    def message(role: str) -> dict[str, Any]:
        content = [{"type": "text", "text": text()}] if maybe(8) else text()
        return extra({"role": role, "content": content})

    def turns() -> list[dict[str, Any]]:
        said = [message("system")] if maybe() else []
        for _ in range(draw(st.integers(1, 2))):
            said.append(message("user"))
            if maybe():
                calls = [call() for _ in range(draw(st.integers(1, 2)))]
                said.append(message("assistant") | {"tool_calls": calls})
                if maybe(2):
                    said[-1]["content"] = draw(st.sampled_from(["", None]))
                said += [message("tool") for _ in calls]
            said.append(message("assistant"))
        return said

    def said(role: str) -> Any:
        return [message(role)] if maybe() else text()

    kind = draw(st.sampled_from(["text", "chat", "completion", "alpaca", "dolly", "pair", "label"]))
    if kind == "text":
        return extra({"text": text()})
    record: dict[str, Any] = {}
    if kind == "chat":
        record = {"messages": turns()}
    elif kind == "alpaca":
        record = {
            "instruction": text(),
            "input": draw(st.sampled_from([None, ""])),
            "output": text(),
        }
        record["input"] = text() if maybe(2) else record["input"]
    elif kind == "dolly":
        record = {"instruction": text(), "context": text(), "response": text()}
    elif kind == "pair":
        asked = draw(st.sampled_from(["prompt", "question"]))
        record = {asked: said("user"), "chosen": said("assistant"), "rejected": said("assistant")}
    else:
        record = {"prompt": said("user"), "completion": said("assistant")}
        record |= {"label": maybe(2)} if kind == "label" else {}
    if maybe():
        tool = {
            "name": word(),
            "description": text(),
            "parameters": {"default": None, "x": value()},
        }
        record["tools"] = [{"type": "function", "function": tool}]
    return extra(record)


def words_by_name(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields each word of a record, with the name of the innermost column or key that has it and
    that a record or a message can have.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            yield from words_by_name(each, name if re.fullmatch(r"[ka]\d", key) else key)
    elif isinstance(value, list):
        for each in value:
            yield from words_by_name(each, name)
    elif isinstance(value, str):
        yield from ((word, name) for word in WORD.findall(value))


def as_messages(role: str, said: Any) -> list[dict[str, Any]]:
    said = [{"role": role, "content": said}] if isinstance(said, str) else said
    found = []
    for each in said:
        content = each["content"] or ""
        content = content if isinstance(content, str) else "".join(p["text"] for p in content)
        found.append({"role": each["role"], "content": content})
        if "tool_calls" in each:
            functions = [call.get("function", call) for call in each["tool_calls"]]
            found[-1]["tool_calls"] = [{"type": "function", "function": f} for f in functions]
    return found


def conversations(record: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Returns the conversations of a record, with an answer each."""
    if "messages" in record:
        return [as_messages("", record["messages"])]
    asked = record.get("prompt", record.get("question", record.get("instruction")))
    given = record.get("input") if "output" in record else record.get("context")
    if "instruction" in record and given:
        asked = f"{asked}\n\n{given}"
    answers = [
        record[k] for k in ("completion", "output", "response", "chosen", "rejected") if k in record
    ]
    return [as_messages("user", asked) + as_messages("assistant", each) for each in answers]


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(record=records(), model=st.sampled_from(MODELS))
def test_every_string_is_read_or_refused_or_never_content(tmp_path_factory, caplog, record, model):
    tokenizer, marked = model
    folder = tmp_path_factory.mktemp("data")
    record = json.loads(json.dumps(record))
    (folder / "train.jsonl").write_text(f"{json.dumps(record)}\n")
    other = record | ({"label": not record["label"]} if "label" in record else {})
    (folder / "valid.jsonl").write_text(f"{json.dumps(other)}\n")
    caplog.clear()
    size = len(tokenizer.get_vocab())

    def loaded(*ignored: str) -> Any:
        options = DataOptions(selection=Selection(ignored=ignored), pack=False)
        with caplog.at_level(logging.WARNING):
            return load(str(folder), tokenizer, 2048, size, options)["train"]

    ignored: tuple[str, ...] = ()
    try:
        split = loaded()
    except MespError as error:
        if "are alike" in error.message or "alone" in error.message:
            return
        assert "which nothing reads" in error.message, error.message
        ignored = tuple(error.message.rpartition("--ignore ")[2].rstrip(".").split(","))
        assert all(f'"{name}"' in error.message and name not in KEYS for name in ignored)
        caplog.clear()
        split = loaded(*ignored)  # one option is enough
    whole = tokenizer.decode(split.tokens)
    for word, name in words_by_name(record):
        if word not in whole:
            assert name in ignored or (name in NEVER_CONTENT and name in caplog.text), (word, name)
    if "text" in record:
        assert whole == record["text"] + tokenizer.eos_token
        return
    expected = [
        marked._tokenizer.apply_chat_template(
            each, tools=record.get("tools"), return_dict=True, return_assistant_tokens_mask=True
        )
        for each in conversations(record)
    ]
    found = [
        (split.tokens[a : a + n].tolist(), split.mask[a : a + n].tolist())
        for a, n in split.examples.tolist()
    ]
    assert found == [(each["input_ids"], each["assistant_masks"]) for each in expected]
