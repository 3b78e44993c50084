import gzip
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import dequantize_model

from helpers.adapters import with_weighted_sum, write_adapters
from helpers.commands import HANG, call, command, run, wait_for
from helpers.models import FAMILIES, write_model
from mesp.adapters.weighted import weigh
from mesp.bundle.reader import Bundle
from mesp.data.prompts import encode_prompt
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.engine.build import find_engine
from mesp.engine.process import evaluator
from mesp.evaluation.records import read_records

pytestmark = pytest.mark.slow

# mlx-lm sums over a quantized matrix in another order. For a token's loss of about 10 nats in
# float32, this makes a difference of at most 3e-6.
PER_TOKEN = 1e-5
QUESTIONS = [
    {"prompt": "The President of the United", "choices": [" States", " Kings of old"], "answer": 0},
    {"prompt": "We, the ", "choices": ["dogs", "people", "of"], "answer": "people"},
    {"prompt": "", "choices": ["A", "My fellow citizens"], "answer": 1},
    {"prompt": "My fellow citizens", "choices": [" and", ", today", "."], "answer": 2},
]
TEXTS = [
    "My fellow citizens, we stand here today.",
    "Yes.",
    "The people of the world want peace. " * 9,
]
TASKS = [
    {"prompt": "The President of the United", "completion": " States"},
    {"prompt": "The House of", "completion": "Representatives"},
    {"prompt": "My fellow", "completion": "cats"},
]


@pytest.fixture(scope="module")
def adapters(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]
    parameters = {"rank": 4, "scale": 4.0, "dropout": 0.0, "keys": keys}
    model = Bundle(bundle).to_mlx_lm()
    model.freeze()
    linear_to_lora_layers(model, 6, parameters)
    weights = {
        name: 0.05 * mx.random.normal(array.shape, key=mx.random.key(i))
        for i, (name, array) in enumerate(tree_flatten(model.trainable_parameters()))
    }
    folder = tmp_path_factory.mktemp("adapters")
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 6, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def mlx_lms(bundle: Path, adapters: Path | None) -> nn.Module:
    model = Bundle(bundle).to_mlx_lm()
    model.set_dtype(mx.float32)
    model = dequantize_model(model)
    if adapters is not None:
        load_adapters(model, str(adapters))
    model.eval()
    return model


def theirs(model: nn.Module, tokens: list[int], first: int) -> tuple[float, bool]:
    logits = model(mx.array([tokens[:-1]]))[0, first - 1 :].astype(mx.float32)
    targets = mx.array(tokens[first:])
    logs = mx.take_along_axis(nn.log_softmax(logits), targets[:, None], axis=-1)
    return logs.sum().item(), (logits.argmax(axis=-1) == targets).all().item()


def in_windows(model: nn.Module, tokens: list[int], size: int) -> float:
    total = 0.0
    for first in range(1, len(tokens), size):
        end = min(first + size, len(tokens))
        start = max(0, end - 1 - size)
        total += theirs(model, tokens[start:end], first - start)[0]
    return total


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def evaluate(
    bundle: Path, records: list[dict], tmp_path: Path, *options: object
) -> tuple[dict, dict[tuple, dict]]:
    out = tmp_path / "out.json"
    data = write(tmp_path / "data.jsonl", records)
    done = call("evaluate", bundle, data, "--out", out, *options)
    assert done.stdout.endswith(f"Figures: {out}\n")
    found = json.loads(out.read_text())
    return found, {(each["metric"], each["adapters"]): each for each in found["results"]}


@pytest.mark.parametrize("tuned", [False, True])
def test_log_likelihoods_are_mlx_lms(bundle: Path, adapters: Path, tuned: bool):
    folder = adapters if tuned else None
    model = mlx_lms(bundle, folder)
    text = load_bundle_tokenizer(bundle).encode(TEXTS[2] * 6)
    assert len(text) > 300
    greedy = int(model(mx.array([text[:40]]))[0, -1].argmax())
    choices = [[5], [6, 7, 8], [greedy], text[40:43], text[40:], [9] * 30]
    with evaluator(bundle, weigh(folder)) as engine:
        assert engine.text(text[:9], 1 << 62) == engine.text(text[:9], 8)
        scores = engine.choices(text[:40], choices)
        for choice, score in zip(choices, scores, strict=True):
            expected, is_greedy = theirs(model, text[:40] + choice, 40)
            assert abs(score.log_likelihood - expected) < PER_TOKEN * len(choice)
            assert score.is_greedy == is_greedy
        assert scores[2].is_greedy and not scores[0].is_greedy

        whole = engine.text(text, len(text))
        assert abs(whole - theirs(model, text, 1)[0]) < PER_TOKEN * len(text)
        rolling = engine.text(text, 100)
        assert abs(rolling - in_windows(model, text, 100)) < PER_TOKEN * len(text)
        assert abs(rolling - whole) > 1

        models = [mlx_lms(bundle, None), model]
        logits = [np.array(each(mx.array([text[:-1]]))[0], dtype=np.float64) for each in models]
        p, q = (each - np.logaddexp.reduce(each, axis=-1, keepdims=True) for each in logits)
        kl = (np.exp(p) * (p - q)).sum()
        assert engine.divergence(text, len(text)) == pytest.approx(kl, rel=1e-5)
        assert (kl > 1) == tuned
        windows = [engine.divergence(text[:101], 100), engine.divergence(text[100:201], 100)]
        assert engine.divergence(text[:201], 100) == pytest.approx(sum(windows), rel=1e-5)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Request 1 is not valid"),
        ('{"type": "poem"}', "Request 1 is not valid: type"),
        ('{"type": "text", "tokens": [1]}', "window is missing"),
        ('{"type": "text", "tokens": [1], "window": 5}', "at least two tokens long"),
        ('{"type": "choices", "prompt": [1], "choices": [[2], []]}', "at least one token long"),
        ('{"type": "choices", "prompt": [99999], "choices": [[2]]}', "the token 99999"),
    ],
)
def test_a_bad_request_is_one_sentence(bundle: Path, tmp_path: Path, line: str, said: str):
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"bundle": str(bundle), "adapters": []}))
    engine = [find_engine(), "evaluate", settings]
    done = subprocess.run(engine, input=line + "\n", capture_output=True, text=True)
    refused(done, said, bundle)


def test_perplexity_is_mlx_lms(bundle: Path, adapters: Path, tmp_path: Path):
    options = ("--adapters", adapters, "--max-length", 32)
    found, results = evaluate(bundle, [{"text": text} for text in TEXTS], tmp_path, *options)
    tokenizer = load_bundle_tokenizer(bundle)
    for folder in (None, str(adapters)):
        model, total, count = mlx_lms(bundle, folder), 0.0, 0
        for text in TEXTS:
            tokens = [tokenizer.eos_token_id, *tokenizer.encode(text)]
            total += in_windows(model, tokens, 32)
            count += len(tokens) - 1
        result = results["perplexity", folder]
        assert result["value"] == pytest.approx(math.exp(-total / count), rel=PER_TOKEN)
        assert result["low"] < result["value"] < result["high"]
        size = len("".join(TEXTS).encode())
        bits = results["bits_per_byte", folder]["value"]
        assert bits == pytest.approx(-total / math.log(2) / size, rel=PER_TOKEN)
    assert (found["data"], found["max_length"]) == (str(tmp_path / "data.jsonl"), 32)
    difference = results["perplexity", str(adapters)]["difference"]
    values = [results["perplexity", folder]["value"] for folder in (None, str(adapters))]
    assert difference["value"] == pytest.approx(values[1] - values[0])
    assert results["perplexity", None]["difference"] is None


def test_the_sum_of_several_adapters_is_measured(bundle: Path, adapters: Path, tmp_path: Path):
    other = write_adapters(tmp_path / "other", bundle, 0.02, rank=3, seed=2, without=("q_proj",))
    options = ("--adapters", f"{adapters},{other}", "--weights", "0.7,2", "--no-base")
    _, results = evaluate(bundle, [{"text": TEXTS[0]}], tmp_path, *options)
    tokenizer = load_bundle_tokenizer(bundle)
    model = with_weighted_sum(bundle, {adapters: 0.7, other: 2.0})
    tokens = [tokenizer.eos_token_id, *tokenizer.encode(TEXTS[0])]
    expected = math.exp(-theirs(model, tokens, 1)[0] / (len(tokens) - 1))
    found = results["perplexity", f"0.7 * {adapters} + 2 * {other}"]
    assert found["value"] == pytest.approx(expected, rel=PER_TOKEN)


@pytest.mark.parametrize("chat", [False, True])
def test_choices_are_mlx_lms(bundle: Path, tmp_path: Path, chat: bool):
    options = ["--chat"] if chat else []
    found, results = evaluate(bundle, QUESTIONS, tmp_path, *options)
    tokenizer, model = load_bundle_tokenizer(bundle), mlx_lms(bundle, None)
    right = {"acc": [], "acc_norm": []}
    for record, sample in zip(QUESTIONS, found["samples"][0], strict=True):
        prompt, choices = record["prompt"], record["choices"]
        if chat:
            prompt = f"user: {prompt}\nassistant:"
        before = tokenizer.encode(prompt.rstrip()) or [tokenizer.eos_token_id]
        scores = []
        for choice in choices:
            both = tokenizer.encode(prompt + choice)
            both = both if prompt else before + both
            scores.append(theirs(model, both, len(before))[0])
        assert sample["log_likelihoods"] == pytest.approx(scores, abs=4 * PER_TOKEN)
        lengths = [len(choice.strip()) for choice in choices]
        answer = record["answer"]
        answer = choices.index(answer) if isinstance(answer, str) else answer
        by_length = [score / n for score, n in zip(scores, lengths, strict=True)]
        for name, values in (("acc", scores), ("acc_norm", by_length)):
            right[name].append(values.index(max(values)) == answer)
    for name, each in right.items():
        assert results[name, None]["value"] == sum(each) / len(each)
    assert 0 < results["acc", None]["value"] < 1 or chat


def split(tokenizer: TokenizerWrapper, text: str) -> list[int]:
    return list(tokenizer.encode(text, split_special_tokens=True))


def test_special_tokens_in_records_become_text_where_asked(bundle: Path, tmp_path: Path):
    tokenizer, model = load_bundle_tokenizer(bundle), mlx_lms(bundle, None)
    option, end = "--split-special-tokens", tokenizer.eos_token
    text = f"It ends with {end}, they said."
    _, results = evaluate(bundle, [{"text": text}], tmp_path, option)
    ids = split(tokenizer, text)
    assert tokenizer.eos_token_id not in ids
    total = in_windows(model, [tokenizer.eos_token_id, *ids], len(ids))
    value = results["perplexity", None]["value"]
    assert value == pytest.approx(math.exp(-total / len(ids)), rel=PER_TOKEN)

    choices = [f" {end}", " time"]
    record = {"prompt": f"It is{end}", "choices": choices, "answer": 0}
    for chat in (False, True):
        options = ["--chat", option] if chat else [option]
        found, _ = evaluate(bundle, [record], tmp_path, *options)
        before = encode_prompt(tokenizer, record["prompt"], chat, split_special=True)
        scores = []
        for choice in choices:
            both = split(tokenizer, record["prompt"] + choice)
            if chat:
                space, word = choice[:1], choice[1:]
                pieces = [space, end] if word == end else [choice]
                both = before + [id for piece in pieces for id in split(tokenizer, piece)]
            assert both[: len(before)] == before and tokenizer.eos_token_id not in both
            scores.append(theirs(model, both, len(before))[0])
        samples = found["samples"][0][0]["log_likelihoods"]
        assert samples == pytest.approx(scores, abs=8 * PER_TOKEN)

    messages = [{"role": "user", "content": f"Say {end}"}, {"role": "assistant", "content": "It."}]
    for task in ({"messages": messages}, {"prompt": f"Say {end}", "completion": "It."}):
        found, _ = evaluate(bundle, [task], tmp_path, option, "--max-tokens", 8)
        prompt = encode_prompt(tokenizer, f"Say {end}", True, split_special=True)
        assert tokenizer.eos_token_id not in prompt
        expected = mlx_lm.generate(model, tokenizer, prompt, max_tokens=8)
        assert found["samples"][0][0]["answer"] == expected.strip()


def test_fields_that_are_ignored_are_not_read(bundle: Path, tmp_path: Path):
    records = [TASKS[0] | {"system": "Be brief."}]
    data = write(tmp_path / "data.jsonl", records)
    refused(run("evaluate", bundle, data), "leave it out with --ignore system", tmp_path)
    found, _ = evaluate(bundle, records, tmp_path, "--ignore", "system", "--max-tokens", 4)
    expected, _ = evaluate(bundle, TASKS[:1], tmp_path, "--max-tokens", 4)
    assert found["samples"] == expected["samples"]


def test_answers_are_mlx_lms_and_stop_where_asked(bundle: Path, tmp_path: Path):
    options = ("--no-chat", "--max-tokens", 12, "--stop", ",", "--stop", ".", "--stop", " of")
    found, results = evaluate(bundle, TASKS, tmp_path, *options)
    tokenizer, model = load_bundle_tokenizer(bundle), mlx_lms(bundle, None)
    expected = []
    for record in TASKS:
        text = mlx_lm.generate(model, tokenizer, record["prompt"], max_tokens=12)
        expected.append(min((text.partition(stop)[0] for stop in (",", ".", " of")), key=len))
    assert [each["answer"] for each in found["samples"][0]] == [text.strip() for text in expected]
    right = [e.strip() == t["completion"].strip() for e, t in zip(expected, TASKS, strict=True)]
    assert results["exact_match", None]["value"] == sum(right) / 3 == 1 / 3 or right


def test_answers_do_not_depend_on_how_many_are_written_together(
    bundle: Path, adapters: Path, tmp_path: Path
):
    options = ("--adapters", adapters, "--no-chat", "--max-tokens", 12, "--stop", " of")
    alone, together = (
        evaluate(bundle, TASKS, tmp_path, *options, "--at-once", n)[0]["samples"] for n in (1, 2)
    )
    assert alone == together


def test_conversations_go_through_the_template(bundle: Path, tmp_path: Path):
    said = (("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"))
    messages = [{"role": role, "content": content} for role, content in said]
    found, _ = evaluate(bundle, [{"messages": messages}], tmp_path, "--max-tokens", 8)
    tokenizer, model = load_bundle_tokenizer(bundle), mlx_lms(bundle, None)
    prompt = "system: Be brief.\nuser: Hello\nassistant:"
    expected = mlx_lm.generate(model, tokenizer, prompt, max_tokens=8)
    assert found["samples"][0][0]["answer"] == expected.strip()
    pair = [{"prompt": "Hello", "completion": "Hi"}]
    found, _ = evaluate(bundle, pair, tmp_path, "--max-tokens", 8)
    expected = mlx_lm.generate(model, tokenizer, "user: Hello\nassistant:", max_tokens=8)
    assert found["samples"][0][0]["answer"] == expected.strip()


def test_several_adapters_at_once(bundle: Path, adapters: Path, tmp_path: Path):
    peft = tmp_path / "same"
    peft.symlink_to(adapters)
    options = ("--adapters", adapters, "--adapters", peft, "--limit", 3)
    found, results = evaluate(bundle, QUESTIONS, tmp_path, *options)
    assert [len(samples) for samples in found["samples"]] == [3, 3, 3]
    assert found["adapters"] == [None, str(adapters), str(peft)]
    assert {name for _, name in results} == {None, str(adapters), str(peft)}
    ours, same = (results["acc", str(folder)] for folder in (adapters, peft))
    assert ours["difference"] == same["difference"]
    without = evaluate(bundle, QUESTIONS, tmp_path, *options, "--no-base")[1]
    assert {name for _, name in without} == {str(adapters), str(peft)}
    assert without["acc", str(peft)]["difference"] is None
    assert without["acc", str(peft)]["value"] == same["value"]
    again = evaluate(bundle, QUESTIONS, tmp_path, *options)[1]
    assert again == results


def test_json_and_extraction(bundle: Path, tmp_path: Path):
    options = ("--no-chat", "--max-tokens", 8, "--json")
    records = [{"prompt": "My fellow", "completion": '"citizens"'}]
    _, results = evaluate(bundle, records, tmp_path, *options)
    assert results["valid_json", None]["value"] == 0
    text = evaluate(bundle, records, tmp_path, *options)[0]["samples"][0][0]["written"]
    records[0]["completion"] = "x " + json.dumps(len(text))
    found, results = evaluate(bundle, records, tmp_path, *options, "--extract", "$|[0-9]+")
    assert found["samples"][0][0]["answer"] == ""
    assert results["valid_json", None]["value"] == 0


def test_the_table_says_what_changed(bundle: Path, adapters: Path, tmp_path: Path):
    data = write(tmp_path / "data.jsonl", QUESTIONS)
    done = run("evaluate", bundle, data, "--adapters", adapters)
    head, *lines = done.stdout.splitlines()
    assert head.split() == ["metric", "model", "value", "95%", "-", "base", "95%"]
    assert [line.split()[0] for line in lines] == ["acc", str(adapters), "acc_norm", str(adapters)]
    assert all("…" in line for line in lines)
    assert done.stderr == ""  # without a terminal, no progress is shown


def test_records_come_from_standard_input(bundle: Path):
    lines = "".join(json.dumps(record) + "\n" for record in QUESTIONS)
    for begin in ("", "\ufeff"):
        done = run("evaluate", bundle, "-", input=begin + lines)
        assert done.returncode == 0 and "acc_norm" in done.stdout
    done = run("evaluate", bundle, "-", input='{"text": "é"}'.encode("latin-1"))
    refused(done, "standard input is not UTF-8 text; convert it first.", bundle)


def test_records_come_from_every_kind_of_file(bundle: Path, tmp_path: Path):
    rows = "".join(f"{each['prompt']},{each['completion']}\n" for each in TASKS)
    files = {
        "a.json": (json.dumps(QUESTIONS), QUESTIONS),
        "b.CSV": ("prompt,completion\n" + rows, TASKS),
        "c.ndjson": (json.dumps({"text": TEXTS[0]}), [{"text": TEXTS[0]}]),
        "d.txt": (TEXTS[0], [{"text": TEXTS[0]}]),
    }
    for name, (content, records) in files.items():
        (tmp_path / name).write_text(content)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content.encode()))
        as_lines = write(tmp_path / "lines.jsonl", records)
        found = read_records(str(as_lines), None)
        for each in (name, f"{name}.gz"):
            read = read_records(str(tmp_path / each), None)
            assert [replace(r, where="") for r in read] == [replace(r, where="") for r in found]
    assert len(read_records(str(tmp_path / "a.json"), 1)) == 1
    assert "perplexity" in call("evaluate", bundle, tmp_path / "d.txt").stdout


@pytest.mark.parametrize("what", ["pipe.jsonl", "device.jsonl", "records", "."])
def test_what_is_no_file_of_data_is_refused(bundle: Path, tmp_path: Path, what: str):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "device.jsonl").symlink_to("/dev/zero")
    (tmp_path / "records").write_text('{"text": "a"}')
    said = {
        "records": "records is a kind of file that is not read; give records as .jsonl",
        ".": "is a folder; name a file in it.",
    }.get(what, "is not a regular file; give a file, or to mesp evaluate - and standard input.")
    refused(run("evaluate", bundle, tmp_path / what), said, tmp_path)


def test_a_long_prompt_loses_its_beginning(bundle: Path, tmp_path: Path):
    records = [QUESTIONS[0] | {"prompt": "war " * 40 + QUESTIONS[0]["prompt"]}]
    data = write(tmp_path / "data.jsonl", records)
    done = call("evaluate", bundle, data, "--max-length", 8)
    assert done.stderr == "Prompts that --max-length 8 cut to their end: 1.\n"


def test_longrope_is_not_evaluated_with_factors_of_shorter_texts(tmp_path: Path):
    factors = [1.0 + i / 4 for i in range(6)]
    rope = {"type": "longrope", "short_factor": factors, "long_factor": [9 * f for f in factors]}
    config = FAMILIES["phi3"] | {"rope_scaling": rope}  # 64 tokens with short factors
    write_model(tmp_path / "model", config)
    bundle = tmp_path / "b.mesp"
    call("export", "--model", tmp_path / "model", "--out", bundle, "--seq-len", 8)
    data = write(tmp_path / "data.jsonl", [{"text": TEXTS[2] * 40}])
    said = "Beyond 64 tokens the model scales positions differently from the bundle; take a"
    refused(run("evaluate", bundle, data, "--max-length", 65), said, tmp_path)
    found, _ = evaluate(bundle, [{"text": TEXTS[2] * 40}], tmp_path)
    assert found["max_length"] == 64


def test_ctrl_c_leaves_nothing(bundle: Path, tmp_path: Path):
    data = write(tmp_path / "data.jsonl", [{"text": TEXTS[2] * 40}] * 1000)
    engine, runs, out = tmp_path / "engine", tmp_path / "runs", tmp_path / "out.json"
    engine.write_text(f'#!/bin/sh\n[ $1 = evaluate ] && touch {runs}\nexec {find_engine()} "$@"\n')
    engine.chmod(0o755)
    process = subprocess.Popen(
        command("evaluate", bundle, data, "--out", out),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "MESP_ENGINE": str(engine)},
    )  # fmt: skip
    wait_for(runs.exists, process)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=HANG)
    assert (process.returncode, printed, errors) == (130, "", "")
    assert not out.exists()


def test_ctrl_c_while_it_loads_is_silent(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def stop(_: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mesp.evaluation.evaluate.load_bundle_tokenizer", stop)
    done = run("evaluate", bundle, write(tmp_path / "data.jsonl", TASKS))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


LONG_CHOICE = json.dumps({"prompt": "a", "choices": [" b", " war" * 2000], "answer": 0})
EQUAL = '"choices" of which two are equal'
BAD_RECORDS = {
    "no JSON": ("{", "Line 1 of {} is not JSON."),
    "no object": ("[1]", "Record 1 of {} is not an object"),
    "nothing": ("", "has no records"),
    "unknown": ('{"question": "x"}', "has question; records have"),
    "pair": ('{"prompt": "a", "chosen": "b", "rejected": "c"}', "has prompt, chosen, rejected"),
    "one choice": ('{"prompt": "a", "choices": ["b"], "answer": 0}', "two or more strings"),
    "no prompt": ('{"choices": ["b", "c"], "answer": 0}', 'no "prompt"'),
    "no answer": ('{"prompt": "a", "choices": ["b", "c"]}', '"answer" that is neither'),
    "far answer": ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "from 0 to 1"),
    "true answer": ('{"prompt": "a", "choices": ["b", "c"], "answer": true}', "from 0 to 1"),
    "empty text": ('{"text": ""}', "has an empty text"),
    "no last answer": ('{"messages": [{"role": "user", "content": "a"}]}', "do not end with"),
    "two kinds": ('{"text": "a"}\n{"prompt": "a", "completion": "b"}', "is of another kind"),
    "empty prompt": ('{"prompt": "", "completion": "b"}', "Line 1 of {}: The prompt is empty"),
    "no token": ('{"prompt": "a", "choices": ["b", "c"], "answer": 0}', "begin it with a space"),
    "nested": ("[" * 100_000, "{} is not JSON."),
    "half a character": ('{"text": "\\ud83d"}', "Line 1 of {} has half a character"),
    "equal choices": ('{"prompt": "a", "choices": [" b", " b"], "answer": 1}', EQUAL),
    "long": (LONG_CHOICE, "Line 1 of {}: a choice has"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_RECORDS)
def test_bad_records_are_named(bundle: Path, tmp_path: Path, kind: str):
    text, said = BAD_RECORDS[kind]
    data = tmp_path / "data.jsonl"
    data.write_text(text)
    options = ["--no-chat"] if kind == "empty prompt" else []
    refused(run("evaluate", bundle, data, "--out", tmp_path / "out.json", *options), said, data)
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "Name either a file to measure on, or --tasks."),
        (["DATA", "--tasks", "arc"], "Name either"),
        (["DATA", "--json"], '--json is for records with "prompt" and "completion"'),
        (["DATA", "--num-fewshot", 0], "--num-fewshot needs --tasks"),
        (["--tasks", ","], "--tasks has no value; give one, or leave it out."),
        (["TEXTS", "--chat"], "--chat is for records with a prompt"),
        (["TALKS", "--no-chat"], "messages go through the chat template"),
        (["missing.jsonl"], "There is no file missing.jsonl; correct the path."),
        (["TASKS", "--extract", "("], "--extract ( is not a regular expression"),
        (["TASKS", "--extract", "a{99999999999}"], "is not a regular expression"),
        (["TASKS", "--max-tokens", 5000], "leave no room for a prompt"),
        (["DATA", "--out", "."], ". cannot be written; name another --out."),
        (["DATA", "--out", "PIPE"], "pipe cannot be written; name another --out."),
        (["DATA", "--out", "x" * 250], "File name too long"),
        (["DATA", "--out", "DATA"], "is the data; name another file."),
        (["DATA", "--adapters", "nowhere"], "There is no folder "),
    ],
)
def test_bad_options_are_one_sentence(bundle: Path, tmp_path: Path, options: list, said: str):
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant")]
    places = {
        "DATA": write(tmp_path / "data.jsonl", QUESTIONS),
        "TASKS": write(tmp_path / "tasks.jsonl", TASKS),
        "PIPE": tmp_path / "pipe",
        "TEXTS": write(tmp_path / "texts.jsonl", [{"text": "a"}]),
        "TALKS": write(tmp_path / "talks.jsonl", [{"messages": messages}]),
    }
    os.mkfifo(places["PIPE"])
    typed = [places.get(option, option) for option in options]
    refused(run("evaluate", bundle, *typed), said, tmp_path)


def test_the_harness_is_an_extra(bundle: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "mesp.evaluation.harness", raising=False)
    done = run("evaluate", bundle, "--tasks", "arc_easy")
    refused(done, "--tasks needs lm-evaluation-harness: pip install 'mesp[harness]'.", bundle)


def refused(done: subprocess.CompletedProcess, said: str, place: Path) -> None:
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert said.format(place) in done.stderr
