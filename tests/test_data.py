import json
from itertools import pairwise

import numpy as np
import pytest
from transformers import AutoTokenizer

from conftest import TEXT
from mesp import data
from mesp.errors import MespError


@pytest.fixture(scope="session")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


def test_text_file_without_a_valid_split_is_cut(tokenizer, text):
    streams = data.load(str(text), tokenizer, 32)
    whole = tokenizer(TEXT)["input_ids"] + [tokenizer.eos_token_id]
    assert np.concatenate([streams["train"], streams["valid"]]).tolist() == whole
    assert len(streams["valid"]) == len(whole) // 10
    assert streams["train"].dtype == np.uint32


def test_held_out_part_is_a_sequence_at_least(tokenizer, text):
    assert len(data.load(str(text), tokenizer, 500)["valid"]) == 501


def test_folder_with_splits(tokenizer, tmp_path):
    for split, name in (("train", "train.txt"), ("valid", "valid.jsonl"), ("test", "test.txt")):
        content = f"{split} " * 50
        if name.endswith("jsonl"):
            content = json.dumps({"text": content})
        (tmp_path / name).write_text(content)
    streams = data.load(str(tmp_path), tokenizer, 8)
    for split, stream in streams.items():
        assert tokenizer.decode(stream[:-1]) == f"{split} " * 50


def test_jsonl_records_end_with_the_end_of_text(tokenizer, tmp_path):
    texts = ["One\u2028line.\n\nTwo.", "Ünïcode ✓ text", "x"] * 30
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}, ensure_ascii=False) for t in texts) + "\n\n")
    streams = data.load(str(path), tokenizer, 16)
    decoded = tokenizer.decode(np.concatenate([streams["train"], streams["valid"]]))
    assert decoded == "".join(t + tokenizer.eos_token for t in texts)


def test_long_text_is_cut_without_loss(tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    text = "Some words,\n\n  indented \n\t and\n\n\nmore 1234 words!\n = Title = \n" * 40
    path.write_text(text)
    whole = data.load(str(path), tokenizer, 16)
    monkeypatch.setattr(data._pieces, "__defaults__", (50,))
    pieces = data.load(str(path), tokenizer, 16)
    stream = np.concatenate([pieces["train"], pieces["valid"]])
    assert tokenizer.decode(stream) == text + tokenizer.eos_token
    assert abs(len(pieces["train"]) - len(whole["train"])) < 40


def test_python_docs_are_split_without_overlap(tokenizer):
    documents = data.python_docs()
    sizes = {split: sum(map(len, texts)) for split, texts in documents.items()}
    assert sizes["train"] > 150_000 and 0.05 < sizes["valid"] / sizes["train"] < 0.2
    paragraphs = {s: {p for t in texts for p in t.split("\n\n")} for s, texts in documents.items()}
    assert not paragraphs["train"] & paragraphs["valid"]
    assert data.python_docs() == documents


def test_random_streams():
    streams = data.random_streams(vocab_size=512, seq_len=16, seed=1)
    for stream in streams.values():
        assert (len(stream) - 1) // 16 == 64 and stream.max() < 512
    assert (streams["train"] == data.random_streams(512, 16, 1)["train"]).all()
    assert (streams["train"] != streams["valid"]).any()


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "neither train.txt nor train.jsonl"),
        ({"valid.txt": TEXT}, "neither train.txt nor train.jsonl"),
        ({"train.txt": TEXT, "train.jsonl": "{}"}, "both train.jsonl and train.txt"),
        ({"train.txt": ""}, r"train\.txt has no text"),
        ({"train.txt": " \n\n"}, r"train\.txt has no text"),
        ({"train.txt": b"\xff\xfe"}, "not UTF-8"),
        ({"train.txt": "Too short."}, "too few to train on"),
        ({"train.txt": TEXT, "valid.txt": "Too short."}, "valid data .* less than one sequence"),
        ({"train.txt": "Too short.", "valid.txt": TEXT}, "train data .* less than one sequence"),
        ({"train.jsonl": '{"text": "a"}\nnot json'}, "Line 2 of .*not JSON"),
        ({"train.jsonl": '{"prompt": "a", "completion": "b"}'}, "Line 1 .* has prompt, completion"),
        ({"train.jsonl": '["text"]'}, "Line 1 .* is no object"),
        ({"train.jsonl": '{"text": 3}'}, "with a string"),
        ({"train.jsonl": ""}, r"train\.jsonl has no text"),
    ],
)
def test_bad_data_is_named(tokenizer, tmp_path, files, named):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(MespError, match=named):
        data.load(str(tmp_path), tokenizer, 32)


def test_unknown_data_is_named(tokenizer):
    with pytest.raises(MespError, match=r"no data nothing\.txt; .*python-docs"):
        data.load("nothing.txt", tokenizer, 32)


def test_pieces_add_up():
    text = "line\n\n  indented\nline\n" * 20
    pieces = list(data._pieces(text, 30))
    assert "".join(pieces) == text
    assert all(a.endswith("\n") and not b[:2].isspace() for a, b in pairwise(pieces))
