"""Each template has one variant with TRL's `{% generation %}` marks, and one without them. The
marks give the expected answers. Without the marks, MeSP must find the same answers.
"""

from itertools import compress, pairwise, product

import pytest
from transformers import AddedToken

from helpers.chat_templates import CHATML, LLAMA, PHI, QWEN, QWEN3, SPECIAL, TEMPLATES, unmarked
from helpers.data import assistant, user
from helpers.paths import DEMO_MODEL
from helpers.records import encode as encode_conversation
from helpers.records import messages_of
from mesp.data.fields import Fields
from mesp.data.plain_text import join
from mesp.data.records import Conversation, read_record
from mesp.data.tokenizer import load_tokenizer
from mesp.errors import MespError

TOOLS = [{"type": "function", "function": {"name": "capital", "parameters": {"type": "object"}}}]
CALL = [{"type": "function", "function": {"name": "capital", "arguments": {"of": "France"}}}]


def tool(content: str) -> dict:
    return {"role": "tool", "content": content}


def turn(asked: str, answer: str) -> list[dict]:
    return [user(asked), assistant(answer)]


SYSTEM = {"role": "system", "content": "Be."}
CONVERSATIONS = {
    "one": [user("Hi."), assistant("Hello.\n\nWhat is it?\n")],
    "several": [*turn("a", "b b"), *turn("c", " d\n"), *turn("e", "f")],
    "same": turn("a", "a") * 2,
    "user ends": [*turn("a", "b"), user("c")],
    "system": [SYSTEM, *turn("a", "b")],
    "first": [assistant("Yes?"), *turn("a", "b"), *turn("c", "d")],
    "in a row": [*turn("a", "b"), assistant("c"), *turn("d", "e")],
    "thoughts": [
        *turn("a", "<think>\nhm\n</think>\n\nb"),
        *turn("c", "<think>\nso\n</think>\n\nd"),
    ],
    "tools": [
        *(user("a"), assistant("", tool_calls=CALL), tool("Paris"), assistant("Paris.")),
        *turn("b", "c"),
    ],
    "thoughts and tools": [
        *(user("a"), assistant("<think>\nhm\n</think>\n\n", tool_calls=CALL * 2)),
        *(tool("Paris"), tool("Rome"), assistant("Paris."), *turn("b", "c")),
    ],
}
SAID = [*turn("a", "b"), *turn("c", "d")]
WITH_TOOLS = {"qwen2.5", "qwen3", "llama"}
TAKES_ANY_ORDER = {"smollm", "qwen2.5", "qwen3", "llama", "phi"}


def takes(template: str, name: str) -> bool:
    if name == "thoughts and tools" and template == "llama":
        return False  # Llama's template writes only the first call of a message
    if "tools" in name:
        return template in WITH_TOOLS
    return template in TAKES_ANY_ORDER or name not in ("system", "first", "in a row")


CASES = [each for each in product(TEMPLATES, CONVERSATIONS) if takes(*each)]


def marked(template: str) -> str:
    return template.replace("⟦", "{%- generation %}").replace("⟧", "{%- endgeneration %}")


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = load_tokenizer(DEMO_MODEL)
    tokenizer._tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer._tokenizer.bos_token = "<|endoftext|>"
    return tokenizer


def encode(tokenizer, template: str, name: str, **options: bool) -> tuple[list[int], list[bool]]:
    tokenizer._tokenizer.chat_template = template
    tools = TOOLS if "tools" in name else None
    conversation = Conversation(messages_of(CONVERSATIONS[name]), tools=tools)
    found = encode_conversation(tokenizer, conversation, "answers", **options)
    return found.ids, found.mask.tolist()


@pytest.mark.parametrize(("template", "name"), CASES)
def test_answers_are_those_that_trl_takes(tokenizer, template, name):
    expected = encode(tokenizer, marked(TEMPLATES[template]), name)
    found = encode(tokenizer, unmarked(TEMPLATES[template]), name)
    assert any(found[1]) and not all(found[1])
    assert found == expected
    assert encode(tokenizer, unmarked(TEMPLATES[template]), name, split_special=True) == found


CALLED = '<tool_call>\n{"name": "capital", "arguments": {"of": "France"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "name", "text"),
    [
        (QWEN, "several", "b b<|im_end|>\n d\n<|im_end|>\nf<|im_end|>\n"),
        (QWEN, "tools", f"{CALLED}<|im_end|>\nParis.<|im_end|>\nc<|im_end|>\n"),
        (PHI, "same", "a<|end|>\na<|end|>\n<|endoftext|>"),
        (QWEN3, "thoughts", "b<|im_end|>\n<think>\nso\n</think>\n\nd<|im_end|>\n"),
    ],
)
def test_each_answer_counts_with_its_end(tokenizer, template, name, text):
    ids, mask = encode(tokenizer, unmarked(template), name)
    assert tokenizer.decode([*compress(ids, mask)]) == text


def test_the_demo_model_takes_conversations():
    own = load_tokenizer(DEMO_MODEL)
    said = trained(own, own.chat_template, *CONVERSATIONS["several"])
    assert said == [" b b<|endoftext|>\n", "  d\n<|endoftext|>\n", " f<|endoftext|>\n"]


PLAIN = unmarked(CHATML)
WEATHER = [{"type": "function", "function": {"name": "weather", "arguments": {"day": 3}}}]


def read(*messages: dict) -> list[dict]:
    return messages_of(list(messages))


def encoded(tokenizer, template: str, record: dict, loss_on: str = "answers", prompt: int = 0):
    tokenizer._tokenizer.chat_template = template
    messages = read(*record["messages"])
    options = record.get("chat_template_kwargs", {})
    conversation = Conversation(messages, prompt, record.get("tools"), options)
    return encode_conversation(tokenizer, conversation, loss_on)


def trained(tokenizer, template: str, *messages: dict, **others) -> list[str]:
    loss_on, prompt = others.pop("loss_on", "answers"), others.pop("prompt", 0)
    found = encoded(tokenizer, template, {"messages": list(messages), **others}, loss_on, prompt)
    edges = [i for i in range(1, len(found.ids)) if found.mask[i] != found.mask[i - 1]]
    spans = pairwise([0, *edges, len(found.ids)])
    return [tokenizer.decode(found.ids[a:b]) for a, b in spans if found.mask[a]]


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": " b"}, "c"]
    assert read(user(parts))[0]["content"] == "a bc"


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (user([{"type": "input_audio", "audio": "x"}]), "nor an image but input_audio"),
        (user({"text": "a"}), "neither text nor a list"),
        ({"content": "a"}, 'without a "role"'),
        ({"role": "user"}, 'without "content"'),
        ({"role": "assistant"}, 'without "content"'),
        (assistant("a", weight=0.5), "neither 0 nor 1"),
        (user("a") | {"train": True}, "only the assistant's are"),
        (assistant("", tool_calls=[{"function": {}}]), 'a tool call without a "name"'),
        (assistant("", tool_calls=[{"name": "a", "arguments": "{"}]), "that are no JSON"),
        (assistant("", tool_calls=[{"name": "a", "arguments": "[1]"}]), "not an object"),
    ],
)
def test_messages_that_cannot_be_read_are_named(message, named):
    with pytest.raises(MespError, match=named):
        read(message)


def test_arguments_are_an_object_however_they_are_written():
    for arguments in ({"of": "a", "in": None}, '{"of": "a", "in": null}'):
        call = {"name": "capital", "arguments": arguments}
        for written in (call, {"type": "function", "function": call}):
            (message,) = read(assistant("", tool_calls=[written]))
            assert message["tool_calls"][0]["function"]["arguments"] == {"of": "a", "in": None}


@pytest.mark.parametrize(
    ("role", "named"),
    [("human", "write user"), ("gpt", "write assistant"), ("judge", "roles are system")],
)
def test_unknown_roles_are_named(tokenizer, role, named):
    with pytest.raises(MespError, match=named):
        encoded(tokenizer, PLAIN, {"messages": [{"role": role, "content": "a"}, assistant("b")]})


WELL = r"leaves out the content of message 2, of the role assistant \(.Well"
REVERSED = PLAIN.replace("m.content +", "(m.content if loop.last else m.content | reverse) +")
UNMARKED = (
    "{% for m in messages %}{{ m.content + '\\n' if loop.last else m.content + ' ' }}{% endfor %}"
)
ENDS_WITH_ITS_QUESTION = PLAIN.replace(
    "{%- if m.role == 'assistant' %}{{- m.content +",
    "{%- if m.role == 'assistant' %}{{- m.content + messages[loop.index0 - 1].content +",
)
ROLES_LEFT_OUT = PLAIN.replace("for m in messages", "for m in messages if m.role != 'system'")
CALLS_BY_NAME = PLAIN.replace(
    "{{- m.content + '<|im_end|>\\n' }}\n{%- else",
    "{{- m.content }}{%- for c in m.tool_calls or [] %}{{- c.function.name }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}\n{%- else",
)
THOUGHTS_TAKEN_OUT = PLAIN.replace(
    "{%- if m.role == 'assistant' %}{{- m.content +",
    "{%- if m.role == 'assistant' %}{{- m.content.split('</think>')[0].split('<think>')[-1] +"
    " '</think>' + m.content.split('</think>')[-1] +",
)


@pytest.mark.parametrize(
    ("template", "messages", "named"),
    [
        (ROLES_LEFT_OUT, [SYSTEM, *turn("b", "c")], "system"),
        (PLAIN, [user("a"), assistant("b", tool_calls=CALL)], "leaves out the tool call"),
        (CALLS_BY_NAME, [user("a"), assistant("b", tool_calls=CALL)], "leaves out the arguments"),
        (CALLS_BY_NAME, [user("a"), assistant("b", tool_calls=WEATHER)], "leaves out 3"),
        (PLAIN, [user("a"), assistant("b", reasoning="c")], "leaves out the reasoning"),
        (PLAIN, [user("a"), assistant("b", citations=["c"])], '"citations", which nothing reads'),
        (THOUGHTS_TAKEN_OUT, turn("a", "Well. <think>so</think> b"), WELL),
        (PLAIN, [user("a"), assistant(" \n")], "message 2 is an empty answer"),
        (PLAIN, turn("a", "b<|im_end|>\nb"), "the end token <.im_end.> in it"),
        (REVERSED, turn("ab", "cd") * 2, "leaves out the content of message 1"),
        (UNMARKED, turn("a", "b"), "message 2 begins and ends: take `loss_on` all"),
        (ENDS_WITH_ITS_QUESTION, turn("a", "b"), "does not tell where the answer in message 2"),
    ],
)
def test_what_a_template_leaves_out_is_refused(tokenizer, template, messages, named):
    for loss_on in ("answers", "last"):
        with pytest.raises(MespError, match=named):
            encoded(tokenizer, template, {"messages": messages}, loss_on)


def test_tools_that_a_template_leaves_out_are_refused(tokenizer):
    record = {"messages": turn("a", "b"), "tools": TOOLS}
    with pytest.raises(MespError, match=r"leaves out the tools, such as .capital"):
        encoded(tokenizer, PLAIN, record)
    assert encoded(tokenizer, unmarked(QWEN), record).mask.any()


IN_PYTHON = CALLS_BY_NAME.replace(
    "c.function.name }}",
    """c.function.name + "('" }}{{- c.function.arguments.of | replace("'", "\\\\'") }}"""
    """{{- "')" }}""",
)


@pytest.mark.parametrize("value", ["France", "it's", '"it\'s"', "é"])
def test_a_template_may_write_arguments_as_python_does(tokenizer, value):
    call = [{"name": "capital", "arguments": {"of": value}}]
    (text,) = trained(tokenizer, IN_PYTHON, user("a"), assistant("", tool_calls=call))
    assert eval(text.removeprefix("capital").removesuffix("<|im_end|>\n")) == value


def test_answers_with_weight_0_are_not_trained(tokenizer):
    said = [user("a"), assistant("b", weight=0), user("c"), assistant("d", masked=False)]
    assert trained(tokenizer, PLAIN, *said) == ["d<|im_end|>\n"]
    said[1]["content"] = "b<|im_end|>b"
    untrained = "".join(trained(tokenizer, PLAIN, *said, loss_on="all"))
    assert "b" not in untrained and untrained.startswith("<|im_start|>user\na")


def test_answers_before_the_completion_are_not_trained(tokenizer):
    assert trained(tokenizer, PLAIN, *SAID, prompt=3) == ["d<|im_end|>\n"]


def test_an_answer_that_the_template_does_not_end_gets_an_end(tokenizer):
    template = (
        "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content + '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
    )
    found = trained(tokenizer, template, *SAID)
    assert [each.strip() for each in found] == ["b\n<|endoftext|>", "d\n<|endoftext|>"]
    notes = encoded(tokenizer, template, {"messages": SAID}).notes
    assert "does not end: <|endoftext|> was put after each" in notes[0]


ENDS_APART = marked(
    CHATML.replace(
        "⟦{{- m.content + '<|im_end|>\\n' }}⟧", "⟦{{- m.content }}⟧{{- '<|im_end|>\\n' }}"
    )
)


def test_marks_that_leave_the_end_out_take_it_in(tokenizer):
    assert trained(tokenizer, ENDS_APART, *SAID) == ["b<|im_end|>", "d<|im_end|>"]


MARKED = CHATML.replace(
    "{{- '<|im_start|>' + m.role + '\\n' }}\n{%- if m.role == 'assistant' %}⟦",
    "{%- if m.role != 'assistant' %}{{- '<|im_start|>' + m.role + '\\n' }}{%- endif %}\n"
    "{%- if m.role == 'assistant' %}{%- generation %}{{- '<|im_start|>assistant\\n' }}",
).replace("⟧", "{%- endgeneration %}")


def test_marked_answers_that_touch_are_two(tokenizer):
    """These marks include the header of an answer, so there is no text between two marked answers
    in a row.
    """
    said = [user("a"), assistant("b"), assistant("c", weight=0), user("d"), assistant("e")]
    answer = "<|im_start|>assistant\n{}<|im_end|>\n"
    assert trained(tokenizer, MARKED, *said) == [answer.format("b"), answer.format("e")]


def test_a_marked_answer_ends_with_all_of_its_last_character(tokenizer):
    assert trained(tokenizer, ENDS_APART, *turn("a", "。")) == ["。<|im_end|>"]


def test_a_marked_answer_in_two_pieces_is_refused(tokenizer):
    """The template writes a tool's response between the call and the text of one message, so the
    marked answer has two pieces."""
    template = """\
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}{%- generation %}
{%- for c in m.tool_calls or [] %}{{- c.function | tojson }}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- endgeneration %}
{%- if m.tool_calls %}{{- messages[loop.index0 + 1].content }}{%- endif %}
{%- generation %}{{- m.content + '<|im_end|>\\n' }}{%- endgeneration %}
{%- elif m.role != 'tool' %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}"""
    said = [user("a"), assistant("b", tool_calls=CALL), tool("Paris"), assistant("c")]
    with pytest.raises(MespError, match="does not tell where the answer in message 2"):
        encoded(tokenizer, template, {"messages": said})


@pytest.mark.parametrize("answer", ["<b>x</b>", "<think", "think>", "<"])
def test_an_answer_may_begin_as_the_template_asks_on(tokenizer, answer):
    template = PLAIN.replace("'<|im_start|>assistant\\n' }}{%- endif %}", "ASKS }}{%- endif %}")
    template = template.replace("ASKS", "'<|im_start|>assistant\\n<think>\\n'")
    assert trained(tokenizer, template, *turn("a", answer)) == [f"{answer}<|im_end|>\n"]
    found = encoded(tokenizer, template, {"messages": turn("a", answer)})
    assert "Answers that begin without '<think>" in found.notes[0]


def test_an_unclosed_thought_is_trained(tokenizer):
    template = PLAIN.replace(
        "{%- if m.role == 'assistant' %}{{- m.content +",
        "{%- if m.role == 'assistant' %}"
        "{{- m.content if '<think>' in m.content else '<think></think>' + m.content }}{{- '' +",
    )
    assert template != PLAIN
    found = trained(tokenizer, template, *turn("a", "<think>b"), *turn("c", "d"))
    assert found == ["<think>b<|im_end|>\n", "<think></think>d<|im_end|>\n"]


def test_a_conversation_begins_once(tokenizer):
    found = encoded(tokenizer, unmarked(LLAMA), {"messages": turn("a", "b")})
    assert found.ids.count(tokenizer.bos_token_id) == 1


WANTS_A_QUESTION = PLAIN.replace(
    "{%- for m in messages %}",
    "{%- if 'user' not in messages | map(attribute='role') %}{{- raise_exception('No question') }}"
    "{%- endif %}{%- for m in messages %}",
    1,
)


@pytest.mark.parametrize("system", [[], [SYSTEM]])
def test_a_conversation_may_begin_with_an_answer_where_templates_want_a_question(tokenizer, system):
    said = [*system, assistant("Yes?"), *turn("a", "b")]
    found = trained(tokenizer, WANTS_A_QUESTION, *said)
    assert found == ["Yes?<|im_end|>\n", "b<|im_end|>\n"]


def test_options_of_the_template_are_taken(tokenizer):
    template = "{%- if shout %}{{- '<|im_start|>!' }}{%- endif %}" + PLAIN
    record = {"messages": turn("a", "b"), "chat_template_kwargs": {"shout": True}}
    assert tokenizer.decode(encoded(tokenizer, template, record).ids).startswith("<|im_start|>!")


CHANGES_ITS_MIND = PLAIN.replace(
    "{%- if m.role == 'assistant' %}{{- m.content +",
    "{%- if m.role == 'assistant' %}{{- ('<think></think>' if loop.last else '') + m.content +",
)


@pytest.mark.parametrize("others", [{"loss_on": "last"}, {"prompt": 2}])
def test_a_prompt_that_is_not_how_the_model_is_asked_is_refused(tokenizer, others):
    said = [*turn("a", "b"), assistant("c")]
    with pytest.raises(MespError, match="the prompt for the answer in message 3 is not the"):
        trained(tokenizer, CHANGES_ITS_MIND, *said, **others)
    assert len(trained(tokenizer, CHANGES_ITS_MIND, *said)) == 2


def test_a_string_may_be_answered_by_messages(tokenizer):
    record = {"prompt": "a", "completion": [assistant("b")], "chat_template_kwargs": {}}
    found = read_record(Fields("A record", record))
    assert not found.texts and found.messages == turn("a", "b")
    tokenizer._tokenizer.chat_template = PLAIN
    ids = encode_conversation(tokenizer, found, "answers").ids
    assert ids == encoded(tokenizer, PLAIN, {"messages": turn("a", "b")}).ids


@pytest.mark.parametrize("ends", ["", " ", "\n", "ab"])
def test_no_token_has_a_part_of_prompt_and_answer(ends):
    tokenizer = load_tokenizer(DEMO_MODEL)
    for answer in ("cd", " is", "\n\nx", "s", "。"):
        ids, context = join(tokenizer, f"The word{ends}", answer)
        assert ids[:context] == tokenizer.encode(f"The word{ends}")
        assert tokenizer.decode(ids[context:]) == answer + tokenizer.eos_token


REPEATS = PLAIN.replace(
    "{{- '<|im_start|>' + m.role + '\\n' }}",
    "{{- '<|im_start|>' + m.role }}{%- if m.role == 'assistant' and not loop.first %}"
    "{{- ' to ' + messages[loop.index0 - 1].content }}{%- endif %}{{- '\\n' }}",
    1,
).replace(
    "{{- '<|im_start|>assistant\\n' }}",
    "{{- '<|im_start|>assistant to ' + messages[-1].content + '\\n' }}",
)


def test_a_template_may_repeat_a_text(tokenizer):
    found = trained(tokenizer, REPEATS, *turn("a", "a"), *turn("a", "b"), *turn("b", "b"))
    assert found == ["a<|im_end|>\n", "b<|im_end|>\n", "b<|im_end|>\n"]


def test_a_token_that_takes_white_space_is_of_no_answer(tokenizer):
    """Phi's <|assistant|>, for example, absorbs the line feeds after it."""
    own = load_tokenizer(DEMO_MODEL)
    strips = AddedToken("<|ask|>", rstrip=True, special=True)
    own._tokenizer.add_special_tokens({"additional_special_tokens": [strips, "<|im_end|>"]})
    own._tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|ask|>\n' if m.role == 'assistant' }}{{ m.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|ask|>\n{% endif %}"
    )
    for said in ("Paris", "\nParis"):
        assert trained(own, own.chat_template, *turn("q", said)) == ["Paris<|im_end|>\n"]


def test_a_token_that_begins_the_next_question_ends_no_answer(tokenizer):
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|assistant|>"
        "{% else %}{{ m.content }}{{ eos_token if loop.last }}{% endif %}{% endfor %}"
    )
    found = trained(tokenizer, template, *SAID)
    assert found == [f"b{tokenizer.eos_token}", f"d{tokenizer.eos_token}"]


@pytest.mark.parametrize("name", ["user", "use", "Mk", "f"])
def test_a_tool_is_not_seen_in_words_of_the_template(tokenizer, name):
    tools = [{"type": "function", "function": {"name": name}}]
    with pytest.raises(MespError, match="leaves out the tools"):
        encoded(tokenizer, PLAIN, {"messages": turn("a", "b"), "tools": tools})
