"""Hypothesis generates records of every kind, with columns and keys that nothing reads, nulls, and
parts that a template may leave out. Each string has words of its own, so a test finds it.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count, groupby
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from helpers.chat_templates import SPECIAL
from helpers.commands import call
from helpers.conversations import as_messages
from helpers.data import assistant, examples_of, load, load_records, user
from helpers.federations import federation
from helpers.paths import DEMO_MODEL
from mesp.data.fields import KEYS, NEVER_CONTENT
from mesp.data.load import load_additional
from mesp.data.sources import Selection
from mesp.data.tokenizer import load_tokenizer
from mesp.engine.generate import TextStream
from mesp.errors import MespError
from mesp.evaluation import evaluate as evaluation
from mesp.evaluation.evaluated_model import EvaluatedModel

TEMPLATE = """\
{%- for t in tools or [] %}{{- t | tojson + '\\n' }}{%- endfor %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}⟦{{- m.content }}
{%- for c in m.tool_calls or [] %}{{- '<tool_call>' + c.function | tojson }}{%- endfor %}
{{- '<|im_end|>\\n' }}⟧{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
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
        if maybe():
            function = {"arguments": arguments, "name": function["name"]}
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
        given = text() if maybe(2) else draw(st.sampled_from([None, ""]))
        record = {"instruction": text(), "input": given, "output": text()}
    elif kind == "dolly":
        record = {"instruction": text(), "context": text(), "response": text()}
    elif kind == "pair":
        asked = draw(st.sampled_from(["prompt", "question"]))
        record = {asked: said("user"), "chosen": said("assistant"), "rejected": said("assistant")}
    else:
        record = {"prompt": said("user"), "completion": said("assistant")}
        record |= {"label": maybe(2)} if kind == "label" else {}
    if maybe():
        tool = {"name": word(), "description": text()}
        tool |= {"parameters": {"default": None, "x": value()}}
        record["tools"] = [{"type": "function", "function": tool}]
    return extra(record)


def words_by_name(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from words_by_name(each, name if re.fullmatch(r"[ka]\d", key) else key)
    elif isinstance(value, list):
        for each in value:
            yield from words_by_name(each, name)
    elif isinstance(value, str):
        yield from ((word, name) for word in WORD.findall(value))


def conversations(record: dict[str, Any]) -> list[list[dict[str, Any]]]:
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
    # Labels must differ.
    each_label = [{"label": label} for label in (True, False)] if "label" in record else [{}]
    both = [record | label for label in each_label]
    caplog.clear()

    def loaded(*ignored: str) -> Any:
        options = {"pack": False, "hold_out": 0, "selection": Selection(ignored=ignored)}
        with caplog.at_level(logging.WARNING):
            return load_records(folder, both, tokenizer, 2048, **options)["train"]

    ignored: tuple[str, ...] = ()
    try:
        split = loaded()
    except MespError as error:
        assert "which nothing reads" in error.message, error.message
        ignored = tuple(error.message.rpartition("--ignore ")[2].rstrip(".").split(","))
        assert all(f'"{name}"' in error.message and name not in KEYS for name in ignored)
        caplog.clear()
        split = loaded(*ignored)
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
        for each in conversations(record) * len(both)
    ]
    assert examples_of(split) == [(each["input_ids"], each["assistant_masks"]) for each in expected]


CHAT, CHAT_MARKED = MODELS[0]


def shown(split: Any, tokenizer: Any) -> list[str]:
    found = []
    for ids, mask in examples_of(split):
        parts = groupby(zip(ids, mask, strict=True), lambda pair: pair[1])
        texts = [(tokenizer.decode([id for id, _ in part]), counts) for counts, part in parts]
        found.append("".join(f"⟦{text}⟧" if counts else text for text, counts in texts))
    return found


def read(tmp_path: Path, records: list[dict], tokenizer: Any = CHAT, **options: Any) -> list[str]:
    splits = load_records(tmp_path, records, tokenizer, **{"hold_out": 0, **options})
    return shown(splits["train"], tokenizer)


ALPACA = {"instruction": "A.", "input": "b", "output": "c"}
AS_COMPLETIONS = {"columns": {"prompt": "instruction", "completion": "output"}}
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n⟦{}<|im_end|>\n⟧"


@pytest.mark.parametrize(
    ("record", "asked", "answers"),
    [
        ({"question": "A?", "chosen": "b c", "rejected": "b d"}, "A?", ["b c", "b d"]),
        (ALPACA, "A.\n\nb", ["c"]),
        (ALPACA | {"input": " "}, "A.", ["c"]),
        ({"instruction": "A.", "output": "c", "id": 1}, "A.", ["c"]),
        (ALPACA | {"text": "Do: A.\nAnd: b\nSay: c"}, "A.\n\nb", ["c"]),
        ({"instruction": "A.", "context": "b", "response": "c"}, "A.\n\nb", ["c"]),
    ],
)
def test_public_forms_are_read_by_their_columns(tmp_path, record, asked, answers):
    assert read(tmp_path, [record]) == [ASKED.format(asked, answer) for answer in answers]


MOODY = {"messages": [user("a", mood="x"), assistant("b")]}


@pytest.mark.parametrize(
    ("record", "options", "named"),
    [
        ({"prompt": "a", "context": "b", "completion": "c"}, {}, "context"),
        (ALPACA, AS_COMPLETIONS, "input"),
        (MOODY | {"system": "y", "plan": 3}, {}, "system,plan,mood"),
        ({"text": "a", "label": "b"}, {}, "label"),
        (ALPACA | {"text": "A. c"}, {}, "text"),
    ],
)
def test_all_that_nothing_reads_is_refused_in_one_sentence(tmp_path, record, options, named):
    with pytest.raises(MespError, match=f"Line 1 of .* has .*ignore` {named}\\.$"):
        read(tmp_path, [record], selection=Selection(**options))
    ignored = tuple(named.split(","))
    assert read(tmp_path, [record], selection=Selection(ignored=ignored, **options), pack=False)


def test_columns_of_later_records_are_named_too(tmp_path):
    records = [{"prompt": "a", "completion": "b", **more} for more in ({"x": 1}, {"y": 2})]
    with pytest.raises(MespError, match=r'Line 1 of .* and records after it have "x" and "y"'):
        read(tmp_path, records)


def test_only_the_models_own_turns_are_in_the_loss(tmp_path, caplog):
    whole = [user("a"), assistant("b")]
    call = assistant("", tool_calls=[{"name": "f", "arguments": {}}])
    others = [[*whole, user("c")], [user("a"), call, {"role": "tool", "content": "d"}]]
    records = [{"messages": each} for each in (whole, *others)]
    assert read(tmp_path, records, loss_on="last") == [ASKED.format("a", "b")]
    assert "Records that do not end with an answer to train were left out: 2." in caplog.text
    with pytest.raises(MespError, match=r"No record of the train data .* ends with an answer"):
        read(tmp_path, records[1:], loss_on="last")


def test_a_dialogue_in_a_text_is_asked_up_to_its_last_answer(tmp_path):
    begins = "\n\nHuman: Hi.\n\nAssistant: Yes?\n\nHuman: Nice.\n\nAssistant:"
    pair = {"chosen": f"{begins} Glad you ask.", "rejected": f"{begins} Go away."}
    found = read(tmp_path, [pair])
    assert found == [f"{begins}⟦{pair[key][len(begins) :]}<|endoftext|>⟧" for key in pair]
    pair["rejected"] = pair["rejected"].replace("Nice", "So what")
    with pytest.raises(MespError, match=r"dialogues that differ .* as lists of messages"):
        read(tmp_path, [pair])


def test_nulls_are_kept_as_in_json_and_left_out_as_in_a_table(tmp_path):
    arguments = {"zone": None, "l": [1, None], "o": {"a": None}}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
    messages = [user("a"), assistant("", tool_calls=[call]), assistant("b")]
    (found,) = read(tmp_path, [{"messages": messages, "tools": tools}])
    assert found.replace("⟦", "").replace("⟧", "") == CHAT._tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False
    )
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": messages}]), path)
    table = load(path, CHAT, hold_out=0)["train"]
    assert '"arguments": {"l": [1, null], "o": {}}' in shown(table, CHAT)[0]


def test_template_options_are_remembered(tmp_path, caplog):
    template = CHAT.chat_template.replace("m.content", "m.content + (mood or '')")
    tokenizer = tokenizer_of(template, False)
    records = [
        {"prompt": "a", "completion": "b", "chat_template_kwargs": {"mood": mood}}
        for mood in ("!", "!", "?")
    ]
    for each, encoding in (
        (records[:2], {"chat_template_kwargs": {"mood": "!"}}),
        (records, {}),
        ([{"prompt": "a", "completion": "b"}], {}),
    ):
        read(tmp_path, each, tokenizer)
        split = load(tmp_path / "data.jsonl", tokenizer, hold_out=0)["train"]
        assert split.encoding == encoding
    assert 'Records differ in "chat_template_kwargs"' in caplog.text
    (plain,) = read(tmp_path, [{"prompt": "a", "completion": "b"}], tokenizer)
    loud = {"chat_template_kwargs": {"mood": "!"}}
    (kept,) = read(tmp_path, [{"prompt": "a", "completion": "b"}], tokenizer, **loud)
    assert "a!" in kept and "a!" not in plain


def test_no_option_of_the_template_is_set_that_nobody_gives(tmp_path):
    template = "{{- 'ON' if enable_thinking is defined }}" + CHAT.chat_template + "<think></think>"
    (found,) = read(tmp_path, [{"prompt": "a", "completion": "b"}], tokenizer_of(template, False))
    assert found.startswith("<|im_start|>user")


def test_a_system_message_that_the_template_drops_goes_to_the_user(tmp_path):
    template = CHAT.chat_template.replace("in messages", "in messages if m.role != 'system'")
    tokenizer = tokenizer_of(template, False)
    messages = [{"role": "system", "content": "s"}, user("a"), assistant("b")]
    with pytest.raises(MespError, match="write it at the beginning of the user's message"):
        read(tmp_path, [{"messages": messages}], tokenizer)


def test_labels_that_are_held_out_are_said_to_be(tmp_path):
    good, bad = ({"prompt": "a", "completion": "b", "label": label} for label in (True, False))
    with pytest.raises(MespError, match="good answers alone, because its bad ones are held out"):
        read(tmp_path, [*[good] * 9, bad], hold_out=0.1)
    with pytest.raises(MespError, match=r"All labels of .* are alike"):
        read(tmp_path, [good] * 10, hold_out=0.1)


def test_line_ends_of_a_files_own_text_are_line_feeds(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'prompt,completion\r\n"a\r\nb",c\r\n,\r\n')
    (tmp_path / "a.jsonl").write_text('{"prompt": "a\\r\\nb", "completion": "c"}')
    for name, asked in (("a.csv", "a\nb"), ("a.jsonl", "a\r\nb")):
        split = load(tmp_path / name, CHAT, hold_out=0)["train"]
        assert shown(split, CHAT) == [ASKED.format(asked, "c")]


def test_what_systems_put_into_folders_is_no_data(tmp_path):
    (tmp_path / "Thumbs.db").write_bytes(b"\xd0\xcf")
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 2)
    assert load(tmp_path, CHAT)


@pytest.mark.parametrize("has_splits", [False, True])
def test_a_folder_of_save_to_disk_is_read(tmp_path, has_splits):
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"a{i}", "completion": "b", "tools": None} for i in range(3)]
    made = datasets.Dataset.from_list(rows)
    made = datasets.DatasetDict(train=made, validation=made) if has_splits else made
    made.save_to_disk(str(tmp_path / "saved"))
    splits = load(tmp_path / "saved", CHAT, hold_out=0)
    assert [*splits] == ["train", "valid"][: 1 + has_splits]
    assert shown(splits["train"], CHAT) == [ASKED.format(f"a{i}", "b") for i in range(3)]
    state = next((tmp_path / "saved").rglob("state.json"))
    state.write_text(state.read_text().replace('"data-', '"../../data-'))
    with pytest.raises(MespError, match="names a file outside of it"):
        load(tmp_path / "saved", CHAT)


def test_ordinary_thoughts_are_no_control_tokens(tmp_path, caplog):
    tokenizer = tokenizer_of(TEMPLATE, False)
    tokenizer._tokenizer.add_special_tokens(
        {"additional_special_tokens": [*SPECIAL, "<think>", "</think>"]}
    )
    read(tmp_path, [{"prompt": "a", "completion": "<think>\nb\n</think>\n\nc"}], tokenizer)
    assert "control tokens" not in caplog.text


def test_empty_keys_say_nothing(tmp_path):
    answer = assistant("b", annotations=[], refusal=None, audio=None)
    assert read(tmp_path, [{"messages": [user("a"), answer]}]) == [ASKED.format("a", "b")]


def test_prompts_are_encoded_as_the_bundles_data(tmp_path, caplog, monkeypatch):
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    mood = "{{- mood or 'calm' }}: "
    (model / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": mood + TEMPLATE.replace("⟦", "").replace("⟧", "")})
    )
    path = tmp_path / "data.jsonl"
    record = {"prompt": "a", "completion": "b", "chat_template_kwargs": {"mood": "loud"}}
    path.write_text(f"{json.dumps(record)}\n" * 3)
    bundle = tmp_path / "bundle.mesp"
    call("export", "--model", model, "--data", path, "--seq-len", 64, "--out", bundle)
    encoding = json.loads((bundle / "manifest.json").read_text())["encoding"]
    assert encoding == {"chat_template_kwargs": {"mood": "loud"}}
    tokenizer = load_tokenizer(bundle)

    def expected(**options: str) -> int:
        asked = tokenizer._tokenizer.apply_chat_template(
            [user("Hi")], tokenize=False, add_generation_prompt=True, **options
        )
        return len(tokenizer.encode(asked, add_special_tokens=False))

    other = "very quiet indeed"
    caplog.clear()
    counts = {expected(mood="loud"), expected(mood=other), expected()}
    assert len(counts) > 1
    assert TextStream(bundle, "Hi").prompt_tokens == expected(mood="loud")
    assert not caplog.messages
    stream = TextStream(bundle, "Hi", chat_template_kwargs={"mood": other})
    assert stream.prompt_tokens == expected(mood=other)
    assert 'has the chat_template_kwargs {"mood": "loud"}, and the prompts' in caplog.text

    written, tasks = Mock(return_value=["b"]), Mock()
    model = EvaluatedModel(Mock(), tokenizer, 64)
    monkeypatch.setattr(model, "write", written)
    monkeypatch.setattr(evaluation, "running_model", lambda *_: nullcontext(model))
    monkeypatch.setattr("mesp.evaluation.harness", tasks, raising=False)
    tasks.run.return_value = ([], [])
    path.write_text(json.dumps({"prompt": "Hi", "completion": "b"}) + "\n")
    for how, mood in (({}, "loud"), ({"chat_template_kwargs": {"mood": other}}, other)):
        evaluation.evaluate(bundle, path, **how)
        assert [len(each) for each in written.call_args.args[0]] == [expected(mood=mood)]
        evaluation.evaluate(bundle, tasks=Mock(), **how)
        assert tasks.run.call_args.kwargs["kwargs"] == {"mood": mood}

    path.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    more = load_additional(str(path), tokenizer, 64, len(tokenizer.get_vocab()), encoding)
    assert tokenizer.decode(more.tokens).startswith("loud:")
    path.write_text((json.dumps({"prompt": "a", "completion": "b"}) + "\n") * 20)
    made = federation(bundle, path, tmp_path / "federation", "--clients", 2, "--rounds", 1)
    for folder in (made.held_out, *(made.client(number).data for number in range(2))):
        tokens = next(f for f in (folder / "data").iterdir() if f.name.count(".") == 1)
        assert tokenizer.decode(np.fromfile(tokens, np.uint32)).startswith("loud:")
