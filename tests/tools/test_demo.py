"""`make demo`: its task, how its answers are compared, and all of it in a few steps."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest

import demo
from helpers.paths import DEMO_BUNDLE
from mesp.data.tokenizer import load_bundle_tokenizer
from mesp.engine.build import find_engine
from tasks import exact_match, house


@pytest.mark.parametrize("whens", [house.SOON, house.WHEN], ids=["soon", "any day"])
def test_neither_the_commands_nor_the_wordings_that_are_held_out_are_trained_on(
    whens: dict[str, list[str]],
):
    train = house.cases(1600, seed=0, held_out=False, whens=whens)
    held_out = house.cases(200, seed=1, held_out=True, whens=whens)
    assert len(set(train)) == 1600 and len(set(held_out)) == 200
    commands = [{case.completion for case in cases} for cases in (train, held_out)]
    assert not commands[0] & commands[1]
    assert not set(house.HEARD) & set(house.UNHEARD)
    # Every word that is to be found was heard in training, of another command.
    words = [{w for c in each for w in json.loads(c).values()} for each in commands]
    assert words[1] <= words[0]


@pytest.mark.parametrize("whens", [house.SOON, house.WHEN], ids=["soon", "any day"])
def test_a_request_names_what_its_answer_has(whens: dict[str, list[str]]):
    for case in house.cases(300, seed=2, held_out=False, whens=whens):
        answer = json.loads(case.completion)
        assert list(answer) == ["do", "what", "where", "when"]
        assert answer["where"] in case.prompt
        assert any(word in case.prompt for word in house.ALSO_CALLED.get(answer["what"], ["the"]))
        assert answer["when"].lower() in case.prompt.lower()
        assert case.prompt.endswith(".") and case.prompt[0].isupper() and "  " not in case.prompt


@pytest.mark.parametrize("wrong", [None, 3], ids=["right", "wrong"])
def test_an_answer_is_right_to_the_letter(monkeypatch: pytest.MonkeyPatch, wrong: int | None):
    """A wrong one is read to its end only where it is shown."""
    case = house.Case("Open the door.", '{"do": "open"}')
    tokenizer = load_bundle_tokenizer(DEMO_BUNDLE)
    right = [*tokenizer.encode(f" {case.completion}"), tokenizer.eos_token_id]
    read = []

    class Engine:
        def generate(self, prompts, max_tokens, stop, at_once, go_on):
            assert (max_tokens, stop) == (len(right), [])
            for index, prompt in enumerate(prompts):
                assert tokenizer.decode(prompt).endswith("Open the door.\nassistant:")
                for at, token in enumerate(right):
                    read.append(at)
                    if not go_on(index, token if at != wrong else token + 1):
                        break
                yield index

    def evaluator(bundle, adapters):
        assert (bundle, adapters) == (DEMO_BUNDLE, None)
        return contextlib.nullcontext(Engine())

    monkeypatch.setattr(exact_match, "evaluator", evaluator)
    shown, other = exact_match.answers(DEMO_BUNDLE, [case, case], whole=1)
    assert shown.is_right is other.is_right is (wrong is None)
    assert (shown.text == case.completion) is (wrong is None)
    assert len(read) == len(right) + (len(right) if wrong is None else wrong + 1)


@pytest.mark.slow
def test_the_demo_counts_what_is_right(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, tmp_path: Path
):
    find_engine()
    for name, value in {"STEPS": 21, "TRAINING_CASES": 42, "HELD_OUT_CASES": 3, "SHOWN": 2}.items():
        monkeypatch.setattr(demo, name, value)
    monkeypatch.setattr(demo, "OUT", tmp_path)
    demo.main(["--seed", "1"], standalone_mode=False)
    printed, _ = capfd.readouterr()
    assert "Right to the letter: 0 of 3 before fine-tuning, 0 of 3 after." in printed
    requests = (tmp_path / "requests" / "valid.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in requests]
    for prompt in prompts[:2]:
        assert f"\n{prompt}\n  before ✗ " in printed
    assert prompts[2] not in printed
    (samples,) = (tmp_path / "collected").glob("*/samples.json")
    assert [each["prompt"] for each in json.loads(samples.read_text())] == prompts[:2]
    assert prompts[0] in (tmp_path / "report.html").read_text()
    shutil.rmtree(tmp_path)
