"""Tests the trained parts of conversations in TRL's chat templates, compared with TRL.

Each trained span is whole answers with their end, and if a template has marks, the ids and the mask
are those of transformers with TRL's copy, except for `BEGINS`, `ENDS` and `NOT_ENDED`.
"""

import importlib.util
import json
import logging
import os
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper

from helpers.chat_templates import tokenizer_with
from helpers.conversations import (
    QUESTIONS_AND_ANSWERS,
    as_messages,
    conversations,
    pairs,
    said_by,
)
from helpers.data import examples_of, load, write_records
from mesp.data.prompts import encode_in_template
from mesp.data.records import Conversation
from mesp.errors import MespError

pytestmark = pytest.mark.trl

FOUND = importlib.util.find_spec("trl")
FOLDER = Path(((FOUND and FOUND.submodule_search_locations) or ["."])[0]) / "chat_templates"
TEMPLATES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}
if not TEMPLATES:
    pytest.skip("it takes TRL's wheel: see the Makefile", allow_module_level=True)

EXAMPLES = int(os.environ.get("MESP_FUZZ_CASES", 12))
SEED = int(os.environ.get("MESP_TRL_SEED", 1))
# The least share of the generated records that must be accepted with each template
ACCEPTED = 0.2
# The largest share of the generated records that may be refused although the template renders them
# as a whole
REFUSED_WRONGLY = 0.02
MARK = re.compile(r"{%-?\s*(?:end)?generation\s*-?%}")
WORD = re.compile(r"Wq\d{3}z")
SPECIAL = re.compile(
    r"<[|｜][^|｜<>\n]{1,30}[|｜]>|</?s>|<(?:start|end)_of_turn>|<end_of_utterance>"  # noqa: RUF001
    r"|\[/?(?:INST|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS|THINK)\]|\[gMASK\]|<sop>"
    r"|<[|]?(?:turn|channel|tool_call|tool|tool_response)[|]?>"
)
STOPS = {
    "deepseek": ["<｜end▁of▁sentence｜>"],  # noqa: RUF001
    "diffusion_gemma": ["<turn|>", "<|tool_response>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "glm4moe": ["<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "llama3_": ["<|eot_id|>", "<|eom_id|>"],
    "llama3": ["<|eot_id|>"],
    "muse_glimmer": ["<|eot|>"],
}
DEEPSEEK = "<｜Assistant｜>"  # noqa: RUF001
# Texts that TRL's marks include in an answer, and MeSP does not. The template has these texts in
# its prompt for an answer, so they are input in generation.
BEGINS = {
    "deepseek": (DEEPSEEK, f"{DEEPSEEK}<think>", f"{DEEPSEEK}<think>\n"),
    "gptoss": ("<|start|>assistant",),
    "muse_glimmer": ("<|start|>assistant",),
    "nemotron": ("<think>", "<think>\n"),
    "qwen2_5_vl": (),
    "qwen2_5": ("\n",),
    "qwen3_5": ("<think>", "<think>\n", "<think>\n\n</think>\n\n"),
    "qwen3_6": ("<think>", "<think>\n"),
    "qwen3_8": ("<think>", "<think>\n"),
}
# Texts that MeSP includes in an answer, and TRL's marks do not: the token at which generation
# stops, a header before an answer to a tool's output, and a space after the last end token.
ENDS = {
    "diffusion_gemma": ("<|tool_response>", "<|turn>model\n"),
    "llava_next": (" ",),
}
# Templates that write two successive answers as one. MeSP adds an end between the answers.
NOT_ENDED = ("diffusion_gemma",)
PARTS_ALONE = ("idefics3", "llava_next", "smolvlm")


class Example(NamedTuple):
    ids: list[int]
    mask: list[int]
    ends: set[int]


def of_family(table: dict[str, Any], template: str, default: Any) -> Any:
    return next((value for key, value in table.items() if template.startswith(key)), default)


class Model:
    def __init__(self, name: str, marked: bool) -> None:
        self.name = name
        self.marked = TEMPLATES[name] if MARK.search(TEMPLATES[name]) else None
        self.tokenizer = tokenizer_of(name, TEMPLATES[name], marked)

    def render(self, messages: list[dict], tools: list | None, **options: Any) -> Any:
        if self.name.startswith(PARTS_ALONE):
            messages = [
                {**each, "content": [{"type": "text", "text": each["content"]}]}
                for each in messages
            ]
        return self.tokenizer._tokenizer.apply_chat_template(messages, tools=tools, **options)


def tokenizer_of(name: str, template: str, marked: bool) -> Any:
    shown = template if marked else MARK.sub("", template)
    tokenizer = tokenizer_with(SPECIAL.findall(template), shown)
    known = tokenizer.get_vocab()
    stops = [known[each] for each in of_family(STOPS, name, []) if each in known]
    return TokenizerWrapper(tokenizer, eos_token_ids=[tokenizer.eos_token_id, *stops])


class Trainer:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []

    def __call__(self, model: Model, *records: dict, **options: Any) -> list[Example]:
        for name in ("train", "valid"):
            write_records(self.folder / f"{name}.jsonl", [*records])
        self.said.clear()
        split = load(self.folder, model.tokenizer, 1 << 13, **options)["train"]
        return [Example(*example, {*split.ends}) for example in examples_of(split)]


def messages_of(record: dict) -> list[dict]:
    said = {"user": record.get("prompt", []), "assistant": record.get("completion", [])}
    prompt, answer = (as_messages(role, each) for role, each in said.items())
    return as_messages("", record.get("messages", [])) or prompt + answer


def trained_of(record: dict, loss_on: str) -> list[int]:
    said = record.get("messages") or said_by("assistant", record["completion"])
    first = len(said_by("user", record.get("prompt", [])))
    last = first + len(said) - 1
    answers = [i for i, each in enumerate(said, first) if each["role"] == "assistant"]
    found = [i for i in answers if said[i - first].get("weight", 1)]
    return [i for i in found if loss_on != "last" or i == last]


def leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    elif not isinstance(value, bool):
        yield str(value)


def texts_of(message: dict) -> Iterator[tuple[str, bool]]:
    content = message["content"]
    if message["role"] == "assistant" and "</think>" in content:
        thought, _, content = content.partition("</think>")
        before, _, thought = thought.rpartition("<think>")
        yield before.strip(), False
        yield thought.strip(), True
    for piece in re.split("</?think>", content):
        yield piece.strip(), False
    if "reasoning_content" in message:
        yield message["reasoning_content"], True
    for call in message.get("tool_calls", []):
        yield call["function"]["name"], False
        for each in leaves(call["function"]["arguments"]):
            yield each.strip(), False


def is_in(text: str, whole: str) -> bool:
    whole = unicodedata.normalize("NFC", whole)
    bare = re.sub(r"(\s*/(?:no_)?think)*\s*$", "", text)  # templates may remove flags
    bare = unicodedata.normalize("NFC", bare)  # as the demo model's tokenizer does
    in_json = [json.dumps(bare, ensure_ascii=each)[1:-1] for each in (False, True)]
    in_python = in_json[0].replace('\\"', '"').replace("'", "\\'")
    return any(form in whole for form in (bare, *in_json, in_python))


def spans_of(mask: list[bool]) -> list[range]:
    edges = [i for i in range(len(mask) + 1) if (i and mask[i - 1]) != (i < len(mask) and mask[i])]
    return [range(*both) for both in zip(edges[::2], edges[1::2], strict=True)]


def words(text: str) -> set[str]:
    return {*WORD.findall(text)}


def check_whole(
    model: Model, messages: list[dict], tools: list | None, trained: list[int], ids: list, said: str
) -> None:
    whole = model.tokenizer.decode(ids)
    for tool in tools or []:
        assert tool["function"]["name"] in whole, f"a tool is lost in {whole!r}"
    last_question = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for index, message in enumerate(messages):
        for text, is_reasoning in texts_of(message):
            if is_in(text, whole):
                continue
            assert is_reasoning, f"message {index + 1} is not whole: {text!r} in {whole!r}"
            assert index < last_question or index not in trained, f"reasoning is lost in {whole!r}"
            assert "without their reasoning" in said, f"nothing said of {text!r} in {whole!r}"
    begin = model.tokenizer.bos_token_id
    assert ids[:2] != [begin, begin], "it begins twice"


def check_answers(model: Model, messages: list[dict], trained: list[int], example: Example):
    tokenizer = model.tokenizer
    ids, mask, ends = example
    whole = tokenizer.decode(ids)
    stops = ends | {*turn_ends(model)}
    spans = spans_of(mask)
    groups = [[i] for i in trained]
    for one, other in pairwise(trained):
        if other == one + 1 and len(spans) < len(groups):  # nothing is between the two
            at = next(k for k, group in enumerate(groups) if one in group)
            groups[at : at + 2] = [groups[at] + groups[at + 1]]
    decoded = [tokenizer.decode([ids[i] for i in span]) for span in spans]
    assert len(spans) == len(groups), f"{len(groups)} answers, and trained are {decoded}"
    others = {i: words(json.dumps(m)) for i, m in enumerate(messages)}
    for span, group, text in zip(spans, groups, decoded, strict=True):
        mine = set().union(*(others[i] for i in group))
        assert words(text) <= mine, f"another message's text is trained: {text!r}"
        for index in group:
            for each, is_reasoning in texts_of(messages[index]):
                lost = is_reasoning and (not words(each) or not is_in(each, whole))
                assert lost or is_in(each, text), f"{each!r} is not in what is trained: {text!r}"
        at = span.stop - 1
        while at > span.start and not tokenizer.decode([ids[at]]).strip():
            at -= 1
        assert ids[at] in stops, f"trained is an answer without an end: {text!r}"
        check_around(model, messages, group, text)


def check_around(model: Model, messages: list[dict], group: list[int], text: str) -> None:
    if len(group) > 1 or {"tool_calls", "reasoning_content"} & messages[group[0]].keys():
        return
    said = messages[group[0]]["content"].strip()
    if "think>" in said or said not in text or not words(said):
        return
    before, _, after = text.partition(said)
    for each in of_family(ENDS, model.name, ()):
        before = before.removeprefix(each)
    headers = re.compile(r"im_start|start_header|start_of_turn|<.turn>|START_OF_TURN|START_TURN")
    assert not headers.search(before + after), f"a header is trained: {text!r}"
    written = SPECIAL.findall(after)
    assert len(written) <= 2 and written, f"trained is more than the end of an answer: {text!r}"
    assert not SPECIAL.sub("", after).replace(model.tokenizer.eos_token, "").strip(), text


def turn_ends(model: Model) -> list[int]:
    turns = [("user", "Qqx"), ("assistant", "Aax"), ("user", "Uux")]
    found = []
    for stop in (2, 3):
        said = [{"role": role, "content": text} for role, text in turns[:stop]]
        text = model.render(said, None, tokenize=False)
        after = text.split("Aax")[1].split("Uux")[0]
        ids = model.tokenizer.encode(after, add_special_tokens=False)
        special = [i for i in ids if i in model.tokenizer.all_special_ids]
        found += special[:1] if stop == 3 else special
    return found


def check_asked(model: Model, messages: list[dict], tools: list | None, example: Example) -> None:
    start = example.mask.index(True)
    said = [each | {"weight": 0} for each in messages]  # no token of a prompt is trained
    asked = encode_in_template(model.tokenizer, Conversation(said, tools=tools))
    shown = [model.tokenizer.decode(each) for each in (example.ids[:start], asked)]
    assert example.ids[:start] == asked[:start], f"{shown[0]!r} is not the prompt: {shown[1]!r}"


def check_like_trl(model: Model, messages: list[dict], tools: list | None, example: Example) -> int:
    """Fails unless the ids are those of transformers with TRL's copy of the template, except for
    the ends that MeSP adds with the templates of `NOT_ENDED`.

    Returns whether the mask is the same.
    """
    assert model.marked is not None
    options = {"chat_template": model.marked, "tokenizer_kwargs": {"return_offsets_mapping": True}}
    encoded = model.render(
        messages, tools, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    mask, offsets = list(map(bool, encoded["assistant_masks"])), encoded["offset_mapping"]
    # transformers counts only the first token of an answer's last character
    for i in range(1, len(mask)):
        mask[i] = mask[i] or (mask[i - 1] and offsets[i] == offsets[i - 1])
    if model.name.startswith(NOT_ENDED):
        kept = [i for i, id in enumerate(example.ids) if id != model.tokenizer.eos_token_id]
        ids, ours = ([each[i] for i in kept] for each in example[:2])
        example = Example(ids, ours, example.ends)
    assert encoded["input_ids"] == example.ids, "the ids are not TRL's"
    for table, mine, other in ((BEGINS, mask, example.mask), (ENDS, example.mask, mask)):
        for span in spans_of([a and not b for a, b in zip(mine, other, strict=True)]):
            text = model.tokenizer.decode([example.ids[i] for i in span])
            named = "TRL's answers" if table is BEGINS else "ours"
            assert text in of_family(table, model.name, ()), f"only {named} have {text!r}"
    return example.mask == mask


VARIANTS = [
    (name, marked)
    for name, template in TEMPLATES.items()
    for marked in ([False, True] if MARK.search(template) else [False])
]


@pytest.fixture(scope="module")
def figures() -> Iterator[Counter]:
    found: Counter[str] = Counter()
    yield found
    print("\nConversations in the chat templates that TRL knows:")
    for name, count in found.most_common():
        print(f"{count:6,} {name}")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path_factory.mktemp("records"))

    def collect(record: logging.LogRecord) -> bool:
        trainer.said.append(record.getMessage())
        return False

    log = logging.getLogger("mesp.data.load")
    log.addFilter(collect)
    yield trainer
    log.removeFilter(collect)


def made_up(strategy: Any, count: int, name: str, marked: bool):
    def decorate(function: Any) -> None:
        chosen = settings(
            max_examples=count,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )

        def shown(record: Any) -> None:
            note(f"In {name}{', with its marks' if marked else ''}:")
            note(json.dumps(record, ensure_ascii=False))
            function(record)

        seed(zlib.crc32(f"{name} {marked} {SEED}".encode()))(chosen(given(strategy)(shown)))()

    return decorate


def is_whole(model: Model, record: dict) -> bool:
    messages, tools = messages_of(record), record.get("tools", [])
    try:
        text = model.render(messages, tools or None, tokenize=False)
    except Exception:  # a template can raise anything
        return False
    texts = [text for message in messages for text, _ in texts_of(message)]
    return all(is_in(each, text) for each in [*texts, *(t["function"]["name"] for t in tools)])


def reason(error: MespError) -> str:
    text = re.sub(r"^Line 1 of \S+?(?= has| cannot|:):?|\d+ more of .*", "", error.message)
    return re.sub(r'"[^"]*"|\d+', "…", re.sub(r"/\S+", "…", text))[:110].strip()


@pytest.mark.parametrize(("name", "marked"), VARIANTS)
def test_what_is_trained_is_what_was_answered(name, marked, trainer, figures):
    model = Model(name, marked)
    own: Counter[str] = Counter()

    @made_up(conversations(), EXAMPLES, name, marked)
    def _(record):
        messages, tools = messages_of(record), record.get("tools")
        answers = [i for i, each in enumerate(messages) if each["role"] == "assistant"]
        for loss_on in ("answers", "last", "all"):
            trained = trained_of(record, loss_on)
            own["tried"] += 1
            try:
                (example,) = trainer(model, record, loss_on=loss_on)
            except MespError as error:
                own["refused"] += 1
                figures[f"refused: {reason(error)}"] += 1
                own["refused wrongly"] += (
                    loss_on == "answers" and trained != [] and is_whole(model, record)
                )
                continue
            check_whole(model, messages, tools, trained, example.ids, " ".join(trainer.said))
            own["accepted"] += 1
            if loss_on == "all" or not trained:
                continue
            check_answers(model, messages, trained, example)
            if loss_on == "last":
                check_asked(model, messages[:-1], tools, example)
            elif model.marked and trained == answers:
                same = check_like_trl(model, messages, tools, example)
                figures["equal to TRL's" if same else "equal to TRL's but for the tables"] += 1

    figures.update({f"conversations {key}": value for key, value in own.items()})
    figures["templates in which all is right"] += 1
    assert own["tried"] - own["refused"] >= ACCEPTED * own["tried"], own


@pytest.mark.parametrize(("name", "marked"), VARIANTS)
def test_questions_and_answers_are_never_refused(name, marked, trainer, figures):
    model = Model(name, marked)
    for kinds in (QUESTIONS_AND_ANSWERS, replace(QUESTIONS_AND_ANSWERS, system=True)):

        @made_up(conversations(kinds), EXAMPLES // 3, name, marked)
        def _(record):
            messages = messages_of(record)
            if messages[0]["role"] == "system" and not is_whole(model, record):
                return
            trained = trained_of(record, "answers")
            (example,) = trainer(model, record)
            check_whole(model, messages, None, trained, example.ids, "")
            check_answers(model, messages, trained, example)
            figures["plain conversations"] += 1


@pytest.mark.parametrize(("name", "marked"), VARIANTS)
def test_preferences_train_their_answers(name, marked, trainer, figures):
    model = Model(name, marked)

    @made_up(pairs(), EXAMPLES // 2, name, marked)
    def _(record):
        chosen, rejected = (said_by("assistant", record[key]) for key in ("chosen", "rejected"))
        prompt = said_by("user", record.get("prompt", []))
        figures["pairs tried"] += 1
        try:
            found = trainer(model, record)
        except MespError as error:
            figures["pairs refused"] += 1
            figures[f"refused: {reason(error)}"] += 1
            return
        said = " ".join(trainer.said)
        assert len(found) == 2
        if not prompt:
            prompt = [a for a, b in zip(chosen, rejected, strict=False) if a == b]
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        for example, answer in zip(found, (chosen, rejected), strict=True):
            messages = messages_of({"prompt": prompt, "completion": answer})
            trained = trained_of({"prompt": prompt, "completion": answer}, "answers")
            check_whole(model, messages, record.get("tools"), trained, example.ids, said)
            check_answers(model, messages, trained, example)
            if len(answer) == 1:
                check_asked(model, messages[:-1], record.get("tools"), example)
        if "prompt" in record:
            labelled = [
                {"prompt": record["prompt"], "completion": record[key], "label": key == "chosen"}
                | {key: record[key] for key in ("tools",) if key in record}
                for key in ("chosen", "rejected")
            ]
            assert [e[:2] for e in trainer(model, *labelled)] == [e[:2] for e in found]


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "gemma3", "glm4moe"])
def test_a_record_is_the_same_among_others(name, trainer):
    model = Model(name, marked=False)

    @made_up(st.lists(conversations(QUESTIONS_AND_ANSWERS), min_size=2, max_size=4), 8, name, False)
    def _(records):
        alone = [trainer(model, record)[0] for record in records]
        assert [e[:2] for e in trainer(model, *records)] == [e[:2] for e in alone]


def test_few_are_refused_wrongly(figures):
    tried, wrongly = figures["conversations tried"], figures["conversations refused wrongly"]
    assert wrongly <= REFUSED_WRONGLY * tried / 3, f"{wrongly} of {tried}, each in three ways"
