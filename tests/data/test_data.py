import json
import os
import shutil
import sys
import unicodedata
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.tuner.datasets import CacheDataset, create_dataset
from mlx_lm.tuner.trainer import default_loss, iterate_batches
from mlx_lm.utils import load_model

from helpers.commands import call, refused, run
from helpers.data import assistant, examples_of, load, load_records, user, write_records
from helpers.models import TEXT, TINY, byte_tokenizer
from helpers.paths import DEMO_MODEL
from mesp import reference
from mesp.adapters.held_out_loss import read_sequences
from mesp.bundle.data_files import replace_data
from mesp.bundle.reader import Bundle
from mesp.data.load import load_additional, make_random_data
from mesp.data.plain_text import cut_text
from mesp.data.python_docs import python_docs
from mesp.data.splits import Split
from mesp.data.tokenizer import load_tokenizer
from mesp.errors import MespError

VOCABULARY = TINY["vocab_size"]


@pytest.fixture(scope="session")
def tokenizer(tiny):
    return load_tokenizer(tiny)


def tokens(splits: dict[str, Split]) -> np.ndarray:
    return np.concatenate([splits["train"].tokens, splits["valid"].tokens])


def assert_same(actual: dict[str, Split], expected: dict[str, Split]) -> None:
    assert actual.keys() == expected.keys()
    for split, name in product(expected, ("tokens", "examples", "mask")):
        found, wanted = (getattr(each[split], name) for each in (actual, expected))
        np.testing.assert_array_equal(found, wanted)


def test_text_file_without_a_valid_split_is_cut(tokenizer, text):
    splits = load(text, tokenizer, 32)
    whole = [*tokenizer.encode(TEXT), tokenizer.eos_token_id]
    assert tokens(splits).tolist() == whole
    assert len(splits["valid"].tokens) == len(whole) // 10
    assert splits["train"].tokens.dtype == np.uint32


def test_held_out_part_is_a_sequence_at_least(tokenizer, text):
    assert len(load(text, tokenizer, 500)["valid"].tokens) == 501


def test_folder_with_splits(tokenizer, tmp_path):
    for split, name in (("train", "train.txt"), ("valid", "valid.jsonl"), ("test", "test.txt")):
        content = f"{split} " * 50
        if name.endswith("jsonl"):
            content = json.dumps({"text": content})
        (tmp_path / name).write_text(content)
    splits = load(tmp_path, tokenizer, 8)
    assert list(splits) == ["train", "valid", "test"]
    for split, each in splits.items():
        assert tokenizer.decode(each.tokens[:-1]) == f"{split} " * 50


def test_the_words_of_a_text_are_no_columns(tokenizer, tmp_path):
    text = "A prompt, a completion, what is chosen and what is rejected, and messages. " * 20
    (tmp_path / "text.txt").write_text(text)
    split = load_additional(str(tmp_path / "text.txt"), tokenizer, 32, VOCABULARY, {})
    assert tokenizer.decode(split.tokens[:-1]) == text


def test_the_mark_that_windows_begins_a_file_with_is_no_text(tokenizer, tmp_path):
    for suffix, content in ((".txt", "Some words. " * 40), (".jsonl", '{"text": "Words."}\n' * 40)):
        marked, plain = (tmp_path / f"{name}{suffix}" for name in ("marked", "plain"))
        marked.write_text(content, encoding="utf-8-sig")
        plain.write_text(content, encoding="utf-8")
        found, expected = (tokens(load(each, tokenizer, 16)) for each in (marked, plain))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("adds_begin", [True, False])
def test_windows_of_a_packed_text_begin_as_the_tokenizer_begins_texts(tmp_path, adds_begin):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer = byte_tokenizer(folder, has_begin=True, adds_begin=adds_begin)
    begin = [tokenizer.bos_token_id] if adds_begin else []
    (tmp_path / "text.txt").write_text("abcdefgh" * 8)
    stream = [*begin, *b"abcdefgh" * 8, tokenizer.eos_token_id]
    splits = load(tmp_path / "text.txt", tokenizer, 8)
    assert tokens(splits).tolist() == stream
    expected = tokenizer.bos_token_id if adds_begin else None
    assert all(split.begin == expected for split in splits.values())


def test_long_text_is_cut_without_loss(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    text = "Some words,\n\n  indented \n\t and\n\n\nmore 1234 words!\n = Title = \n" * 40
    path.write_text(text)
    whole = load(path, tokenizer, 16)
    monkeypatch.setattr(cut_text, "__defaults__", (50,))
    pieces = load(path, tokenizer, 16)
    assert tokenizer.decode(tokens(pieces)) == text + tokenizer.eos_token
    assert abs(len(tokens(pieces)) - len(tokens(whole))) < 40


def test_python_docs_are_split_without_overlap(tokenizer):
    documents = {
        split: [each.text for each in split_documents]
        for split, split_documents in python_docs().items()
    }
    sizes = {split: sum(map(len, texts)) for split, texts in documents.items()}
    assert sizes["train"] > 150_000 and 0.05 < sizes["valid"] / sizes["train"] < 0.2
    paragraphs = {s: {p for t in texts for p in t.split("\n\n")} for s, texts in documents.items()}
    assert not paragraphs["train"] & paragraphs["valid"]
    assert python_docs() == python_docs()


def test_random_data():
    splits = make_random_data(vocab_size=512, seq_len=16, seed=1)
    for split in splits.values():
        assert (len(split.tokens) - 1) // 16 == 64 and split.tokens.max() < 512
    assert (splits["train"].tokens == make_random_data(512, 16, 1)["train"].tokens).all()
    assert (splits["train"].tokens != splits["valid"].tokens).any()


MESSAGES = '{"messages": [{"role": "assistant", "content": "a"}]}\n'
BEGAN = "is a conversation, and the data began with a text"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "no train.jsonl, train.txt or other file"),
        ({"valid.txt": TEXT}, "no train.jsonl, train.txt or other file"),
        ({"train.txt": TEXT, "train.jsonl": "{}"}, "both train.jsonl and train.txt"),
        ({"train.txt": ""}, r"train\.txt has no text"),
        ({"train.txt": " \n\n"}, r"train\.txt has no text"),
        ({"train.txt": b"\xff\xfe"}, "not UTF-8"),
        ({"train.txt": "Too short."}, "too few to train on"),
        ({"train.txt": TEXT, "valid.txt": "Too short."}, "valid data .* less than one sequence"),
        ({"train.txt": "Too short.", "valid.txt": TEXT}, "train data .* less than one sequence"),
        ({"train.txt": TEXT, "test.txt": "Too short."}, "test data .* less than one sequence"),
        ({"train.txt": TEXT, "valid.jsonl": MESSAGES}, rf"Line 1 of .*valid\.jsonl {BEGAN}"),
        ('{"text": "a"}\nnot json', "Line 2 of .*not JSON"),
        ('["text"]', "Record 1 .* is not an object"),
        ('{"text": 3}', 'Line 1 .* has a "text" that is not a string'),
        ('{"prompt": "a"}', "Line 1 .* has prompt; records have"),
        ("{}", "Line 1 .* has nothing; records have"),
        ('{"prompt": "a", "completion": ["b"]}', "a .completion. that is neither a"),
        ('{"messages": []}', 'Line 1 .* has a "messages" that is no list of messages'),
        ('{"messages": ["hello"]}', 'Line 1 .* has a "messages" that is no list'),
        ('{"messages": [{"content": "a"}]}', "Line 1 .* message 1 without a .role."),
        (MESSAGES * 2, "no chat template"),
        (f'{{"text": "a"}}\n\n{MESSAGES}', f"Line 3 .* {BEGAN}"),
        ('{"text": "\\ud800"}', "Line 1 .* has half a character"),
        ("[" * 100_000, r"train\.jsonl is not JSON"),
        ("", r"train\.jsonl has no text"),
    ],
)
def test_bad_data_is_named(tokenizer, tmp_path, files, named):
    for name, content in (files if isinstance(files, dict) else {"train.jsonl": files}).items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(MespError, match=named):
        load(tmp_path, tokenizer, 32)


def test_unknown_data_is_named(tokenizer):
    with pytest.raises(MespError, match=r"no data nothing\.txt; .*python-docs"):
        load(Path("nothing.txt"), tokenizer)


def test_pieces_add_up():
    text = "line\n\n  indented\nline\n" * 20
    pieces = list(cut_text(text, 30))
    assert "".join(pieces) == text
    assert all(a.endswith("\n") and not b[:2].isspace() for a, b in pairwise(pieces))


TEMPLATE = """{% if tools %}Tools:{% for tool in tools %} {{ tool | tojson }}{% endfor %}
{% endif %}{% for m in messages %}{% if m.role == "owner" %}{{ raise_exception("No owners.") }}\
{% endif %}{{ m.role }}:
{{ m.content }}{% for call in m.tool_calls or [] %} call \
{{ call.function | tojson }}{% endfor %}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}assistant:
{% endif %}"""
TOOLS = [{"type": "function", "function": {"name": "capital", "parameters": {"type": "object"}}}]
CALL = [{"type": "function", "function": {"name": "capital", "arguments": {"of": "France"}}}]
RECORDS = {
    "text": [{"text": f"A record of text, number {i}.\nIt has two lines."} for i in range(12)]
    + [{"text": "x"}, {"text": "It ends so already.<|endoftext|>"}],
    "completions": [{"prompt": f"What is {i} + {i}?", "completion": f"{2 * i}"} for i in range(12)]
    + [
        {"prompt": "", "completion": "No\u2028prompt."},
        {"prompt": "Capital of France?", "completion": "Paris", "tools": TOOLS},
    ],
    "chat": [{"messages": [user(f"Hello {i}"), assistant("Ünïcode ✓ " * i)]} for i in range(1, 13)]
    + [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                *(user("Capital of France?"), assistant("", tool_calls=CALL)),
                *({"role": "tool", "content": "Paris"}, assistant("Paris.")),
            ],
            "tools": TOOLS,
        },
        {"messages": [assistant("Yes?"), user("It ends with the user.")]},
    ],
}


@pytest.fixture(scope="session")
def chat_tokenizer():
    tokenizer = load_tokenizer(DEMO_MODEL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.has_chat_template = True
    return tokenizer


def mlx_lm_dataset(records: list[dict], tokenizer, mask_prompt: bool):
    return create_dataset(records, tokenizer, SimpleNamespace(mask_prompt=mask_prompt))


def ends_with_an_answer(record: dict) -> bool:
    return "messages" not in record or record["messages"][-1]["role"] == "assistant"


def examples(split: Split) -> list[tuple[list[int], int]]:
    found = [(ids, mask, mask.count(0)) for ids, mask in examples_of(split)]
    assert all(all(mask[prompt:]) for _, mask, prompt in found), "only what is in front is masked"
    return [(ids, prompt) for ids, _, prompt in found]


OF_KINDS = [("text", "all"), *product(("completions", "chat"), ("all", "last"))]


@pytest.mark.parametrize(("kind", "loss_on"), OF_KINDS)
def test_examples_are_what_mlx_lm_makes_of_the_records(
    chat_tokenizer, tmp_path, capsys, kind, loss_on
):
    mask_prompt = loss_on == "last"
    records = [each for each in RECORDS[kind] if not mask_prompt or ends_with_an_answer(each)]
    for split in ("train", "valid", "test"):
        write_records(tmp_path / f"{split}.jsonl", records)
    splits = load(tmp_path, chat_tokenizer, 512, loss_on=loss_on)
    dataset = mlx_lm_dataset(records, chat_tokenizer, mask_prompt)
    expected = [dataset.process(record) for record in records]
    assert any(prompt for _, prompt in expected) == mask_prompt
    for split in splits.values():
        assert examples(split) == expected
        assert split.tokens.dtype == split.examples.dtype == np.uint32
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_packed_examples_are_the_same_examples(chat_tokenizer, tmp_path, kind):
    packed, alone = (
        load_records(tmp_path, RECORDS[kind], chat_tokenizer, 512, pack=pack)
        for pack in (True, False)
    )
    assert_same(packed, alone)
    assert all(packed[split].pack and not alone[split].pack for split in packed)


def test_packed_texts_follow_each_other(chat_tokenizer, tmp_path):
    splits = load_records(tmp_path, RECORDS["text"], chat_tokenizer, 16, pack=True)
    dataset = mlx_lm_dataset(RECORDS["text"], chat_tokenizer, mask_prompt=False)
    whole = [token for record in RECORDS["text"] for token in dataset.process(record)[0]]
    assert tokens(splits).tolist() == whole
    assert splits["train"].examples is None
    assert splits["train"].mask is None
    assert not splits["train"].pack


def test_a_long_text_of_a_record_is_split_and_its_tokens_are_each_predicted_once(
    chat_tokenizer, tmp_path
):
    alone = load_records(tmp_path, RECORDS["text"], chat_tokenizer, 512)
    split = load_records(tmp_path, RECORDS["text"], chat_tokenizer, 6)
    for name, each in alone.items():
        predicted = [ids[1:] for ids, _ in examples(each)]
        pieces = [ids for ids, _ in examples(split[name])]
        assert [x for ids in pieces for x in ids[1:]] == [x for ids in predicted for x in ids]
        assert all(len(ids) <= 7 for ids in pieces)


def test_the_last_tenth_of_the_records_is_held_out(chat_tokenizer, tmp_path):
    records = RECORDS["completions"] * 3
    splits = load_records(tmp_path, records, chat_tokenizer, 512, loss_on="all")
    dataset = mlx_lm_dataset(records, chat_tokenizer, mask_prompt=False)
    assert examples(splits["valid"]) == [dataset.process(record) for record in records[-4:]]
    assert len(splits["train"].examples) == len(records) - 4
    with pytest.raises(MespError, match=r"has one record, too few .* with `hold_out` 0"):
        load_records(tmp_path, records[:1], chat_tokenizer)


def test_another_part_is_held_out_or_none(chat_tokenizer, tokenizer, text, tmp_path):
    records = RECORDS["completions"] * 3
    path = write_records(tmp_path / "data.jsonl", records)
    assert len(load(path, chat_tokenizer, 512, hold_out=0.5)["valid"].examples) == 21
    assert [*load(path, chat_tokenizer, 512, hold_out=0)] == ["train"]
    one = load(write_records(path, records[:1]), chat_tokenizer, 512, hold_out=0)
    assert len(one["train"].examples) == 1
    whole = load(text, tokenizer, 32, hold_out=0)
    assert [*whole] == ["train"]
    parts = tokens(load(text, tokenizer, 32, hold_out=0.3))
    assert whole["train"].tokens.tolist() == parts.tolist()
    (tmp_path / "short.txt").write_text("Too short for two sequences of so many tokens.")
    with pytest.raises(MespError, match=r"too few to train on .* with `hold_out` 0\."):
        load(tmp_path / "short.txt", tokenizer, 30)
    assert [*load(tmp_path / "short.txt", tokenizer, 30, hold_out=0)] == ["train"]
    with pytest.raises(MespError, match=r"`hold_out` is 0 or more and below 1, and not 1\.5"):
        load(text, tokenizer, hold_out=1.5)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("train.jsonl", "dev.jsonl"):
        write_records(folder / name, records)
    splits = load(folder, chat_tokenizer, 512, hold_out=0.5)
    assert [len(split.examples) for split in splits.values()] == [42, 42]


@pytest.mark.parametrize("mask_prompt", [False, True])
@pytest.mark.parametrize("long", ["cut", "split"])
def test_long_records(chat_tokenizer, tmp_path, caplog, mask_prompt, long):
    seq_len = 24
    records = [
        {"prompt": "word " * prompt, "completion": "next " * completion}
        for prompt, completion in ((1, 1), (3, 90), (40, 40), (90, 3), (0, 24), (2, 20))
    ]
    for split in ("train", "valid"):
        write_records(tmp_path / f"{split}.jsonl", records)
    loss_on = "last" if mask_prompt else "all"
    split = load(tmp_path, chat_tokenizer, seq_len, loss_on=loss_on, long=long)["train"]
    dataset = mlx_lm_dataset(records, chat_tokenizer, mask_prompt)
    whole = [dataset.process(record) for record in records]
    longer = [(ids, prompt) for ids, prompt in whole if len(ids) > seq_len + 1]

    def targets(ids: list[int], prompt: int) -> list[tuple[int, int]]:
        return [(ids[i - 1], ids[i]) for i in range(max(prompt, 1), len(ids))]

    if long == "cut":
        whole = [(ids[: seq_len + 1], prompt) for ids, prompt in whole]
        assert examples(split) == [each for each in whole if targets(*each)]
    counted = [target for each in examples(split) for target in targets(*each)]
    assert counted == [target for each in whole for target in targets(*each)]
    for ids, prompt in examples(split):
        assert 2 <= len(ids) <= seq_len + 1 and prompt < len(ids)
    lost = sum(not targets(*each) for each in whole)
    assert lost == (2 if mask_prompt and long == "cut" else 0)
    assert (split.too_long, split.no_room) == (len(longer) - lost, lost)
    (line,) = caplog.messages
    count = len(longer) - lost
    said = f"Records longer than 25 tokens were {long}: {count} in train, {count} in valid."
    if lost:
        said += " Records whose prompt fills 25 tokens were left out: "
        said += f"{lost} in train, {lost} in valid."
    assert line == said


def test_text_that_fills_no_sequence_is_counted(chat_tokenizer, tmp_path, caplog):
    path = write_records(tmp_path / "notes.jsonl", [{"text": f"Note {n}."} for n in range(20)])
    load(path, chat_tokenizer, 100, hold_out=0)
    assert "fill no sequence" not in caplog.text
    tokens = len(load(path, chat_tokenizer, 100, hold_out=0, pack=True)["train"].tokens)
    assert f"The last {(tokens - 1) % 100} of {tokens} train tokens fill no sequence" in caplog.text


@pytest.mark.parametrize("pack", [False, True])
def test_empty_records_are_left_out_and_counted(chat_tokenizer, tmp_path, caplog, pack):
    records = [{"text": ""}, *RECORDS["text"] * 2, {"text": ""}]
    # The stream fills three sequences.
    splits = load(write_records(tmp_path / "a.jsonl", records), chat_tokenizer, 107, pack=pack)
    full = load(write_records(tmp_path / "b.jsonl", records[1:-1]), chat_tokenizer, 107, pack=pack)
    assert tokens(splits).tolist() == tokens(full).tolist()
    (line,) = caplog.messages
    counts = "2 in train" if pack else "1 in train, 1 in valid"
    assert line == f"Records with nothing to predict were left out: {counts}."


def test_records_with_control_tokens_in_a_text_are_counted(chat_tokenizer, tmp_path, caplog):
    end = chat_tokenizer.eos_token
    texts = [f"a{end}b", "a", f"c {end} d"]
    records = [{"prompt": text, "completion": f"yes{end}"} for text in texts for _ in range(2)]
    data = write_records(tmp_path / "a.jsonl", records)
    load(data, chat_tokenizer, 64, chat=False)
    note = "Records with control tokens in their text, which the model reads as such without "
    assert f"{note}--split-special-tokens: 4." in caplog.text
    caplog.clear()
    load(write_records(tmp_path / "b.jsonl", records[2:4]), chat_tokenizer, 64, chat=False)
    assert "control tokens" not in caplog.text


OWNER = {"role": "owner", "content": "a"}
LONG = [user("long " * 90), assistant("a")]


@pytest.mark.parametrize(
    ("records", "options", "named"),
    [
        ("text", {"loss_on": "last"}, "has text, .* leave out `loss_on` last"),
        ("text", {"loss_on": "answers", "pack": False}, "has text, .* leave out `loss_on` answers"),
        ([assistant("Alone.")], {"loss_on": "last"}, "Line 1 .* has one message"),
        ([user("Alone.")] * 90, {"pack": True}, "No record .* has an answer to train"),
        ([user("Alone.")], {}, "No record of the train data .* has an answer to train"),
        ([OWNER, assistant("b")], {}, "Line 1 .* cannot be tokenized: No owners"),
        (LONG, {}, "no example with something to predict in its first"),
    ],
)
def test_records_that_cannot_be_taken(chat_tokenizer, tmp_path, records, options, named):
    records = RECORDS[records] if isinstance(records, str) else [{"messages": records}] * 2
    with pytest.raises(MespError, match=named):
        load_records(tmp_path, records, chat_tokenizer, 32, **options)


def test_a_text_file_has_no_examples(tokenizer, text):
    with pytest.raises(MespError, match="leave out `pack=False`"):
        load(text, tokenizer, pack=False)


def test_the_loss_is_mlx_lms(chat_tokenizer, tmp_path):
    seq_len, records = 40, [*filter(ends_with_an_answer, RECORDS["chat"])]
    for name in ("train.jsonl", "valid.jsonl"):
        write_records(tmp_path / name, records)
    split = load(tmp_path, chat_tokenizer, seq_len, loss_on="last")["train"]
    model, _ = load_model(DEMO_MODEL)
    model.set_dtype(mx.float32)

    total, count = 0.0, 0
    for ids, prompt in examples(split):
        logits = np.array(model(mx.array(ids)[None, :-1])[0], np.float64)
        peak = logits.max(-1)
        log_sum = peak + np.log(np.exp(logits - peak[:, None]).sum(-1))
        for target in range(max(prompt, 1), len(ids)):
            total += log_sum[target - 1] - logits[target - 1, ids[target]]
            count += 1

    # The records that have a target within their first `seq_len` + 1 tokens, as one batch of
    # mlx-lm.
    dataset = mlx_lm_dataset(records, chat_tokenizer, mask_prompt=True)
    usable = [
        record
        for record in records
        if dataset.process(record)[1] < min(len(dataset.process(record)[0]), seq_len + 1)
    ]
    dataset = CacheDataset(mlx_lm_dataset(usable, chat_tokenizer, mask_prompt=True))
    ((batch, ranges),) = iterate_batches(dataset, len(usable), seq_len + 1)
    # mlx-lm's default_loss counts the targets from `offset` to `length`, both included. In a padded
    # example, it would also count the first token of the padding. So `length` is less by 1 here.
    loss, counted = default_loss(model, batch, ranges - mx.array([0, 1]))
    assert counted.item() == count
    # default_loss computes in float32.
    assert loss.item() == pytest.approx(total / count, rel=1e-4)


def test_step_example_takes_each_that_has_a_target_once_an_epoch():
    prompts = {(0, 9): 0, (9, 40): 12, (49, 40): 17, (89, 2): 1, (91, 17): 16, (108, 30): 16}
    mask = np.ones(138, np.uint8)
    for (start, _), prompt in prompts.items():
        mask[start : start + prompt] = 0
    taken = [reference.step_example(step, 3, list(prompts), mask, 16) for step in range(5)]
    assert sorted(taken) == [(0, 9), (9, 17), (89, 2), (91, 17), (108, 17)]
    order = [reference.step_window(step, 3, 5) for step in range(5)]
    assert taken == [sorted(taken)[window] for window in order]


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    shutil.copytree(tiny, folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "text.txt").write_text(TEXT)
    options = ("--data", folder / "text.txt", "--seq-len", "24,16", "--out", folder / "tiny.mesp")
    call("export", "--model", folder / "model", *options)
    return folder / "tiny.mesp"


@pytest.fixture
def bundle(exported, tmp_path) -> Path:
    return shutil.copytree(exported, tmp_path / "copy.mesp")


def manifest_of(bundle: Path) -> dict:
    return json.loads((bundle / "manifest.json").read_text())


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def assert_whole(path: Path) -> dict[str, Split]:
    bundle = Bundle(path)
    bundle.verify()
    splits = {
        split: Split(bundle.tokens(split), bundle.examples(split), bundle.mask(split))
        for split in bundle.manifest.data
    }
    for split, entry in bundle.manifest.data.items():
        assert entry.tokens == len(splits[split].tokens)
        if entry.examples is not None:
            assert entry.count == len(splits[split].examples)
    return splits


def test_a_bundle_says_how_its_text_became_tokens(bundle, tmp_path):
    end = load_tokenizer(bundle).eos_token
    record = {"prompt": "a", "completion": f"{end}."}
    path = write_records(tmp_path / "a.jsonl", [record] * 3)
    assert "end token in its answer" in refused(run("data", bundle, "--data", path, "--no-chat"))
    done = call("data", bundle, "--data", path, "--no-chat", "--split-special-tokens")
    assert f"a⟦{end}.{end}⟧" in done.stdout
    entries = manifest_of(bundle)
    assert entries["encoding"] == {"chat": False, "split_special_tokens": True}
    assert_whole(bundle)
    path.write_text('{"text": "words and words"}\n' * 90)
    call("data", bundle, "--data", path)
    assert "encoding" not in manifest_of(bundle)
    for encoding in ([], {"chat": 1}, {"other": True}):
        (bundle / "manifest.json").write_text(json.dumps(entries | {"encoding": encoding}))
        assert "manifest" in refused(run("data", bundle))


def test_a_bundle_says_what_windows_begin_with(bundle):
    stream = np.arange(40, dtype=np.uint32)
    plain = {"train": Split(stream), "valid": Split(stream)}
    replace_data(bundle, plain)
    windows = [ids for ids, _ in read_sequences(Bundle(bundle), "valid", 16)]
    replace_data(bundle, plain | {"valid": Split(stream, begin=63)})
    begun = [ids for ids, _ in read_sequences(Bundle(bundle), "valid", 16)]
    assert len(begun) == len(windows) == 2
    for before, after in zip(windows, begun, strict=True):
        assert after.tolist() == [63, *before[1:]]
    assert Bundle(bundle).begin("train") is None


def test_data_is_replaced_with_the_bundles_tokenizer(bundle, tmp_path):
    chat = write_records(tmp_path / "chat.jsonl", RECORDS["chat"][::-1])
    text = tmp_path / "text.txt"
    text.write_text(TEXT[: len(TEXT) // 2])
    before = files(bundle)
    tokenizer = load_tokenizer(bundle)
    for path, options, arguments in (
        (chat, {"loss_on": "last", "long": "split"}, ["--mask-prompt", "--long", "split"]),
        (chat, {"loss_on": "last"}, ["--loss-on", "last"]),
        (chat, {"pack": True}, ["--pack"]),
        (chat, {}, []),
        (text, {}, []),
    ):
        result = call("data", bundle, "--data", path, *arguments)
        expected = load(path, tokenizer, 24, **options)
        assert_same(assert_whole(bundle), expected)
        listed = {file["path"] for file in manifest_of(bundle)["files"]}
        assert {*files(bundle)} == listed | {"manifest.json"}
        counts = (
            f"{len(expected['train'].examples)} train example"
            if expected["train"].examples is not None
            else f"{len(expected['train'].tokens):,} train tokens"
        )
        assert str(bundle) in result.stdout and counts in result.stdout
    unchanged = [name for name in before if not name.startswith(("data", "manifest"))]
    assert {name: files(bundle)[name] for name in unchanged} == {n: before[n] for n in unchanged}


def test_records_are_shown_as_they_are_trained(tmp_path):
    records = [{"prompt": f"Time {i}?", "completion": "It is\nnoon.", "id": i} for i in range(4)]
    path = write_records(tmp_path / "data.jsonl", records)
    out = tmp_path / "demo.mesp"
    exported = call("export", "--model", "demo", "--seq-len", 64, "--data", path, "--out", out)
    shown = "user: Time {}?↵\nassistant:⟦ It is↵\nnoon.<|endoftext|>↵\n⟧\n"
    assert shown.format(0) in exported.stdout and "Time 1?" not in exported.stdout

    done = call("data", out, "--data", path, "--show", 2)
    assert "Record 1 of 3: 22 tokens, 9 in the loss\n" + shown.format(0) in done.stdout
    assert shown.format(1) in done.stdout and "Time 2?" not in done.stdout
    assert done.stdout.endswith("Generation stops at <|endoftext|>.\n")
    assert done.stderr == "Columns that were not read: id.\n"
    again = call("data", out, "--show", 2)
    assert done.stdout.endswith(again.stdout) and again.stdout.startswith("Record 1 of 3")
    assert "Time 1?" not in call("data", out).stdout
    wrong = refused(run("data", out, "--show", 1, "--pack"))
    assert wrong == "Name the new data with --data, which --pack is about."


def test_characters_that_show_nothing_are_shown_as_escapes(tmp_path):
    kinds = ("Cc", "Cf", "Zl", "Zp", "Zs")
    every = [chr(i) for i in range(0x110000) if unicodedata.category(chr(i)) in kinds]
    # The tokenizer puts two of them into their normal form.
    every = [each for each in every if unicodedata.normalize("NFC", each) == each]
    blank = [each for each in every if each not in " \n\t"]
    assert {*"\r\xa0\u200b\u200d\u2028\ufeff"} <= {*blank}
    answers = ["y".join(["", *blank[i : i + 40], ""]) for i in range(0, len(blank), 40)]
    records = [{"prompt": "a", "completion": each} for each in answers]
    path, out = write_records(tmp_path / "data.jsonl", records), tmp_path / "demo.mesp"
    options = ("--data", path, "--no-chat", "--hold-out", 0, "--out", out)
    call("export", "--model", "demo", "--seq-len", 512, *options)
    shown = call("data", out, "--show", len(records)).stdout
    assert not {*shown} & {*blank}
    for answer in answers:
        assert f"a⟦{answer.encode('unicode_escape').decode()}<|endoftext|>⟧" in shown


def test_export_takes_the_same_options(exported, tmp_path):
    chat = write_records(tmp_path / "chat.jsonl", RECORDS["chat"])
    model, out = exported.parent / "model", tmp_path / "b.mesp"
    options = ("--data", chat, "--mask-prompt", "--long", "split", "--out", out)
    result = call("export", "--model", model, "--seq-len", 24, *options)
    tokenizer = load_tokenizer(exported)
    expected = load(chat, tokenizer, 24, loss_on="last", long="split")
    assert_same(assert_whole(out), expected)
    assert f"{len(expected['train'].examples)} train examples" in result.stdout
    assert "were split" in result.stderr
    without = run("export", "--model", model, "--mask-prompt")
    assert without.returncode == 2 and "name it too" in without.stderr


def test_data_that_is_refused_changes_nothing(bundle, tmp_path):
    before = files(bundle)
    (tmp_path / "bad.jsonl").write_text("not json")
    said = refused(run("data", bundle, "--data", tmp_path / "bad.jsonl"))
    assert said.startswith("Line 1 of ")
    (tmp_path / "ids.txt").write_text(TEXT)
    manifest = manifest_of(bundle)
    manifest["architecture"]["vocab_size"] = 100
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    text = ("--data", tmp_path / "ids.txt")
    assert "do not belong together" in run("data", bundle, *text).stderr
    (bundle / "manifest.json").write_bytes(before["manifest.json"])
    (bundle / "tokenizer_config.json").rename(tmp_path / "moved.json")
    assert "manifest" not in run("data", tmp_path / "no.mesp", "--data", "x").stdout
    assert "is missing" in run("data", bundle, *text).stderr
    (tmp_path / "moved.json").rename(bundle / "tokenizer_config.json")
    assert files(bundle) == before


def test_a_full_disk_keeps_the_old_data(bundle, monkeypatch):
    before = files(bundle)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mesp.bundle.data_files.create", full)
    with pytest.raises(MespError, match="the disk is full"):
        replace_data(bundle, make_random_data(VOCABULARY, 24, 0))
    assert files(bundle) == before


@pytest.mark.slow
def test_killed_between_any_two_changes_it_leaves_a_whole_bundle(bundle):
    old = assert_whole(bundle)
    new = make_random_data(VOCABULARY, 24, 0)
    original = files(bundle)
    modules = ("bundle.data_files", "folders", "bundle.manifest")
    sources = [sys.modules[f"mesp.{name}"].__file__ for name in modules]
    reading = {"of", "to_json", "fits", "_is_line", "_is_split", "sizes", "<genexpr>", "<listcomp>"}

    def state() -> list[tuple]:
        there = {path: path.lstat() for path in bundle.parent.rglob("*")}
        return [(path, s.st_ino, s.st_size, s.st_mtime_ns) for path, s in sorted(there.items())]

    def killed_after(changes: int) -> bool:
        child = os.fork()
        if child == 0:
            left, found = changes, None

            def trace(frame, event, _):
                nonlocal left, found
                if frame.f_code.co_filename not in sources or frame.f_code.co_name in reading:
                    return None
                if event == "line" and (now := state()) != found:
                    found, left = now, left - 1
                    if left < 0:
                        os._exit(9)
                return trace

            sys.settrace(trace)
            replace_data(bundle, new)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9

    changes, seen = 0, set()
    while killed_after(changes):
        splits = assert_whole(bundle)
        seen.add(replaced := len(splits["train"].tokens) == len(new["train"].tokens))
        assert_same(splits, new if replaced else old)
        if replaced:
            for name in ("manifest.json", *(n for n in original if n.startswith("data/"))):
                (bundle / name).parent.mkdir(exist_ok=True)
                (bundle / name).write_bytes(original[name])
        changes += 1
    assert changes > 8 and seen == {False, True}
    assert_same(assert_whole(bundle), new)
    listed = {file["path"] for file in manifest_of(bundle)["files"]}
    assert {*files(bundle)} == listed | {"manifest.json"}


def calls(call: dict) -> dict:
    return assistant("", tool_calls=[call])


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (assistant([{"type": "text", "text": "b", "train": False}]),
         'Line 1 .* has "train", which .* with `ignore` train'),
        (calls({"function": {"name": "f", "parameters": {"a": 1}}}), '"parameters", which'),
        (calls({"function": {"name": "f", "arguments": []}}), "are not an object"),
        (calls({"function": {"name": "f", "arguments": '{"x": 1, "x": 2}'}}), "are no JSON"),
        (assistant("", function_call={"name": 1}), 'write it as "tool_calls"'),
        ({"prompt": "a", "completion": "b", "tools": [{"type": "web_search"}]}, "without a .name."),
        ({"prompt": "a", "completion": "b", "chat_template_kwargs": {"tokenize": True}}, "itself"),
        ({"prompt": "a", "completion": "b", "chat_template_kwargs": {"thinkinng": 1}}, "not read"),
        ({"prompt": "a", "completion": " "}, "empty answer"),
        ({"prompt": "a", "completion": ""}, "it has an empty completion"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused(chat_tokenizer, tmp_path, record, named):
    record = {"messages": [user("a"), record]} if "role" in record else record
    with pytest.raises(MespError, match=named):
        load_records(tmp_path, [record] * 2, chat_tokenizer)


def test_a_table_says_what_is_trained(chat_tokenizer, tmp_path):
    rows = "prompt,completion,weight\na,b,1\nc,d,0\ne,f,\ng,h,true\n"
    (tmp_path / "data.csv").write_text(rows)
    split = load(tmp_path / "data.csv", chat_tokenizer, 64, hold_out=0.0)["train"]
    assert len(split.examples) == 3


@pytest.mark.parametrize("answer", ["Paris<|endoftext|>\n", "Paris<|endoftext|>", "Paris"])
def test_an_answer_without_a_template_ends_once(tokenizer, tmp_path, answer):
    records = [{"prompt": "a ", "completion": answer}] * 2
    ids = load_records(tmp_path, records, tokenizer, hold_out=0.0)["train"].tokens.tolist()
    assert ids.count(tokenizer.eos_token_id) == 2


@pytest.mark.parametrize("answer", ["b<|endoftext|>c", "<|endoftext|>"])
def test_an_end_within_an_answer_without_a_template_is_refused(tokenizer, tmp_path, answer):
    with pytest.raises(MespError, match="an end token in its answer"):
        load_records(tmp_path, [{"prompt": "a ", "completion": answer}] * 2, tokenizer)


def test_a_prompt_that_the_answers_repeat_is_there_once(chat_tokenizer, tmp_path):
    asked, one, other = [user("q")], [assistant("a")], [assistant("b")]
    records = [
        {"prompt": asked, "chosen": one, "rejected": other},
        {"prompt": asked, "chosen": asked + one, "rejected": asked + other},
        {"prompt": "q ", "chosen": asked + one, "rejected": asked + other},
    ]
    completions = [{"prompt": asked, "completion": each} for each in (one, asked + one)]
    for alike in (records, completions):
        splits = (load_records(tmp_path, [record] * 2, chat_tokenizer) for record in alike)
        assert len({tuple(each["train"].tokens.tolist()) for each in splits}) == 1


def test_answers_of_the_same_tokens_are_no_pair(chat_tokenizer, tmp_path):
    long = {"prompt": "q", "chosen": "a " * 100 + "x", "rejected": "a " * 100 + "y"}
    path = write_records(tmp_path / "data.jsonl", [long] * 2)
    with pytest.raises(MespError, match="of the same tokens, as far as sequences of 65 hold"):
        load(path, chat_tokenizer, 64)
    with pytest.raises(MespError, match="leave out `long` split"):
        load(path, chat_tokenizer, 64, long="split")
