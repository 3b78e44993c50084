"""Where the answers of a conversation are, against what TRL's `assistant_only_loss` takes.

TRL marks the answers in its copies of the models' templates by `{% generation %}`. Here each
template is written twice from one text, with the marks where TRL has them and without: the marks
say what is expected, and without them it has to be found.
"""

import pytest

from helpers.paths import DEMO_MODEL
from mesp.data.answers import encode_conversation
from mesp.data.messages import read_messages
from mesp.data.records import Conversation
from mesp.errors import MespError
from mesp.text import load_tokenizer

# In the manner of the families' templates; ⟦ and ⟧ are where TRL's copies have the marks.
CHATML = """\
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}⟦{{- m.content + '<|im_end|>\\n' }}⟧
{%- else %}{{- m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

SMOLLM = (
    """\
{%- if messages[0].role != 'system' %}
{{- '<|im_start|>system\\nYou are SmolLM.<|im_end|>\\n' }}{%- endif %}
"""
    + CHATML
)

QWEN = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are Qwen.<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\\n' }}⟦{{- m.content }}
{%- for call in m.tool_calls or [] %}{%- if m.content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}⟧
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Thoughts stay in the answers after the last question; the last answer always has some.
QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set content = m.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\\n') \
if '</think>' in m.content else '' %}
{{- '<|im_start|>assistant\\n' }}⟦
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}{%- if content or not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}⟧
{%- elif m.role == 'tool' %}
{{- '<|im_start|>tool\\n' + m.content + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

LLAMA = """\
{{- bos_token }}
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- m.content | tojson }}
{{- '<|eot_id|>' }}
{%- elif m.role == 'assistant' %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}⟦
{%- if m.tool_calls %}{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{- '}' }}
{%- else %}{{- m.content | trim }}{%- endif %}{{- '<|eot_id|>' }}⟧
{%- else %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

GEMMA = """\
{{- bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}{%- endif %}
{%- if m.role == 'assistant' %}{{- '<start_of_turn>model\\n' }}⟦
{{- m.content | trim + '<end_of_turn>\\n' }}⟧
{%- else %}{{- '<start_of_turn>user\\n' + m.content | trim + '<end_of_turn>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

PHI = """\
{%- for m in messages %}
{{- '<|' + m.role + '|>\\n' }}
{%- if m.role == 'assistant' %}⟦{{- m.content + '<|end|>\\n' }}⟧
{%- else %}{{- m.content + '<|end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}
{%- elif messages[-1].role == 'assistant' %}⟦{{- eos_token }}⟧
{%- else %}{{- eos_token }}{%- endif %}"""

# Nothing before an answer but the end of the question.
MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}⟦{{- ' ' + m.content + '</s>' }}⟧
{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{%- endif %}
{%- endfor %}"""

TEMPLATES = {
    "smollm": SMOLLM,
    "qwen2.5": QWEN,
    "qwen3": QWEN3,
    "llama": LLAMA,
    "gemma": GEMMA,
    "phi": PHI,
    "mistral": MISTRAL,
}
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
SPECIAL += ["<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>", "<|assistant|>", "</s>"]

TOOLS = [{"type": "function", "function": {"name": "capital", "parameters": {"type": "object"}}}]
CALL = [{"type": "function", "function": {"name": "capital", "arguments": {"of": "France"}}}]


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str, **others: object) -> dict:
    return {"role": "assistant", "content": content, **others}


def tool(content: str) -> dict:
    return {"role": "tool", "content": content}


CONVERSATIONS = {
    "one": [user("Hi."), assistant("Hello.\n\nWhat is it?\n")],
    "several": [
        user("a"),
        assistant("b b"),
        user("c"),
        assistant(" d\n"),
        user("e"),
        assistant("f"),
    ],
    "same": [user("a"), assistant("a"), user("a"), assistant("a")],
    "user ends": [user("a"), assistant("b"), user("c")],
    "system": [{"role": "system", "content": "Be."}, user("a"), assistant("b")],
    "first": [assistant("Yes?"), user("a"), assistant("b"), user("c"), assistant("d")],
    "in a row": [user("a"), assistant("b"), assistant("c"), user("d"), assistant("e")],
    "thoughts": [
        user("a"),
        assistant("<think>\nhm\n</think>\n\nb"),
        user("c"),
        assistant("<think>\nso\n</think>\n\nd"),
    ],
    "tools": [
        user("a"),
        assistant("", tool_calls=CALL),
        tool("Paris"),
        assistant("Paris."),
        user("b"),
        assistant("c"),
    ],
    "thoughts and tools": [
        user("a"),
        assistant("<think>\nhm\n</think>\n\n", tool_calls=CALL * 2),
        tool("Paris"),
        tool("Rome"),
        assistant("Paris."),
        user("b"),
        assistant("c"),
    ],
}
WITH_TOOLS = {"qwen2.5", "qwen3", "llama"}
TAKES_ANY_ORDER = {"smollm", "qwen2.5", "qwen3", "llama", "phi"}


def cases() -> list[tuple[str, str]]:
    found = []
    for template in TEMPLATES:
        for name in CONVERSATIONS:
            if "tools" in name and template not in WITH_TOOLS:
                continue
            if name == "thoughts and tools" and template == "llama":
                continue  # it takes one call at a time
            if name in ("system", "first", "in a row") and template not in TAKES_ANY_ORDER:
                continue
            found.append((template, name))
    return found


def encode_answers(tokenizer, messages: list[dict], tools: list | None):
    conversation = Conversation(read_messages("A record", messages), tools=tools)
    encoded = encode_conversation(tokenizer, conversation, "answers")
    return encoded.ids, encoded.mask


@pytest.fixture(scope="module")
def tokenizer():
    """The demo model's, with the tokens that the templates end answers with."""
    tokenizer = load_tokenizer(DEMO_MODEL)
    tokenizer._tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer._tokenizer.bos_token = "<|endoftext|>"
    return tokenizer


def encode(tokenizer, template: str, name: str, marked: bool) -> tuple[list[int], list[bool]]:
    for mark, tag in (("⟦", "{%- generation %}"), ("⟧", "{%- endgeneration %}")):
        # In turns, as there is no other mark for the end.
        template = template.replace(mark, tag if marked else "")
    tokenizer._tokenizer.chat_template = template
    tools = TOOLS if "tools" in name else None
    ids, mask = encode_answers(tokenizer, CONVERSATIONS[name], tools)
    return ids, mask.tolist()


@pytest.mark.parametrize(("template", "name"), cases())
def test_answers_are_those_that_trl_takes(tokenizer, template, name):
    marked = encode(tokenizer, TEMPLATES[template], name, marked=True)
    found = encode(tokenizer, TEMPLATES[template], name, marked=False)
    assert any(found[1]) and not all(found[1])
    assert found == marked


def counted(tokenizer, template: str, name: str) -> str:
    ids, mask = encode(tokenizer, template, name, marked=False)
    return tokenizer.decode([each for each, counts in zip(ids, mask, strict=True) if counts])


def test_each_answer_counts_with_its_end(tokenizer):
    text = counted(tokenizer, QWEN, "several")
    assert text == "b b<|im_end|>\n d\n<|im_end|>\nf<|im_end|>\n"
    call = (
        '<tool_call>\n{"name": "capital", "arguments": {"of": "France"}}\n</tool_call><|im_end|>\n'
    )
    assert counted(tokenizer, QWEN, "tools") == call + "Paris.<|im_end|>\nc<|im_end|>\n"
    assert counted(tokenizer, PHI, "same") == "a<|end|>\na<|end|>\n<|endoftext|>"
    # Text that the template leaves out of earlier answers, and adds to the last.
    text = "b<|im_end|>\n<think>\nso\n</think>\n\nd<|im_end|>\n"
    assert counted(tokenizer, QWEN3, "thoughts") == text


# An answer is written in a way of its own once it is followed by a question.
REVERSED = CHATML.replace("m.content +", "(m.content if loop.last else m.content | reverse) +")
UNMARKED = (
    "{% for m in messages %}{{ m.content + '\\n' if loop.last else m.content + ' ' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "named"),
    [
        (
            REVERSED,
            [user("ab"), assistant("cd"), user("ab"), assistant("cd")],
            "leaves out the content of message 1",
        ),
        # The text itself has the end of an answer in it.
        (
            CHATML,
            [user("a"), assistant("b<|im_end|>\nb"), user("c"), assistant("d")],
            "the end token <.im_end.> in it",
        ),
        (
            UNMARKED,
            [user("a"), assistant("b"), user("c"), assistant("d")],
            "message 2 begins and ends: take --loss-on all",
        ),
    ],
)
def test_answers_that_cannot_be_told_are_refused(tokenizer, template, messages, named):
    tokenizer._tokenizer.chat_template = template.replace("⟦", "").replace("⟧", "")
    with pytest.raises(MespError, match=named):
        encode_answers(tokenizer, messages, None)


def test_the_demo_model_takes_conversations():
    tokenizer = load_tokenizer(DEMO_MODEL)
    ids, mask = encode_answers(tokenizer, CONVERSATIONS["several"], None)
    text = tokenizer.decode([each for each, counts in zip(ids, mask, strict=True) if counts])
    assert text == " b b<|endoftext|>\n  d\n<|endoftext|>\n f<|endoftext|>\n"
