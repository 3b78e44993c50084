"""Requests to a house, and the JSON that each asks for.

A command names an action, a thing, a place and a time. A request states a command in one of many
wordings. About one in five commands is held out.
"""

import calendar
import json
import random
import zlib
from typing import NamedTuple

HELD_OUT = 5


class Case(NamedTuple):
    prompt: str
    completion: str


WHERE = ["kitchen", "bedroom", "garage", "garden", "office", "hall", "library", "cellar"]
DO = {
    "light": {"turn on": "on", "turn off": "off"},
    "heating": {"turn up": "up", "turn down": "down"},
    "radio": {"play": "play", "mute": "mute"},
    "door": {"open": "open", "close": "close", "lock": "lock"},
    "window": {"open": "open", "close": "close"},
    "alarm": {"set": "set", "clear": "clear"},
}
ALSO_CALLED = {"light": ["light", "lamp"], "radio": ["radio", "music"]}
WHEN = {
    "today": ["today"],
    "tomorrow": ["tomorrow"],
    **{day: [f"on {day}", f"next {day}"] for day in calendar.day_name},
}
# Times that the demo model learns to distinguish in two minutes of training.
SOON = {
    "now": ["now", "right now"],
    "today": ["today"],
    "tomorrow": ["tomorrow"],
    "weekend": ["this weekend", "at the weekend"],
}
HEARD = [
    "{do} the {what} in the {where} {when}",
    "{do} the {where} {what} {when}",
    "please {do} the {where} {what} {when}",
    "could you {do} the {what} {when} in the {where}",
    "I want you to {do} the {what} in the {where} {when}",
    "in the {where}, {do} the {what} {when}",
    "{when} {do} the {what} of the {where}",
    "{when}, please {do} the {where} {what}",
    "{when} I would like you to {do} the {what} in the {where}",
    "the {what} in the {where}: {do} it {when}",
]
UNHEARD = [
    "would you {do} the {where} {what} {when}, please",
    "we need you to {do} the {what} of the {where} {when}",
    "{when}, in the {where}, {do} the {what}",
]


def cases(
    count: int, seed: int, *, held_out: bool, whens: dict[str, list[str]] = WHEN
) -> list[Case]:
    draw = random.Random(seed)
    found: dict[Case, None] = {}
    while len(found) < count:
        what = draw.choice([*DO])
        said, do = draw.choice([*DO[what].items()])
        where, when = draw.choice(WHERE), draw.choice([*whens])
        completion = json.dumps({"do": do, "what": what, "where": where, "when": when})
        if (zlib.crc32(completion.encode()) % HELD_OUT == 0) is not held_out:
            continue
        words = draw.choice(UNHEARD if held_out else HEARD).format(
            do=said,
            what=draw.choice(ALSO_CALLED.get(what, [what])),
            where=where,
            when=draw.choice(whens[when]),
        )
        found[Case(words[0].upper() + words[1:] + ".", completion)] = None
    return [*found]
