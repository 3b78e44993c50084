"""Spoken notes, and the calendar entry that each asks for, as JSON.

A note says what there is, when, and perhaps with whom and where, as people dictate: without
punctuation, with hesitations, and with words that take back what was said before them. Held-out
notes have other titles, names, places, wordings, hesitations and corrections than those that are
trained on, and days and times that do not occur together there.
"""

from __future__ import annotations

import calendar
import json
import random
import zlib
from typing import NamedTuple

HELD_OUT = 5  # one day and time in so many

# Asked of the model without fine-tuning too.
INSTRUCTION = "Calendar entry as JSON with title, with, where, day, time: "


class Case(NamedTuple):
    """A note with the instruction, and the JSON that is its only right answer."""

    prompt: str
    completion: str

    @property
    def note(self) -> str:
        return self.prompt.removeprefix(INSTRUCTION)


class Words(NamedTuple):
    """What notes are made of."""

    titles: list[str]
    people: list[str]
    places: list[str]
    wordings: list[str]
    hesitations: list[str]
    corrections: list[str]


HEARD = Words(
    titles=[
        *("lunch", "dinner", "breakfast", "coffee", "a haircut", "a meeting", "a team meeting"),
        *("a piano lesson", "a swimming lesson", "football practice", "choir practice", "yoga"),
        *("a doctor's appointment", "a job interview", "the budget review", "a birthday party"),
        *("a parents' evening", "a house viewing", "a phone call", "a video call", "chess club"),
        *("a concert", "a barbecue", "the car inspection", "a bike tour", "a book club meeting"),
        *("a driving lesson", "the school play", "a blood test", "an eye test", "a museum visit"),
        *("tennis", "a design workshop", "the rent talk", "a farewell drink", "a photo shoot"),
    ],
    people=[
        *("anna", "ben", "clara", "david", "emma", "felix", "grace", "henry", "isabel", "jack"),
        *("karen", "leo", "maria", "noah", "olivia", "paul", "rosa", "sam", "tina", "victor"),
        *("wendy", "yusuf", "zoe", "peter", "lucy", "omar", "helen", "martin", "julia", "oscar"),
    ],
    places=[
        *("at the station", "at the office", "in the park", "at the town hall", "at the harbor"),
        *("in the library", "at school", "at home", "in the old mill", "at the garden center"),
        *("at the sports club", "in the blue room", "at the museum", "in the market hall"),
        *("at the corner bar", "at the clinic", "in the backyard", "at the riverside cafe"),
        *("at the airport", "in the main building", "at the city pool", "in the town square"),
    ],
    wordings=[
        "{title} {who} {where} {day} {time}",
        "{title} {day} {time} {who} {where}",
        "{day} {time} {title} {who} {where}",
        "{day} {title} {where} {who} {time}",
        "i have {title} {day} {time} {where} {who}",
        "i've got {title} {who} {day} {time} {where}",
        "we have {title} {where} {day} {time} {who}",
        "there is {title} {where} {who} {day} {time}",
        "please add {title} {day} {time} {where} {who}",
        "add {title} {who} {time} {day} {where}",
        "put down {title} {time} {day} {who} {where}",
        "remember {day} there's {title} {who} {where} {time}",
        "my plan {day} is {title} {time} {where} {who}",
        "{day} i want to have {title} {who} {time} {where}",
        "{who} {day} {time} {title} {where}",
        "{where} {day} {time} {title} {who}",
    ],
    hesitations=["um", "uh", "so", "let's see"],
    corrections=["no", "no wait", "sorry", "i mean", "actually"],
)
UNHEARD = Words(
    titles=[
        *("a dentist appointment", "a guitar lesson", "a wine tasting", "a project review"),
        *("a picnic", "basketball practice", "a cooking class", "the quarterly report"),
        *("a moving day", "a hearing test", "a garden party", "a ballet recital"),
    ],
    people=["alice", "bruno", "carmen", "dennis", "elena", "frank", "greta", "hugo", "ines", "kim"],
    places=[
        *("at the beach", "in the conference room", "at the train museum", "in the cathedral"),
        *("at the bakery", "at the football stadium", "in the cellar", "at the hotel lobby"),
    ],
    wordings=[
        "don't let me forget {title} {who} {day} {time} {where}",
        "could you write down {title} {where} {day} {time} {who}",
        "new entry {day} {time} {title} {who} {where}",
        "we're having {title} {time} {day} {where} {who}",
        "{time} {day} {title} {where} {who}",
        "it's {title} {day} {who} {where} {time}",
    ],
    hesitations=["er", "hmm", "well"],
    corrections=["no make that", "wait no", "or rather"],
)

DAYS = [*calendar.day_name, "today", "tomorrow"]
HOURS = ["twelve", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
HOURS += ["eleven"]
FIRST, LAST = 7, 21  # hours of the day in which there are entries


def cases(count: int, seed: int, *, held_out: bool) -> list[Case]:
    """`count` cases that are different, of what is held out or of the rest."""
    draw = random.Random(seed)
    words = UNHEARD if held_out else HEARD
    found: dict[Case, None] = {}
    while len(found) < count:
        day, time = draw.choice(DAYS), (draw.randint(FIRST, LAST), draw.choice([0, 15, 30, 45]))
        if (zlib.crc32(f"{day} {time}".encode()) % HELD_OUT == 0) is held_out:
            found[_case(draw, words, day, time)] = None
    return [*found]


def _case(draw: random.Random, words: Words, day: str, time: tuple[int, int]) -> Case:
    title, person, place = map(draw.choice, (words.titles, words.people, words.places))
    who = f"with {person}"
    if draw.random() < 0.2:
        other = draw.choice([each for each in words.people if each != person])
        who, person = f"{who} and {other}", f"{person} and {other}"
    if draw.random() < 0.4:
        who, person = "", None
    if draw.random() < 0.4:
        place = ""
    said = {"day": _say_day(draw, day), "time": _say_time(draw, *time)}
    if draw.random() < 0.3:
        # What is said first is taken back.
        changed = draw.choice([*said])
        if changed == "day":
            wrong = _say_day(draw, draw.choice([each for each in DAYS if each != day]))
        else:
            wrong = _say_time(draw, time[0], draw.choice([m for m in (0, 15, 30) if m != time[1]]))
        said[changed] = f"{wrong} {draw.choice(words.corrections)} {said[changed]}"
    note = draw.choice(words.wordings).format(title=title, who=who, where=place, **said).split()
    if draw.random() < 0.4:
        note.insert(draw.randint(0, 1) and len(note) // 2, draw.choice(words.hesitations))
    entry = {
        "title": _without(title, "a", "an", "the"),
        "with": person and " and ".join(each.capitalize() for each in person.split(" and ")),
        "where": _without(_without(place, "at", "in"), "the") or None,
        "day": day,
        "time": f"{time[0]:02}:{time[1]:02}",
    }
    return Case(INSTRUCTION + " ".join(note), json.dumps(entry))


def _without(text: str, *words: str) -> str:
    """`text` without the first word, where it is one of these."""
    first, _, rest = text.partition(" ")
    return rest if first in words else text


def _say_day(draw: random.Random, day: str) -> str:
    if day in ("today", "tomorrow"):
        return day
    return f"{draw.choice(['', 'on ', 'on ', 'this '])}{day.lower()}"


def _say_time(draw: random.Random, hour: int, minute: int) -> str:
    """The time of day in words: without the part of the day hours from eight to noon are before
    noon, and others after it."""
    if (hour, minute) == (12, 0) and draw.random() < 0.5:
        return "at noon"
    now, then = HOURS[hour % 12], HOURS[(hour + 1) % 12]
    clock = {
        0: [now, f"{now} o'clock"],
        15: [f"quarter past {now}", f"{now} fifteen"],
        30: [f"half past {now}", f"{now} thirty"],
        45: [f"quarter to {then}", f"{now} forty five"],
    }
    said = f"at {draw.choice(clock[minute])}"
    part = "morning" if hour < 12 else "afternoon" if hour < 18 else "evening"
    is_clear = 8 <= hour < 20
    return said if is_clear and draw.random() < 0.6 else f"{said} in the {part}"
