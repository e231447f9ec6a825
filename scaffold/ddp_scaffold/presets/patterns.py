"""How long a regular expression of a preset can take, at most: `re` tries out every way to match before it gives up.

A preset may come from anywhere, and its account pattern is matched at every run of `new`.
"""

from __future__ import annotations

import re
from math import inf

LONGEST = 80  # characters of an account: templates/questions/account.jinja
MOST_WAYS = 1_000_000  # some tenths of a second

# One character or class, with escapes; what begins and ends a group; a repetition, with what makes it lazy.
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]|\(\??|\)|\||(?:[*+?]|\{(\d+|\d*,\d*)\})[?+]?|.", re.DOTALL)


def problem_in(pattern: str) -> str:
    """Return why a pattern cannot be used, or an empty text."""
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a regular expression: {error}"
    if any(token[0] == "(?" for token in TOKEN.finditer(pattern)):  # the template puts it inside another pattern
        return "holds a group that begins with (?; write it with plain groups"
    if _ways(pattern) > MOST_WAYS:
        return "could take hours to match: use fewer repetitions, and none inside a group that is itself repeated"
    return ""


def _ways(pattern: str) -> float:
    """Return a bound of the ways in which a valid pattern can match a text that is no longer than an account."""
    outer: list[tuple[float, float]] = []
    branches, branch, last = 0.0, 1.0, 1.0  # of the branches before, of this one so far, of its last part
    for token in TOKEN.finditer(pattern):
        text = token[0]
        if text == "(":
            outer.append((branches, branch * last))
            branches, branch, last = 0.0, 1.0, 1.0
        elif text == ")":
            inside = branches + branch * last
            (branches, branch), last = outer.pop(), inside
        elif text == "|":
            branches, branch, last = branches + branch * last, 1.0, 1.0
        elif text[0] in "*+?" or token[1]:
            last = _repeated(last, token)
        else:
            branch, last = branch * last, 1.0
    return branches + branch * last


def _repeated(ways: float, token: re.Match[str]) -> float:
    """Return the ways of a part that is repeated: any number of times up to the most. Empty parts count as well."""
    most = LONGEST
    if token[0][0] == "?":
        most = 1
    elif token[1] and (digits := token[1].rpartition(",")[2]):
        most = int(digits)
    if ways == 1:
        return float(most + 1)
    total = 0.0
    for times in range(most + 1):
        total += ways**times
        if total > MOST_WAYS:  # far more, perhaps, than a float can hold
            return inf
    return total
