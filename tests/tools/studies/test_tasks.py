import json
import re

import pytest

from studies.tasks import house_requests, spoken_notes
from studies.tasks.house_requests import ALSO_CALLED, SOON, WHEN

NUMBERS = {name: number for number, name in enumerate(spoken_notes.HOURS)}
each_when = pytest.mark.parametrize("whens", [SOON, WHEN], ids=["soon", "any day"])


@each_when
def test_neither_the_commands_nor_the_wordings_that_are_held_out_are_trained_on(
    whens: dict[str, list[str]],
):
    train = house_requests.cases(1600, seed=0, held_out=False, whens=whens)
    held_out = house_requests.cases(200, seed=1, held_out=True, whens=whens)
    assert len(set(train)) == 1600 and len(set(held_out)) == 200
    commands = [{case.completion for case in cases} for cases in (train, held_out)]
    assert not commands[0] & commands[1]
    assert not set(house_requests.HEARD) & set(house_requests.UNHEARD)
    words = [{w for c in each for w in json.loads(c).values()} for each in commands]
    assert words[1] <= words[0]


@each_when
def test_a_request_names_what_its_answer_has(whens: dict[str, list[str]]):
    for case in house_requests.cases(300, seed=2, held_out=False, whens=whens):
        answer = json.loads(case.completion)
        assert list(answer) == ["do", "what", "where", "when"]
        assert answer["where"] in case.prompt
        assert any(word in case.prompt for word in ALSO_CALLED.get(answer["what"], ["the"]))
        assert answer["when"].lower() in case.prompt.lower()
        assert case.prompt.endswith(".") and case.prompt[0].isupper() and "  " not in case.prompt


def test_nothing_of_held_out_notes_is_trained_on():
    train, held_out = (spoken_notes.cases(800, seed=0, held_out=each) for each in (False, True))
    assert len(set(train)) == len(set(held_out)) == 800
    entries = [[json.loads(case.completion) for case in cases] for cases in (train, held_out)]
    for said in (
        lambda entry: {entry["title"]},
        lambda entry: {*(entry["with"] or "").split(" and ")} - {""},
        lambda entry: {entry["where"]} - {None},
        lambda entry: {(entry["day"], entry["time"])},
    ):
        trained, new = (set.union(*map(said, each)) for each in entries)
        assert new and not trained & new
    for heard, unheard in zip(spoken_notes.HEARD, spoken_notes.UNHEARD, strict=True):
        assert not {*heard} & {*unheard}


def test_a_note_says_what_its_entry_has():
    for case in spoken_notes.cases(500, seed=2, held_out=False):
        entry = json.loads(case.completion)
        assert list(entry) == ["title", "with", "where", "day", "time"]
        assert case.prompt == spoken_notes.INSTRUCTION + case.note
        spoken = re.sub(r"\b(um|uh|so|let's see) ", "", f"{case.note} ")
        for words in (entry["title"], entry["with"], entry["where"]):
            assert words is None or words.lower() in spoken
        # If a note corrects itself, the last day and time count.
        days = re.findall(rf"\b({'|'.join(map(str.lower, spoken_notes.DAYS))})\b", spoken)
        assert days[-1] == entry["day"].lower()
        assert times(spoken)[-1] == entry["time"], case


def times(spoken: str) -> list[str]:
    hour = "|".join(NUMBERS)
    found = []
    for match in re.finditer(
        rf"at (?:(noon)|(?:(quarter|half) past )?({hour})(?: (fifteen|thirty|forty five|o'clock))? "
        r"in the (morning|afternoon|evening))\b",
        spoken,
    ):
        noon, part, name, after, period = match.groups()
        minute = {"quarter": 15, "half": 30, "fifteen": 15, "thirty": 30, "forty five": 45}
        minutes = minute.get(part or after or "", 0)
        at = 12 if noon else NUMBERS[name] or 12
        found.append(f"{at}:{minutes:02} {'am' if period == 'morning' else 'pm'}")
    return found
