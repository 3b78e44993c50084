from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from mesp.errors import MespError
from mesp.exact_match import canonical_json, exact_match

# The keyword arguments are lists of equal length: `prompts`, `completions` (the sampled answers)
# and `references` (the answers in the data).
Reward = Callable[..., Sequence[float]]

MOST = 1e30  # the largest absolute value of a reward; the engine computes in float32

BUILT_IN = ("exact", "json", "json-equal", "regex:PATTERN", "length:N")


def find_reward(name: str, may_import: bool) -> Reward:
    """Returns the reward of this name: one of `BUILT_IN`, or ``module:function``.

    The module is in the working folder or installed.
    """
    kind, _, rest = name.partition(":")
    if name == "exact":
        return _each(lambda answer, right: exact_match(answer.strip(), right.strip()))
    if name == "json":
        return _each(lambda answer, _: canonical_json(answer) is not None)
    if name == "json-equal":
        return _each(lambda answer, right: exact_match(answer, right, is_json=True))
    if kind == "regex":
        try:
            pattern = re.compile(rest)
        except (re.error, OverflowError, RecursionError) as error:
            raise MespError(f"The pattern of the reward {name} is not valid: {error}.") from error
        return _each(lambda answer, _: pattern.search(answer) is not None)
    if kind == "length" and rest.isdecimal() and int(rest) > 0:
        most = int(rest)
        return _each(lambda answer, _: min(1.0, most / max(1, len(answer))))
    if not kind or not rest:
        raise MespError(
            f"There is no reward {name}; there are {', '.join(BUILT_IN)}, and module:function."
        )
    if not may_import:
        raise MespError(
            f"The reward {name} is Python code that a file names, which is not run: if the code is "
            f"yours, add --reward {name}."
        )
    return _imported(name, kind, rest)


def _each(score: Callable[[str, str], float]) -> Reward:
    def reward(
        *, prompts: Sequence[str], completions: Sequence[str], references: Sequence[str]
    ) -> list[float]:
        return [float(score(*each)) for each in zip(completions, references, strict=True)]

    return reward


def _imported(name: str, module: str, function: str) -> Reward:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise MespError(f"The reward {name} cannot be imported: {reason}.") from error
    if not callable(found):
        raise MespError(f"The reward {name} is not a function.")
    return found  # type: ignore[no-any-return]


def compute_rewards(
    reward: Reward, prompts: Sequence[str], completions: Sequence[str], references: Sequence[str]
) -> list[float]:
    """Raises MespError if `reward` fails, or if it does not return a number within ±`MOST` for each
    answer.
    """
    try:
        given = reward(
            prompts=list(prompts), completions=list(completions), references=list(references)
        )
        numbers = [float(each) for each in given]
    except (Exception, SystemExit) as error:
        raise MespError(f"The reward function failed: {type(error).__name__}: {error}.") from error
    if len(numbers) != len(completions) or not all(abs(each) <= MOST for each in numbers):
        raise MespError(
            f"The reward function must return a finite number for each of {len(completions)} "
            f"answers, at most {MOST:g} in size."
        )
    return numbers
