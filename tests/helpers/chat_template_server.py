"""Serves the exporter and a tokenizer to tests in Swift.

Each line of input is a request, a JSON object. The answer to a request for the next case has a
record, the names of the images at the beginning of its messages, a chat template's name, the part
of the record in the loss, the result of `mesp-export --split-special-tokens`, and the ids of the
special tokens. The result is the ids, the mask and the places of each answer, or the reason of a
refusal and the columns and keys that nothing reads. The tokenizer of the current case answers all
other requests.
"""

import importlib.util
import json
import os
import random
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from hypothesis import HealthCheck, Phase, given, seed, settings
from mlx_lm.tokenizer_utils import TokenizerWrapper

from helpers.chat_templates import CHATML, SPECIAL, TEMPLATES, tokenizer_with, unmarked
from helpers.conversations import conversations
from helpers.data import assistant, user
from mesp.data.fields import NEVER_CONTENT, Fields, refuse_unread
from mesp.data.image_encoder import ImageEncoder
from mesp.data.records import Encoder, mask_record, read_record
from mesp.errors import MespError

SEED = 1
EACH = int(os.environ.get("MESP_FUZZ_CASES", 30))

TOOLS = "{%- for tool in tools or [] %}{{- tool | tojson }}{%- endfor %}"
CALLS = "{%- for call in m.tool_calls or [] %}{{- '!' + call.function.name }}{%- endfor %}"
IN_PYTHON = CALLS.replace("name }}", "name }}{{- call.function.arguments | string }}")
OWN = {
    "as text": """\
{{- bos_token }}
{%- for tool in tools or [] %}{{- tool | tojson + '\\n' }}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- '<|assistant|>' + m.content }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + ' ' + call.function.arguments + '</tool_call>' }}
{%- endfor %}{{- '<|end|>' }}
{%- else %}{{- '<|user|>' + m.role + ': ' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}""",
    "with ids": """\
{{- bos_token }}
{%- for tool in tools or [] %}{{- '[TOOL] ' + tool | tojson }}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}{{- ' ' + m.content }}
{%- for call in m.tool_calls or [] %}{%- if not call.id %}
{{- raise_exception('A call needs an id.') }}{%- endif %}
{{- '[CALL] ' + call.id + ' ' + {'name': call.function.name} | tojson }}
{{- call.function.arguments | string }}{%- endfor %}{{- '</s>' }}
{%- elif m.role == 'tool' %}{{- '[RESULT] ' + m.tool_call_id + ' ' + m.content + '[/RESULT]' }}
{%- else %}{{- '[INST] ' + m.content + ' [/INST]' }}{%- endif %}
{%- endfor %}""",
    "loses": f"""{TOOLS}\
{{%- for m in messages %}}
{{{{- '<|im_start|>' + m.role + '\\n' + m.content }}}}
{{%- for call in m.tool_calls or [] %}}{{{{- call.function.name }}}}
{{%- for key, value in call.function.arguments.items() %}}
{{%- if value is not number or value is boolean %}}{{{{- key + value | tojson }}}}{{%- endif %}}
{{%- endfor %}}{{%- endfor %}}
{{{{- '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{%- endif %}}""",
    "names alone": TOOLS + unmarked(CHATML).replace("m.content +", "m.content }}" + CALLS + "{{-"),
    "endless": f"""{TOOLS}\
{{%- for m in messages %}}
{{%- if m.role == 'assistant' %}}{{{{- m.content | trim }}}}{IN_PYTHON}
{{%- else %}}{{{{- '<|user|>' + m.content | trim + '<|assistant|>' }}}}{{%- endif %}}
{{%- endfor %}}""",
    "repeats": f"""{TOOLS}\
{{%- for m in messages %}}
{{{{- '<|im_start|>' + m.role }}}}
{{%- if m.role == 'assistant' and not loop.first %}}
{{{{- ' to ' + messages[loop.index0 - 1].content }}}}{{%- endif %}}{{{{- '\\n' }}}}
{{%- if m.role == 'assistant' and loop.last and loop.length > 5 %}}
{{{{- '<think></think>' }}}}{{%- endif %}}
{{{{- m.content }}}}{IN_PYTHON}{{{{- '<|im_end|>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
{{{{- '<|im_start|>assistant to ' + messages[-1].content + '\\n' }}}}{{%- endif %}}""",
}
OWN["parts alone"] = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role | capitalize }}
{%- if m['content'][0]['type'] == 'image' %}{{- ':' }}{%- else %}{{- ': ' }}{%- endif %}
{%- for part in m['content'] %}{%- if part['type'] == 'text' %}{{- part['text'] }}
{%- elif part['type'] == 'image' %}{{- '<|image|>' }}{%- endif %}{%- endfor %}{{- '<|end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>Assistant:' }}{%- endif %}"""
OWN["parts"] = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.content is string %}{{- m.content }}{%- else %}
{%- for part in m.content %}{%- if part.type == 'image' %}{{- '<|image|>' }}
{%- else %}{{- part.text }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
IMAGE = "<|image|>"
IMAGES = {"a": f"<|end|>{IMAGE}{IMAGE}\n{IMAGE}", "b": f"{IMAGE} tile {IMAGE}"}
VALUES = [1, 1.0, -0.5, None, "", " ", True, {"x": None, "y": [7, {"z": None}]}, 'it\'s "so" \\ /']
WRITTEN = re.compile(r"<[|｜][^|｜<>\n]{1,30}[|｜]>|</?s>|<(?:start|end)_of_turn>")  # noqa: RUF001


def templates() -> dict[str, str]:
    found = {name: unmarked(template) for name, template in TEMPLATES.items()} | OWN
    if trl := importlib.util.find_spec("trl"):
        (folder,) = trl.submodule_search_locations or ["."]
        for file in sorted((Path(folder) / "chat_templates").glob("*.jinja")):
            text = re.sub(r"{%-?\s*(?:end)?generation\s*-?%}", "", file.read_text())
            found[file.stem] = text
    return found


@cache
def tokenizer_of(template: str) -> Any:
    tokenizer = tokenizer_with([*SPECIAL, *WRITTEN.findall(template)], template)
    return TokenizerWrapper(tokenizer, eos_token_ids=[tokenizer.eos_token_id])


def sort_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: sort_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [sort_keys(each) for each in value]
    if isinstance(value, str) and value.startswith("{"):
        try:
            return json.dumps(sort_keys(json.loads(value)), ensure_ascii=False)
        except ValueError:
            return value
    return value


def write_special(value: Any, chance: random.Random) -> Any:
    if isinstance(value, dict):
        kept = ("role", "type", "tools", "id", "tool_call_id", "name")
        return {k: v if k in kept else write_special(v, chance) for k, v in value.items()}
    if isinstance(value, list):
        return [write_special(each, chance) for each in value]
    if not isinstance(value, str) or value.startswith("{") or chance.random() > 0.3:
        return value
    return value.replace(" ", f" {chance.choice(SPECIAL)} ", 1)


def entries(record: dict) -> list[dict]:
    return [each for value in record.values() if isinstance(value, list) for each in value]


def with_values(record: dict, chance: random.Random) -> dict:
    """In a tenth of the records, the first tool's description becomes a special token."""
    for call in (call for each in entries(record) for call in each.get("tool_calls", [])):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, dict) and chance.random() < 0.9:
            arguments["value"] = deepcopy(chance.choice(VALUES))
    if chance.random() < 0.1:
        record["tools"][0]["function"]["description"] = chance.choice(SPECIAL)
    return record


def records() -> list[tuple[dict, str]]:
    chance = random.Random(SEED)
    found: dict[bool, list[dict]] = {False: [], True: []}

    @seed(SEED)
    @settings(
        max_examples=5 * EACH, phases=[Phase.generate], database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(conversations())
    def collect(record: dict) -> None:
        record = deepcopy(record)
        if chance.random() < 0.97:
            for each in entries(record):
                each.pop("reasoning_content", None)
        if chance.random() < 0.15:
            record = write_special(record, chance)
        if "tools" in record:
            record = with_values(record, chance)
        found["tools" in record].append(sort_keys(record))

    collect()
    mixed = [each for both in zip(found[True], found[False], strict=False) for each in both]
    return [(each, "all" if chance.random() < 0.2 else "answers") for each in mixed[:EACH]]


OTHERS = {
    "context": "It is noon.", "hint": ["a", 1], "Notes": {"a": None}, "system": "Be terse.",
    "answer": 7, "is_ok": False, "question": "Why?", "input": "x", "reward": 0.0,
    "ID": 7, "source": "web", "created-at": "2026", "metadata": {"a": 1}, "score": 0.5,
    "split": "train", "empty": "", "nothing": None, "none": [], "no": {},
}  # fmt: skip


def others(chance: random.Random, but: dict) -> dict:
    found = {key: OTHERS[key] for key in chance.sample(sorted(OTHERS), chance.choice([0, 0, 1, 3]))}
    return {key: value for key, value in found.items() if key not in but}


def varied(record: dict, chance: random.Random) -> dict:
    words = [e["content"] for e in entries(record) if isinstance(e.get("content"), str)]
    a, b, c = (chance.choice([*words, "Why?", " So.", "Yes\r\nno\u200b."]) for _ in range(3))
    asked, answers = [user(a)], [[assistant(each)] for each in (b, f"{b} {c}")]
    record = chance.choice(
        [
            record,
            record,
            {"messages": asked + answers[0]},
            {"prompt": a, "completion": b},
            {"prompt": asked, "completion": b},
            {"prompt": asked, "completion": asked + answers[0]},
            {"instruction": a, "input": chance.choice([b, "", " ", None]), "output": c},
            {"instruction": a, "output": c},
            {"instruction": a, "context": chance.choice([b, None]), "response": c},
            {"text": f"{a} {b}\n{c}" * 3},
            {"prompt": asked, "chosen": answers[0], "rejected": answers[1]},
            {"prompt": a, "completion": b, "label": chance.random() < 0.5},
        ]
    )
    record = deepcopy(record)
    for message in entries(record):
        if "role" in message and chance.random() < 0.1:
            message |= others(chance, message)
        if isinstance(message.get("content"), list) and chance.random() < 0.3:
            message["content"][0] |= {"caption": "x", "annotations": [], "cache_control": {"a": 1}}
        for call in message.get("tool_calls") or []:
            if chance.random() < 0.2:
                call["function"] |= {"strict": True}
    if chance.random() < 0.1:
        record[chance.choice(sorted(record))] = None
    if chance.random() < 0.1:
        record["messages"] = [] if chance.random() < 0.5 else None
    if chance.random() < 0.1:
        record["chat_template_kwargs"] = chance.choice([{}, None, {"enable_thinking": False}, []])
    return record | others(chance, record)


class Tower:
    """A stand-in for a vision tower, which reads no pictures."""

    image_token = IMAGE

    def __init__(self, tokenizer: Any) -> None:
        self.image_token_id = tokenizer.convert_tokens_to_ids(IMAGE)
        self._features = {
            name: SimpleNamespace(text=text, rows=mx.zeros((text.count(IMAGE), 2)))
            for name, text in IMAGES.items()
        }

    def features(self, image: Path) -> Any:
        return self._features[image.name]


def names_of_images(record: dict, chance: random.Random) -> list[str]:
    messages = record.get("messages") or record["prompt"]
    return [
        "".join(chance.choices("ab", k=chance.choice([0, 1, 1, 2])))
        if each["role"] == "user" and isinstance(each["content"], str) else ""
        for each in messages
        if isinstance(messages, list)
    ]  # fmt: skip


def with_images(record: dict, names: list[str]) -> dict:
    record = deepcopy(record)
    for message, images in zip(record.get("messages") or record["prompt"], names, strict=False):
        if images:
            text = {"type": "text", "text": message["content"]}
            message["content"] = [*({"type": "image", "image": name} for name in images), text]
    return record


def expected(template: str, record: dict, loss_on: str) -> dict[str, Any]:
    unread: list[str] = []
    try:
        read = read_record(Fields("It", deepcopy(record)))
        unread += read.unread
        tokenizer = tokenizer_of(template)
        encoder = Encoder(
            tokenizer, loss_on, True, True,
            open_images=lambda: ImageEncoder(Tower(tokenizer), tokenizer),  # type: ignore[arg-type]
        )  # fmt: skip
        if read.kind in ("a text", "a pair of answers"):  # Only answers of a pair are in the loss.
            encoder = Encoder(tokenizer_of(template), split_special=True)
        encoded = mask_record(read, encoder)
        unread += [name for each in encoded for name in each.unread]
        refuse_unread([("It", unread)])
    except MespError as error:
        names = {each for each in unread if each.lower().replace("-", "_") not in NEVER_CONTENT}
        return {"refused": str(error), "unread": sorted(names)}
    answers = [
        {
            "ids": each.ids, "counted": each.mask.tolist(),
            "places": None if each.places is None else each.places.tolist(),
        }
        for each in encoded
    ]  # fmt: skip
    return {"kind": read.kind, "answers": answers}


def cases() -> Iterator[dict[str, Any]]:
    made, chance = records(), random.Random(SEED)
    for name in ("parts alone", "parts"):
        for record, loss_on in made:
            names = names_of_images(record, chance)
            yield {
                "template": name, "text": OWN[name], "record": json.dumps(record),
                "lossOn": loss_on, "images": names,
            } | expected(OWN[name], with_images(record, names), loss_on)  # fmt: skip
    for name, template in templates().items():
        for record, loss_on in made + [(varied(each, chance), on) for each, on in made]:
            yield {
                "template": name, "text": template, "record": json.dumps(record), "lossOn": loss_on,
            } | expected(template, record, loss_on)  # fmt: skip


def answer(asked: dict[str, Any], template: str) -> Any:
    tokenizer = tokenizer_of(template)
    if asked["do"] == "encode":
        return list(tokenizer.encode(asked["text"], add_special_tokens=asked["addsSpecialTokens"]))
    if asked["do"] == "decode":
        return tokenizer.decode(asked["ids"])
    options = {"tools": asked.get("tools"), "add_generation_prompt": asked["addsGenerationPrompt"]}
    options |= {"tokenize": False, **asked["options"]}
    text = tokenizer._tokenizer.apply_chat_template(asked["messages"], **options)
    return list(tokenizer.encode(text, add_special_tokens=False))


def main() -> None:
    def say(value: Any) -> None:
        print(json.dumps(value), flush=True)

    waiting, template = cases(), ""
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "next":
            case = next(waiting, {})
            template = case.pop("text", template)
            if case:
                tokenizer = tokenizer_of(template)
                special = {*tokenizer.all_special_ids}
                special |= {i for i, each in tokenizer.added_tokens_decoder.items() if each.special}
                case |= {"begin": tokenizer.bos_token_id, "end": tokenizer.eos_token_id}
                case |= {"special": sorted(special)}
            say(case)
            continue
        try:
            say({"value": answer(asked, template)})
        except Exception as error:  # a template can raise anything
            say({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
