import csv
import gzip
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import field, make_dataclass
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from helpers import commands
from helpers.commands import call, run
from helpers.data import assistant, user
from helpers.records import content as content_of
from mesp.data.hub_datasets import read_dataset
from mesp.data.load import read_general_text
from mesp.data.source_files import SPLITS, UNPACKED, read_file
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
AS_COMPLETIONS = {"prompt": "question", "completion": "answer"}
RECORDS = [{"prompt": f'{i}, "a"\nb', "completion": f"{i}"} for i in range(12)]


def rows(kind: str, count: int, keys: Iterable[str] = AS_COMPLETIONS.values()) -> list[dict]:
    return [dict(zip(keys, (f"{kind} {i} + 1?", f"{i + 1}."), strict=True)) for i in range(count)]


def table(delimiter: str, records: list[dict]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, [*records[0]], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def content(kind: str, records: list[dict] = RECORDS) -> bytes:
    lines = "".join(json.dumps(record) + "\n" for record in records)
    if kind == "parquet":
        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
        return file.getvalue()
    return {
        "json": json.dumps(records, indent=2),
        "jsonl": lines,
        "ndjson": lines,
        "csv": table(",", records),
        "tsv": table("\t", records),
    }[kind].encode()


def put(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = data.encode() if isinstance(data, str) else data
    path.write_bytes(gzip.compress(data) if path.name.lower().endswith(".gz") else data)
    return path


def read(path: Path, **selection: object) -> dict[str, list]:
    documents = read_data(str(path), Selection(**selection))
    return {split: [content_of(each) for each in part] for split, part in documents.items()}


def refused(path: Path, **selection: object) -> str:
    with pytest.raises(MespError) as caught:
        read(path, **selection)
    assert "\n" not in caught.value.message and caught.value.message.endswith(".")
    return caught.value.message


@pytest.fixture(autouse=True)
def apart(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("packed", ["", ".gz", ".GZ"])
@pytest.mark.parametrize("kind", ["json", "jsonl", "ndjson", "csv", "tsv", "parquet"])
def test_records_are_read_in_every_kind_of_file(tmp_path: Path, kind: str, packed: str):
    for name in (f"records.{kind}{packed}", f"RECORDS.{kind.upper()}{packed}"):
        assert read(put(tmp_path / name, content(kind))) == {"train": RECORDS}


@pytest.mark.parametrize("name", ["a.txt", "a.md", "A.TXT", "a.txt.gz", "a.md.gz"])
def test_text_is_read_whole(tmp_path: Path, name: str):
    text = '{"text": "a"}\n\nb\n'
    assert read(put(tmp_path / name, text)) == {"train": [text]}


@pytest.mark.parametrize("name", ["a", "a.jsonl.zst", "a.xml", "a.csv.zip", ".jsonl", "a.gz"])
def test_other_kinds_of_files_are_refused(tmp_path: Path, name: str):
    said = refused(put(tmp_path / name, content("jsonl")))
    assert f"{tmp_path / name} is a kind of file that is not read; give records as .jsonl" in said


def test_json_is_read_as_what_it_is(tmp_path: Path):
    assert read(put(tmp_path / "lines.json", content("jsonl")))["train"] == RECORDS
    assert read(put(tmp_path / "list.jsonl", b"\n " + content("json")))["train"] == RECORDS
    said = refused(put(tmp_path / "a.json", json.dumps({"data": RECORDS}, indent=2)))
    assert "has an object over several lines; write a list of records, or a record a line" in said


IN_LIST = r'is a list: write it as an object, {"messages": \[…\]}'
HEAD = "prompt,completion\n"
NO_NUMBER = ", which is not a JSON number"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", "", "has no text in it"),
        ("a.json", "[]", "has no text in it"),
        ("a.csv", "", "has no text in it"),
        ("a.csv", HEAD, "has no text in it"),
        ("a.csv", f"{HEAD}a,b\n\nc\n", "Line 4 of .* has 1 cells, and the header has 2"),
        ("a.csv", f'{HEAD}"a\nb",c\nd,e,f\n', "Line 4 of .* has 3 cells"),
        ("a.csv", "prompt;completion\na;b\n", "has semicolons between its cells: write commas"),
        ("a.jsonl", '[{"role": "a"}]\n[{"role": "b"}]', f"Line 1 of .* {IN_LIST}"),
        ("a.jsonl", '{"prompt": "a", "completion": null}', 'has a null "completion"'),
        ("a.jsonl", '{"chosen": "a b", "rejected": "a b c"}', "one is the beginning of the other"),
        ("a.csv", "text,text\na,b\n", "the header, has a column without a name, or two of one"),
        ("a.csv", "text,\na,b\n", "the header, has a column without a name, or two of one"),
        ("a.csv", 'text\n"a"b\n', "Line 2 of .* is not a table's"),
        ("a.json", '[{"text": "a"}, 3]', "Record 2 of .* is not an object"),
        ("a.json", '[{"text": "a"}', r"a\.json is not JSON"),
        ("a.jsonl", '{"text": "a", "text": "b"}', 'Line 1 of .* has the key "text" twice'),
        ("a.jsonl", '{"text": "a", "x": {"b": 1, "b": 2}}', 'Line 1 of .* has the key "b" twice'),
        ("a.jsonl", '{"text": "a", "score": NaN}', f"Line 1 of .* has NaN{NO_NUMBER}"),
        ("a.json", '[{"text": "a", "score": -Infinity}]', f"has -Infinity{NO_NUMBER}"),
        ("a.txt.gz", b"no gzip", "is not a whole gzip file"),
        (
            "a.csv.gz",
            gzip.compress(HEAD.encode(), mtime=0)[:-12],
            "is not a whole gzip file; compress it",
        ),
        ("a.parquet", "no table", "is not a parquet file that can be read"),
    ],
)
def test_what_is_not_in_order_is_named(tmp_path: Path, name: str, text: str | bytes, said: str):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(MespError, match=said):
        read(path)


def test_cells_of_a_table_stay_text(tmp_path: Path):
    records = [{"prompt": "1", "completion": "NA"}, {"prompt": "[1]", "completion": ""}]
    long = {"prompt": "a" * 200_000, "completion": "null"}
    assert read(put(tmp_path / "a.csv", table(",", [*records, long])))["train"] == [*records, long]


def test_two_columns_of_one_name_are_refused(tmp_path: Path):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "has two columns of one name; give each its own." in refused(tmp_path / "a.parquet")


def test_json_in_parquet_is_what_it_says(tmp_path: Path):
    """The datasets library stores values of several types as JSON in a string. If the string were
    not read as JSON, it would go into the prompt.
    """
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g"}}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]
    made = datasets.Dataset.from_list([{"messages": messages}], on_mixed_types="use_json")
    made.to_parquet(tmp_path / "a.parquet")
    put(tmp_path / "a.jsonl", json.dumps({"messages": messages}))
    assert read(tmp_path / "a.parquet") == read(tmp_path / "a.jsonl")
    call = read(tmp_path / "a.parquet")["train"][0]["messages"][1]["tool_calls"][0]
    assert call["function"] == {"name": "f", "arguments": {"a": 1}}


def test_records_of_a_part_are_as_they_are_in_the_file(tmp_path: Path):
    """The datasets library would turn them into numbers."""
    path = put(tmp_path / "a.csv", table(",", [{"text": f"{i}"} for i in range(10)]))
    parts = read(path, splits={"train": "train[:20%]", "valid": "train[8:]+train[2:3]"})
    assert parts == {
        "train": [{"text": "0"}, {"text": "1"}],
        "valid": [{"text": "8"}, {"text": "9"}, {"text": "2"}],
    }
    assert "has no split test" in refused(path, splits={"train": "train[:1]+test"})


def test_a_general_text_is_a_text(tmp_path: Path):
    with pytest.raises(MespError, match="is a file of records; give a text"):
        read_general_text(put(tmp_path / "a.jsonl", content("jsonl")), None, 0)


@pytest.mark.parametrize("kind", ["jsonl", "json.gz", "CSV", "parquet", "txt"])
@pytest.mark.parametrize("name", [name for names in SPLITS.values() for name in names] + ["DEV"])
def test_every_name_of_a_split_is_taken(tmp_path: Path, name: str, kind: str):
    split = next(split for split, names in SPLITS.items() if name.lower() in names)
    is_text = kind == "txt"
    data = "Words." if is_text else content(kind.lower().removesuffix(".gz"))
    put(tmp_path / f"{name}.{kind}", data)
    if split != "train":
        put(tmp_path / "Train.jsonl", content("jsonl"))
    assert read(tmp_path)[split] == (["Words."] if is_text else RECORDS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("valid.jsonl", "dev.jsonl"),
        ("train.jsonl", "train.txt"),
        ("train.csv", "TRAIN.csv.gz"),
        ("train-00000-of-00001.parquet", "train.parquet"),
        ("train-00000-of-00002.parquet", "train-00000-of-00002-0a.parquet"),
    ],
)
def test_two_files_of_a_split_are_refused(tmp_path: Path, one: str, other: str):
    for name in {one, other, "train.jsonl"} if one.startswith("valid") else {one, other}:
        put(tmp_path / name, content("jsonl"))
    said = refused(tmp_path)
    assert "has both" in said and one in said and other in said and "keep one" in said


def test_parts_of_a_split_are_read_in_order(tmp_path: Path):
    folder = tmp_path / "data"
    for part in range(3):
        name = f"train-0000{part}-of-00003.jsonl"
        put(folder / name, content("jsonl", RECORDS[4 * part : 4 * part + 4]))
    assert read(tmp_path) == read(folder) == {"train": RECORDS}
    (folder / "train-00001-of-00003.jsonl").unlink()
    assert "without part 00001 of 00003; add it." in refused(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("extra.jsonl", "extra.jsonl, which is in no split: name it train, valid or test"),
        ("more/extra.csv", "more/extra.csv, which is in no split"),
        ("data/train.jsonl", "data/train.jsonl, which is in no split"),
        ("train-2.jsonl", "train-2.jsonl, which is in no split"),
        ("valid.jsonl.zst", "valid.jsonl.zst, a kind of file that is not read"),
        ("notes.pdf", "notes.pdf, a kind of file that is not read"),
        ("readme.jsonl", "readme.jsonl, which is in no split"),
    ],
)
def test_what_is_of_no_split_is_refused(tmp_path: Path, name: str, said: str):
    put(tmp_path / "train.jsonl", content("jsonl"))
    put(tmp_path / name, content("jsonl"))
    assert said in refused(tmp_path)
    assert read(tmp_path, splits={"train": "train"})["train"][: len(RECORDS)] == RECORDS


def test_what_is_no_data_changes_nothing(tmp_path: Path):
    put(tmp_path / "train.jsonl", content("jsonl"))
    names = ["README.md", "README_de.md", "LICENSE", "LICENSE-MIT.txt", ".gitattributes"]
    names += ["dataset_infos.json", "dataset_info.json", ".git/train.jsonl", "plot.png", "make.py"]
    for name in [*names, ".valid.jsonl", "__pycache__/a.pyc"]:
        put(tmp_path / name, "x")
    assert read(tmp_path) == {"train": RECORDS}


def test_splits_that_the_library_finds_are_all_known(tmp_path: Path):
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n"
    for name in ("train", "evaluation", "extra"):
        put(tmp_path / "parts" / f"{name}.jsonl", content("jsonl"))
        card += f"  - {{split: {name}, path: parts/{name}.jsonl}}\n"
        put(tmp_path / "README.md", card + "---\n")
        if name == "evaluation":
            assert [*read(tmp_path)] == ["train", "valid"]
    said = "has the splits train, evaluation, extra; say with --splits train=NAME which are read."
    assert said in refused(tmp_path)
    assert [*read(tmp_path, splits={"train": "extra"})] == ["train"]


def test_a_file_that_the_library_finds_in_no_split_is_named(tmp_path: Path):
    put(tmp_path / "more" / "train" / "a.parquet", content("parquet"))
    assert read(tmp_path) == {"train": RECORDS}
    put(tmp_path / "extra.parquet", content("parquet"))
    assert "has extra.parquet, which is in none of the splits train" in refused(tmp_path)


def test_a_dataset_that_says_how_it_is_read_is_refused(tmp_path: Path):
    put(tmp_path / "a.csv", "text;x\na;b\n")
    card = "---\nconfigs:\n- config_name: default\n  data_files: a.csv\n  sep: ';'\n---\n"
    put(tmp_path / "README.md", card)
    assert "says in its README.md how its files are read, by sep," in refused(tmp_path)


@pytest.mark.parametrize("what", ["pipe", "device"])
def test_pipes_and_devices_are_refused(tmp_path: Path, what: str):
    path = tmp_path / "train.jsonl"
    if what == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert "is not a regular file; give a file, or to mesp evaluate - and" in refused(path)
    said = refused(tmp_path)
    assert "train.jsonl is not a regular file; put the file" in said or "link that leads" in said
    assert "is not a regular file" in refused(path, splits={"train": "train"})


def test_a_link_in_a_folder_stays_in_it(tmp_path: Path):
    secret = put(tmp_path / "secret" / "notes.jsonl", content("jsonl"))
    folder = tmp_path / "data"
    put(folder / ".parts" / "a.jsonl", content("jsonl"))
    (folder / "train.jsonl").symlink_to(folder / ".parts" / "a.jsonl")
    assert read(folder) == {"train": RECORDS}
    (folder / "valid.jsonl").symlink_to(secret)
    assert f"{folder}/valid.jsonl is a link that leads out of its folder" in refused(folder)
    (folder / "valid.jsonl").unlink()
    (folder / "more").symlink_to(secret.parent)
    assert f"{folder} has more, a kind of file that is not read" in refused(folder)
    (tmp_path / "link.jsonl").symlink_to(secret)
    assert read(tmp_path / "link.jsonl") == {"train": RECORDS}


def test_a_snapshot_of_the_hub_is_a_folder_of_links(tmp_path: Path):
    snapshot = tmp_path / "datasets--o--d" / "snapshots" / "0"
    put(tmp_path / "datasets--o--d" / "blobs" / "1", content("jsonl"))
    snapshot.mkdir(parents=True)
    (snapshot / "train.jsonl").symlink_to("../../blobs/1")
    assert read(snapshot) == {"train": RECORDS}


def bomb(path: Path, kind: str) -> Path:
    """Writes a file of less than 300 kB, and returns its path."""
    if kind == "gzip":
        with gzip.open(path, "wb", compresslevel=9) as file:
            file.write(b'{"text": "')
            for _ in range(100):
                file.write(bytes(1 << 20).replace(b"\0", b"a"))
        return path
    if kind == "text":
        records = pyarrow.table({"text": ["a" * 1_000_000] * 250})
    elif kind == "messages":
        messages = [[{"role": "user", "content": "a" * 1_000_000}] * 20] * 20
        records = pyarrow.table({"messages": messages})
    else:
        records = pyarrow.table({"text": pyarrow.array([[None] * 20_000_000])})
    options = {"compression": "zstd", "dictionary_pagesize_limit": 1 << 24}
    pyarrow.parquet.write_table(records, path, **options)
    return path


@pytest.mark.parametrize("kind", ["gzip", "text", "messages", "nulls"])
def test_a_small_file_takes_no_memory_by_what_it_says(tmp_path: Path, kind: str):
    path = bomb(tmp_path / ("a.jsonl.gz" if kind == "gzip" else "a.parquet"), kind)
    assert path.stat().st_size < 300_000
    program = (
        "import sys, resource; from pathlib import Path\n"
        "from mesp.data.source_files import read_file; from mesp.errors import MespError\n"
        "import pyarrow.parquet\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: list(read_file(Path(sys.argv[1])))\n"
        "except MespError as error: print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, path], capture_output=True, text=True, check=True
    )
    said, grown = done.stdout.splitlines()
    assert "MiB of text; put less in a file." in said
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(grown) * unit < 12 * UNPACKED


def test_a_text_that_repeats_is_read_as_often_as_its_size_allows(tmp_path: Path):
    path = tmp_path / "a.parquet"
    records = [{"text": "a long instruction " * 1_000} for _ in range(500)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    assert read(path)["train"] == records
    with pytest.raises(MespError, match="has more than 1 MiB of text"):
        list(read_file(path, size=1 << 20))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    folder = tmp_path / "gsm8k"
    put(folder / "main" / "train-00000-of-00002.parquet", content("parquet", rows("main", 20)))
    put(folder / "main" / "train-00001-of-00002.parquet", content("parquet", rows("more", 20)))
    put(folder / "main" / "test-00000-of-00001.parquet", content("parquet", rows("test", 5)))
    put(folder / "socratic" / "train-00000-of-00001.parquet", content("parquet", rows("so", 10)))
    put(folder / "README.md", CARD)
    return folder


def test_a_configuration_and_its_splits(dataset: Path):
    main, more, test = (
        rows(*each, AS_COMPLETIONS) for each in (("main", 20), ("more", 20), ("test", 5))
    )
    chosen = {"subset": "main", "columns": AS_COMPLETIONS}
    assert read(dataset, **chosen) == {"train": main + more, "test": test}
    splits = {"train": "train[:30]", "valid": "train[30:]+test[:50%]"}
    parts = {"train": main + more[:10], "valid": more[10:] + test[:2]}
    assert read(dataset, splits=splits, **chosen) == parts


def test_what_is_null_in_a_table_is_left_out(tmp_path: Path):
    """Parquet stores null for the tool calls of a message without any."""
    call = {"function": {"name": "f", "arguments": "{}"}}
    answers = ({"role": "assistant", "tool_calls": [call]}, assistant("c"))
    records = [{"messages": [user("a"), each]} for each in answers]
    kinds = ("parquet", "jsonl")
    in_table, in_lines = (read(put(tmp_path / f"a.{k}", content(k, records))) for k in kinds)
    assert in_table == in_lines


def test_columns_of_a_file_of_lines(tmp_path: Path):
    path = put(tmp_path / "a.jsonl", content("jsonl", rows("main", 10)))
    assert read(path, columns=AS_COMPLETIONS) == {"train": rows("main", 10, AS_COMPLETIONS)}


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        ({"subset": None}, "has several subsets; take one with --subset: main, socratic."),
        ({"subset": "x"}, "has no subset x; take one with --subset: main, socratic."),
        ({"splits": {"train": "training"}}, "has no split training; it has train, test."),
        ({"splits": {"train": "train[:a]"}}, "The datasets library cannot read .*gsm8k: "),
        ({"splits": {"valid": "test"}}, "say with --splits train=NAME which are read."),
        ({}, r"Record 1 of .*train-00000-of-00002\.parquet has question, answer; records have"),
        (
            {"columns": {"prompt": "asked"}},
            "Record 1 of .*parquet has no column asked, .* it has question, answer.",
        ),
    ],
)
def test_what_cannot_be_taken_is_named(dataset: Path, selection: dict, said: str):
    assert re.search(said, refused(dataset, **{"subset": "main", **selection}))


@pytest.mark.parametrize(
    ("name", "selection", "said"),
    [
        ("a.txt", {"subset": "main"}, "has no subsets and splits"),
        ("a.txt", {"columns": {"text": "a"}}, "has no columns"),
        ("python-docs", {"columns": {"text": "a"}}, "has no columns"),
        ("a.parquet", {"subset": "main"}, "has no subsets; leave"),
        ("a.parquet", {}, "a.parquet is not a parquet file that can be read: "),
    ],
)
def test_what_has_no_such_thing(working_folder: Path, name: str, selection: dict, said: str):
    for file in ("a.txt", "a.parquet"):
        Path(file).write_text("Some text that is no table.")
    assert said in refused(Path(name), **selection)


def test_without_the_library_it_is_named(dataset, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MespError, match="there: pip install datasets,"):
        read_dataset(str(dataset), Selection())


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
        assert said in commands.refused(run("data", out, "--data", dataset, *wrong))


@pytest.mark.parametrize("path", ["absolute", "../secret/*.txt", "file:", "link.txt"])
def test_a_dataset_takes_no_file_from_elsewhere(tmp_path, path):
    """A dataset's README.md names its files. It could name a person's private files."""
    secret = put(tmp_path / "secret" / "notes.txt", "a secret\n")
    folder = put(tmp_path / "data" / "a.parquet", content("parquet", rows("main", 4))).parent
    (folder / "link.txt").symlink_to(secret)
    path = {"absolute": str(secret), "file:": secret.as_uri()}.get(path, path)
    card = f"---\nconfigs:\n- config_name: default\n  data_files: {path}\n---\n"
    (folder / "README.md").write_text(card)
    assert re.search("names a file outside of it, .*; do not use it", refused(folder))


@pytest.mark.parametrize(
    "file",
    ["/home/me/notes.txt", "hf://datasets/me/private@0/a.txt", "hf://datasets/o/d@0/../x/a.txt"],
)
def test_a_dataset_of_the_hub_takes_no_file_from_elsewhere(tmp_path, monkeypatch, file):
    Config = make_dataclass("Config", [("data_files", dict, field(default_factory=dict))])

    def builder(*_: object) -> SimpleNamespace:
        config = Config(data_files={"train": files})
        return SimpleNamespace(repo_id="o/d", config=config)

    def download(*asked: object) -> Path:
        assert asked == ("dataset", "o/d", ["data/a.txt"], "0")
        return tmp_path

    put(tmp_path / "data" / "a.txt", "a")
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda path: ["default"])
    monkeypatch.setattr("mesp.data.hub_datasets.download", download)
    files = ["hf://datasets/o/d@0/data/a.txt"]
    assert read_dataset("o/d", Selection()) == {"train": [("o/d/data/a.txt", "a")]}
    files.append(file)
    with pytest.raises(MespError, match="names a file outside of it"):
        read_dataset("o/d", Selection())


def test_a_library_that_runs_scripts_of_datasets_is_refused(dataset, monkeypatch):
    monkeypatch.setattr(datasets, "__version__", "3.6.0")
    with pytest.raises(MespError, match=r"runs scripts that come with a dataset.*datasets>=4"):
        read_dataset(str(dataset), Selection("main"))
