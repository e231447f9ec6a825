"""Every rule for Python: files where it must fire, at the lines that are marked with `#!`, and look-alikes where not.

The cases stand in cases/*.txt. `=== DDP101 fires: why` begins one, `--- name.py` another file of it; `main.py` comes
first, after the imports of PREAMBLE.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_scaffold.check.files import SourceFile
from ddp_scaffold.check.findings import Finding
from ddp_scaffold.check.python import findings
from ddp_scaffold.check.rules import PYTHON

PREAMBLE = """\
import glob, math, os, random, signal, sys, time
import numpy as np
import torch, torch.nn as nn, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler
def wrapped(net):
    return DDP(net)
"""
HEADER = re.compile(r"=== (DDP\d{3}) (fires|silent): (.+)")


@dataclass(frozen=True)
class Case:
    """A small program, and whether the rule must find something in it."""

    rule: str
    fires: bool
    why: str
    files: tuple[tuple[str, str], ...]

    @property
    def expected(self) -> set[tuple[str, int]]:
        """Return the file and the number of each line that is marked."""
        lines = ((name, number, line) for name, text in self.files for number, line in enumerate(text.split("\n"), 1))
        return {(name, number) for name, number, line in lines if line.endswith("#!")}


def read_cases(text: str) -> Iterator[Case]:
    """Yield the cases of one file."""
    for block in re.split(r"^(?==== )", text, flags=re.MULTILINE):
        head, _, body = block.partition("\n")
        if not (found := HEADER.fullmatch(head.strip())):
            continue
        parts = re.split(r"^--- (\S+)\n", body, flags=re.MULTILINE)
        files = [("main.py", PREAMBLE + parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]
        yield Case(found[1], found[2] == "fires", found[3], tuple(files))


CASES = [
    case
    for path in sorted((Path(__file__).parent / "cases").glob("*.txt"))
    for case in read_cases(path.read_text("utf-8"))
]


def check(*files: tuple[str, str]) -> list[Finding]:
    """Return the findings in files that are given by name and text."""
    return list(findings([SourceFile(name, text, "python", name) for name, text in files]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.why}".replace(" ", "-"))
def test_rule(case: Case) -> None:
    assert bool(case.expected) == case.fires, "what fires has marked lines, what is silent has none"
    found = {(one.file, one.line): one for one in check(*case.files) if one.rule == case.rule}
    assert set(found) == case.expected, [one.message for one in found.values()]


def test_every_rule_has_three_of_each() -> None:
    counted = Counter((case.rule, case.fires) for case in CASES)
    few = [
        f"{one.rule.id} {'fires' if fires else 'silent'}: {counted[one.rule.id, fires]}"
        for one in PYTHON
        for fires in (True, False)
        if counted[one.rule.id, fires] < 3
    ]
    assert few == []
