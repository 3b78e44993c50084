from pathlib import Path

import pytest

from helpers.exports import refused

pytestmark = pytest.mark.usefixtures("working_folder")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--model"),
        (["--model", "nothing"], "There is no model nothing"),
        (["--model", "./no/folder"], "There is no folder or file ./no/folder"),
        (["--model", "./folder"], "There is no folder or file ./folder; correct the path."),
        (["--model", "../no.gguf"], "There is no folder or file ../no.gguf; correct the path."),
        (["--model", "a/b/c"], "There is no folder or file a/b/c; correct the path."),
        (["--model", "a\\b"], "There is no folder or file a\\b; correct the path."),
        (["--model", "folder/"], "There is no folder or file folder/; correct the path."),
        (["--model", "~/a"], "There is no folder or file ~/a: write the path out, without ~."),
        (["--model", "models/no.gguf"], "There is no model models/no.gguf"),
        (["--model", "demo", "--data", "./no"], "There is no folder or file ./no; correct"),
        (["--model", "demo", "--data", "a/b/c"], "There is no folder or file a/b/c; correct"),
        (["--model", "demo", "--data", "./no", "--subset", "a"], "There is no folder or file ./no"),
        (["--model", "demo", "--calibrate", "./no"], "There is no folder or file ./no; correct"),
        (
            ["--model", "demo", "--seq-len", 2048],
            "The model was trained for 1,024 positions, and sequences of 2,048 tokens have more; "
            "take a --seq-len up to 1024.",
        ),
        (["--from", "./no", "--out", "new.mesp"], "There is no folder no; name a bundle"),
        (["--model", "Qwen2.5-9B"], "Qwen2.5-0.5B"),
        (["--model", "TINY", "--rank", "0"], "--rank"),
        (["--model", "TINY", "--rank", "8,x"], "--rank"),
        (["--model", "TINY", "--rank", "8,129"], "have at most rank 128, and --rank names 129;"),
        (["--model", "TINY", "--seq-len", "0"], "--seq-len"),
        (["--model", "TINY", "--seq-len", "8", "-1"], "-1"),
        (["--model", "TINY", "--layers", "0"], "--layers"),
        (["--model", "TINY", "--bits", "3"], "--bits"),
        (["--model", "TINY", "--group-size", "48"], "--group-size"),
        (["--model", "TINY", "--group-size", "128"], "rows of 320"),
        (["--model", "TINY", "--data", "nothing.txt"], "nothing.txt"),
        (["--model", "TINY", "stray"], "stray"),
        (["--model", "Qwen2.5-0.5B", "--random-weights", "--data", "python-docs"], "tokenizer"),
    ],
)
def test_bad_arguments(tiny, arguments, named):
    assert named in refused(*(str(tiny) if a == "TINY" else a for a in arguments))


def test_bad_data(tiny):
    for name, content, named in (
        ("empty.txt", "", "no text"),
        ("short.txt", "A few words.", "too few to train on"),
        ("chat.jsonl", '{"messages": []}', "messages"),
    ):
        Path(name).write_text(content)
        assert named in refused("--model", tiny, "--data", name)
