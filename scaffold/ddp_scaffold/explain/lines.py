"""A line of a log, cleaned: who wrote it and when, by the prefixes that launchers and collectors put before it."""

from __future__ import annotations

import re
from dataclasses import dataclass

LONGEST = 4000  # characters of a line that are looked at
ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
RANK = re.compile(r"\[rank(\d{1,6})\]:?")
TASK = re.compile(r"^\s*(\d{1,6}):(?:\s|$)")
TAG = re.compile(r"\[\d+,(\d{1,6})\]<std(?:err|out)>:")  # of mpirun --tag-output: its job, and the rank
LOCAL = re.compile(r"\[(?:default)?(\d{1,4})\]:")
GLUED_LOCAL = re.compile(r"\[(?:default)?(\d{1,4})\]:\[[EWIF] ?\w")  # behind a progress bar, say
# Prefixes that may stand before the program's own line, in any order; each is taken off at the front.
FRONT = re.compile(
    r"\s*(?:\|\s*)?(?:"
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?:\s+(?:stdout|stderr) [FP])?(?=[\s|])"
    r"|\([\w.]+(?: \w+=[^,)]*)?(?:,? ?\w+=[^,)]*)*\)(?=\s)"  # Ray: (Actor pid=1, ip=10.0.0.1)
    r"|\[rank\d+\]:?|\[default\d+\]:|\[\d{1,4}\]:(?=[\s\[A-Z])|\d{1,6}:(?=\s)"
    r"|\[\d+,\d+\]<std(?:err|out)>:"
    r"|[\w.-]+ \[std(?:err|out)\]|[\w.-]+-\d+:(?=\s)|(?:node|worker|pod/)[\w./-]*[:>|](?=\s)"
    r"|[a-z][a-z0-9-]*\d[a-z0-9-]*:(?=\s)|\d{1,3}(?:\.\d{1,3}){3}:(?=\s)"  # pdsh: host or address
    r"|\[(?:RANK|[Rr]ank)[:= ]{1,2}\d{1,6}\]:?|\[pod/[\w./-]+\]|[\w.-]+-\d+ +\|(?=\s)"  # the last: docker compose
    r"|(?:<\w*>\s+)?\[\d{4}-[\dT:. +Z-]+\] +[0-9a-f]{8}(?: +\[rank=\d+\])? +\|\|"  # Determined
    r"|\[[^\]\[]{0,40}\](?=\s*\[[Rr]ank[:= ])"  # what a logger puts before the rank
    r"|>(?=\s)"  # quoted
    r")"
)
RANK_AT_FRONT = re.compile(r"(?i)\brank[:= ]{0,2}(\d{1,6})\b")  # [rank: 3], [RANK 3], rank3:, (VllmWorker rank=3 pid=7)
STAMP = re.compile(r"\[?[EWIF](?P<mon>\d{1,2})(?P<day>\d\d) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d\.\d+)")
DATE = re.compile(
    r"(?P<y>\d{4})[-/](?P<mon>\d\d)[-/](?P<day>\d\d)[T_ ](?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d(?:[.,]\d{1,9})?)"
)
IP = re.compile(r"\bip=([\w.:-]+)")
PDSH = re.compile(r"\s*([a-z][a-z0-9-]*\d[a-z0-9-]*|\d{1,3}(?:\.\d{1,3}){3}):\s?$")
HOST = re.compile(r"^(?:\[[^\]]*\] )?([A-Za-z][\w.-]*):\d+:\d+ \[")
MONTH_DAYS = (0, 31, 60, 91, 121, 152, 182, 213, 244, 274, 305, 335)  # before each month, in a leap year


@dataclass(frozen=True)
class Origin:
    """Who wrote a line. `rank` is global; a `local_rank`, or `task` of srun or mpirun, is one with more facts only."""

    rank: int | None = None
    local_rank: int | None = None
    task: int | None = None
    host: str = ""


@dataclass(frozen=True)
class Line:
    """A line, cleaned. `clock` is in seconds of a year, by the process's clock; `collected`, by the collector's."""

    text: str
    body: str
    origin: Origin
    clock: float | None = None
    collected: float | None = None


def printable(text: str) -> str:
    """Return a text without escape sequences and without characters that could act on a terminal."""
    return CONTROL.sub("", ANSI.sub("", text)).replace("\t", "    ")


def decode(raw: bytes) -> str:
    """Return a line as text. Colours and broken UTF-8 go; of what a progress bar has overwritten, the last is kept."""
    text = raw[: 4 * LONGEST].decode("utf-8", "replace")
    if "\r" in text:
        text = next((part for part in reversed(text.split("\r")) if part.strip()), "")
    return printable(text)[:LONGEST].replace("│", " ")


def seconds(month: int, day: int, hour: int, minute: int, second: float) -> float:
    """Return seconds since the begin of a (leap) year: torch's stamps have no year."""
    if not 1 <= month <= 12:
        return 0.0
    return (((MONTH_DAYS[month - 1] + day - 1) * 24 + hour) * 60 + minute) * 60 + second


def _clock(found: re.Match[str] | None) -> float | None:
    if not found:
        return None
    part = found.groupdict()
    return seconds(
        int(part["mon"]), int(part["day"]), int(part["h"]), int(part["m"]), float(part["s"].replace(",", "."))
    )


def parse(text: str) -> Line:
    """Read the prefixes of a cleaned line."""
    at = 0
    while (front := FRONT.match(text, at)) and front.end() > at:
        at = front.end()
    head = text[:at]
    ranks = RANK.findall(text) or RANK_AT_FRONT.findall(head)
    task, local = TASK.match(head) or TAG.search(head), LOCAL.search(head) or GLUED_LOCAL.search(text)
    address = IP.search(head)
    host = address[1] if address else ""
    if not host and (named := HOST.match(text[at:].lstrip()) or (None if ranks else PDSH.match(head))):
        host = named[1]
    stamp = STAMP.search(text)
    date = DATE.search(text)
    own = _clock(stamp)
    return Line(
        text=text,
        body=text[at:].removeprefix(" "),
        origin=Origin(
            rank=int(ranks[-1]) if ranks else None,
            local_rank=int(local[1]) if local else None,
            task=int(task[1]) if task else None,
            host=host,
        ),
        clock=own if own is not None else (_clock(date) if date and date.start() >= at else None),
        collected=_clock(date) if date and date.start() < at else None,
    )
