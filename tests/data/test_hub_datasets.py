import builtins
import json
from dataclasses import field, make_dataclass
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from helpers.commands import call, refused, run
from mesp.data.hub_datasets import read_dataset
from mesp.data.records import AnyRecord
from mesp.data.sources import Selection, read_data
from mesp.errors import MespError

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: socratic
  data_files:
  - {split: train, path: socratic/train-*}
---
"""


def rows(kind: str, count: int) -> list[dict]:
    return [{"question": f"{kind} {i} + 1?", "answer": f"{i + 1}."} for i in range(count)]


def write(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "gsm8k"
    write(folder / "main" / "train-00000-of-00002.parquet", rows("main", 20))
    write(folder / "main" / "train-00001-of-00002.parquet", rows("more", 20))
    write(folder / "main" / "test-00000-of-00001.parquet", rows("test", 5))
    write(folder / "socratic" / "train-00000-of-00001.parquet", rows("socratic", 10))
    (folder / "README.md").write_text(CARD)
    return folder


AS_COMPLETIONS = {"prompt": "question", "completion": "answer"}


def contents(documents: dict[str, list[AnyRecord]]) -> dict[str, list[tuple]]:
    return {split: [each.texts for each in part] for split, part in documents.items()}


def pairs(records: list[dict]) -> list[tuple]:
    return [(each["question"], each["answer"]) for each in records]


def test_a_configuration_and_its_splits(dataset):
    documents = read_data(str(dataset), Selection("main", columns=AS_COMPLETIONS))
    train = pairs(rows("main", 20)) + pairs(rows("more", 20))
    assert contents(documents) == {"train": train, "test": pairs(rows("test", 5))}
    splits = {"train": "train[:30]", "valid": "train[30:]+test[:50%]"}
    documents = read_data(str(dataset), Selection("main", splits, AS_COMPLETIONS))
    valid = train[30:] + pairs(rows("test", 5))[:2]
    assert contents(documents) == {"train": train[:30], "valid": valid}


@pytest.mark.parametrize("name", ["validation", "valid", "dev"])
def test_splits_by_the_names_that_they_have(tmp_path, name):
    for split, count in (("train", 4), (name, 3), ("test", 2)):
        write(tmp_path / "data" / "data" / f"{split}-00000-of-00001.parquet", rows(split, count))
    documents = read_data(str(tmp_path / "data"), Selection(columns=AS_COMPLETIONS))
    counts = {split: len(each) for split, each in documents.items()}
    assert counts == {"train": 4, "valid": 3, "test": 2}


def test_a_file_and_what_is_null_in_it(tmp_path):
    """Parquet stores null for the tool calls of a message without any."""
    call = [{"function": {"name": "f", "arguments": "{}"}}]
    messages = [
        [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": call}],
        [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}],
    ]
    path = write(tmp_path / "chats.parquet", [{"messages": each} for each in messages])
    documents = read_data(str(path), Selection())
    lines = tmp_path / "chats.jsonl"
    lines.write_text("\n".join(json.dumps({"messages": each}) for each in messages))
    of_lines = read_data(str(lines), Selection())["train"]
    assert [r.messages for r in documents["train"]] == [r.messages for r in of_lines]
    records = tmp_path / "records.jsonl"
    records.write_text("\n".join(map(json.dumps, rows("main", 10))))
    splits = {"train": "train[:8]", "valid": "train[8:]"}
    documents = read_data(str(records), Selection(None, splits, AS_COMPLETIONS))
    assert [len(each) for each in documents.values()] == [8, 2]


def test_columns_of_a_jsonl_file(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, rows("main", 10))))
    documents = read_data(str(path), Selection(columns=AS_COMPLETIONS))
    assert contents(documents) == {"train": pairs(rows("main", 10))}


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        (Selection(), "has several subsets; take one with `subset`: main, socratic."),
        (Selection("x"), "has no subset x; take one with `subset`: main, socratic."),
        (Selection("main", {"train": "training"}), "has no split training; it has train, test."),
        (Selection("main", {"train": "train[:a]"}), "The datasets library cannot read .*gsm8k: "),
        (Selection("main", {"valid": "test"}), "say with `splits` train=NAME which are read."),
        (
            Selection("main"),
            r"Record 1 of .*train-00000-of-00002\.parquet has question, answer; records have",
        ),
        (
            Selection("main", columns={"prompt": "asked"}),
            "Record 1 of .*parquet has no column asked, .* it has question, answer.",
        ),
    ],
)
def test_what_cannot_be_taken_is_named(dataset, selection, said):
    with pytest.raises(MespError, match=said) as caught:
        read_data(str(dataset), selection)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "selection", "said"),
    [
        ("a.txt", Selection("main"), "has no subsets and splits"),
        ("a.txt", Selection(columns={"text": "a"}), "has no columns"),
        ("python-docs", Selection(columns={"text": "a"}), "has no columns"),
        ("a.parquet", Selection("main"), "has no subsets; leave"),
        ("a.parquet", Selection(), r"a\.parquet is not a parquet file that can be read: "),
    ],
)
def test_what_has_no_such_thing(tmp_path, monkeypatch, name, selection, said):
    monkeypatch.chdir(tmp_path)
    for file in ("a.txt", "a.parquet"):
        Path(file).write_text("Some text that is no table.")
    with pytest.raises(MespError, match=said) as caught:
        read_data(name, selection)
    assert "\n" not in caught.value.message


def test_without_the_library_it_is_named(dataset, monkeypatch):
    found = builtins.__import__

    def missing(name, *rest, **more):
        if name == "datasets":
            raise ImportError(name)
        return found(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MespError, match="there: pip install datasets,"):
        read_dataset(str(dataset), None, {})


def test_the_commands_take_columns_subset_and_splits(dataset, tmp_path):
    out = tmp_path / "demo.mesp"
    taken = ["--data", dataset, "--subset", "main", "--splits", "train=train[:30],valid=test"]
    columns = ["--columns", "prompt=question,completion=answer"]
    size = ("--model", "demo", "--seq-len", 32, "--out", out)
    said = call("export", *size, *taken, *columns).stdout
    assert "30 train examples of" in said and "5 valid examples of" in said
    said = call("data", out, "--data", dataset, "--subset", "socratic", *columns).stdout
    assert "9 train examples of" in said and "1 valid example of" in said
    for wrong, said in (
        (("--columns", "question"), "--columns takes KEY=COLUMN, with KEY one of text, prompt, "),
        (("--splits", "training=a"), "SPLIT=NAME, with SPLIT one of train, valid, test"),
        (("--columns", "prompt="), "and not prompt."),
        (("--mask-prompt", "--loss-on", "all"), "not --loss-on all: give one of them."),
    ):
        assert said in refused(run("data", out, "--data", dataset, *wrong))


@pytest.mark.parametrize("path", ["absolute", "../secret/*.txt", "file:", "link.txt"])
def test_a_dataset_takes_no_file_from_elsewhere(tmp_path, path):
    """A dataset's README.md names its files. It could name a person's private files."""
    secret = tmp_path / "secret" / "notes.txt"
    secret.parent.mkdir()
    secret.write_text("a secret\n")
    folder = write(tmp_path / "data" / "a.parquet", rows("main", 4)).parent
    (folder / "link.txt").symlink_to(secret)
    path = {"absolute": str(secret), "file:": secret.as_uri()}.get(path, path)
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {path}\n---\n"
    (folder / "README.md").write_text(card)
    with pytest.raises(MespError, match=r"names a file outside of it, .*; do not use it"):
        read_data(str(folder), Selection())


@pytest.mark.parametrize(
    "file",
    ["/home/me/notes.txt", "hf://datasets/me/private@0/a.txt", "hf://datasets/o/d@0/../x/a.txt"],
)
def test_a_dataset_of_the_hub_takes_no_file_from_elsewhere(tmp_path, monkeypatch, file):
    import datasets

    Config = make_dataclass("Config", [("data_files", dict, field(default_factory=dict))])

    def builder(*_: object) -> SimpleNamespace:
        config = Config(data_files={"train": files})
        return SimpleNamespace(repo_id="o/d", config=config)

    def download(*asked: object) -> Path:
        assert asked == ("dataset", "o/d", ["data/a.txt"], "0")
        return tmp_path

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda path: ["default"])
    monkeypatch.setattr("mesp.data.hub_datasets.download", download)
    files = ["hf://datasets/o/d@0/data/a.txt"]
    assert read_dataset("o/d", None, {}) == {"train": [("o/d/data/a.txt", "a")]}
    files.append(file)
    with pytest.raises(MespError, match="names a file outside of it"):
        read_dataset("o/d", None, {})


def test_a_library_that_runs_scripts_of_datasets_is_refused(dataset, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    with pytest.raises(MespError, match=r"runs scripts that come with a dataset.*datasets>=4"):
        read_dataset(str(dataset), "main", {})
