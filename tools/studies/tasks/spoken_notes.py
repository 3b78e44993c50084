"""Spoken notes, and the calendar entry as JSON that each asks for.

A note names an event, its time, and perhaps people and a place, as people dictate. Notes have
hesitations and corrections, but no punctuation.
"""

import calendar
import itertools
import json
import random
import zlib
from typing import NamedTuple

HELD_OUT = 5

INSTRUCTION = "Calendar entry as JSON with title, with, where, day, time: "


class Case(NamedTuple):
    prompt: str
    completion: str

    @property
    def note(self) -> str:
        return self.prompt.removeprefix(INSTRUCTION)


class Words(NamedTuple):
    titles: list[str]
    people: list[str]
    places: list[str]
    wordings: list[str]
    hesitations: list[str]
    corrections: list[str]


def _pairs(first: str, second: str) -> list[str]:
    return [" ".join(pair) for pair in itertools.product(first.split(), second.split())]


SUBJECTS = """
piano violin drum swimming driving spanish french english sewing pottery painting drawing
football tennis hockey volleyball rugby judo karate chess yoga dance singing choir theater
doctor vet optician bank insurance tax visa passport mortgage rent lease car bike boiler
roof kitchen garage window budget sales marketing safety hiring planning strategy design
product research press board team staff student parents school college birthday wedding
anniversary farewell retirement graduation engagement family neighbor museum gallery zoo
harbor vineyard castle blood skin knee back eye allergy photo video radio podcast book film
poetry history math physics biology coffee lunch dinner brunch breakfast charity church
"""
KINDS = """
lesson class meeting appointment review check test practice party call visit tour interview
workshop session talk rehearsal exam training inspection course evening gathering
"""
PEOPLE = """
anna ben clara david emma felix grace henry isabel jack karen leo maria noah olivia paul
rosa sam tina victor wendy yusuf zoe peter lucy omar helen martin julia oscar nina tom sara
max lena eric diana ivan laura george amy steven nora philip ruth simon vera walter monica
arthur bella chris daniel eva fiona gavin hannah irene jonas kate liam mia nathan otto
pamela quinn rachel sophie tara ulrich valerie will xenia yvonne andrew beth carl dora edgar
flora gerald hilda isaac jenny kurt linda marcus norman olga pedro rita stella theo ursula
"""
NAMES = """
old new green red blue white black golden silver north south east west upper lower grand
little royal city river lake forest hill garden market mill rose oak maple linden
station central main park bridge castle
"""
BUILDINGS = """
cafe hall room office school library hotel bar restaurant theater clinic gym pool studio
club house center square shop inn tower terrace
"""
# With so many words, copying is easier to learn than memorizing them.
HEARD = Words(
    titles=_pairs(SUBJECTS, KINDS),
    people=PEOPLE.split(),
    places=_pairs(NAMES, BUILDINGS),
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
        *("dentist appointment", "guitar lesson", "ballet recital", "wine tasting"),
        *("cooking class", "basketball practice", "garden party", "hearing test"),
        *("job interview", "flute recital", "apartment viewing", "fencing tournament"),
        *("pension review", "italian course", "project kickoff", "climbing trip"),
    ],
    people=[
        *("alice", "bruno", "carmen", "dennis", "elena", "frank", "greta", "hugo", "ines", "kim"),
        *("mario", "paula"),
    ],
    places=[
        *("beach pavilion", "football stadium", "cherry orchard", "railway museum"),
        *("university hospital", "winter garden", "village bakery", "opera house"),
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
FIRST, LAST = 7, 21  # first and last hour of an entry


def cases(count: int, seed: int, *, held_out: bool) -> list[Case]:
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
    where = f"{draw.choice(['at', 'in'])} the {place}"
    who = f"with {person}"
    if draw.random() < 0.2:
        other = draw.choice([each for each in words.people if each != person])
        who, person = f"{who} and {other}", f"{person} and {other}"
    if draw.random() < 0.4:
        who, person = "", None
    if draw.random() < 0.4:
        where, place = "", None
    said = {"day": _say_day(draw, day), "time": _say_time(draw, *time)}
    if draw.random() < 0.3:
        # The note first states a wrong day or time and then corrects it.
        changed = draw.choice([*said])
        if changed == "day":
            wrong = _say_day(draw, draw.choice([each for each in DAYS if each != day]))
        else:
            wrong = _say_time(draw, time[0], draw.choice([m for m in (0, 15, 30) if m != time[1]]))
        said[changed] = f"{wrong} {draw.choice(words.corrections)} {said[changed]}"
    note = draw.choice(words.wordings).format(
        title=f"{draw.choice(['the', _article(title)])} {title}", who=who, where=where, **said
    )
    note = note.split()
    if draw.random() < 0.4:
        note.insert(draw.randint(0, 1) and len(note) // 2, draw.choice(words.hesitations))
    entry = {
        "title": title,
        "with": person and " and ".join(each.capitalize() for each in person.split(" and ")),
        "where": place,
        "day": day,
        "time": f"{time[0] % 12 or 12}:{time[1]:02} {'am' if time[0] < 12 else 'pm'}",
    }
    return Case(INSTRUCTION + " ".join(note), json.dumps(entry))


def _article(word: str) -> str:
    return "an" if word[0] in "aeio" else "a"


def _say_day(draw: random.Random, day: str) -> str:
    if day in ("today", "tomorrow"):
        return day
    return f"{draw.choice(['', 'on ', 'on ', 'this '])}{day.lower()}"


def _say_time(draw: random.Random, hour: int, minute: int) -> str:
    if (hour, minute) == (12, 0) and draw.random() < 0.5:
        return "at noon"
    name = HOURS[hour % 12]
    clock = {
        0: [name, f"{name} o'clock"],
        15: [f"quarter past {name}", f"{name} fifteen"],
        30: [f"half past {name}", f"{name} thirty"],
        45: [f"{name} forty five"],
    }
    part = "morning" if hour < 12 else "afternoon" if hour < 18 else "evening"
    return f"at {draw.choice(clock[minute])} in the {part}"
