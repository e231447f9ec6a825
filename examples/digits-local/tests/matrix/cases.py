"""What a case of the matrix is; the cases themselves stand in cases.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

CLOCKS = {"init": 60.0, "loader": 5.0, "stall": 7.0, "collective": 12.0, "guard": 14.0, "silent": 4.0, "beat": 0.5}
CLOCKS |= {"compile": 13.0}
CODES = {"benign": 0, "rank_killed": 70, "missing_rank": 70, "rank0_work": 70, "unknown": 70, "rendezvous_failed": 70}
CODES |= {"uneven_inputs": 78}  # the others are exceptions: 1


class Case(BaseModel, extra="forbid", frozen=True):
    """A fault, how the run must end, and who must be named. Row and order are those of the documentation."""

    row: int
    name: str
    faults: str = ""  # DDP_FAULTS
    kind: str = "benign"  # of the outcome
    or_kind: str = ""  # this is right as well: what can be told depends on the backend
    ranks: list[int] | None = None  # the first ranks of the outcome; None: it cannot be told, or nobody is to blame
    code: int | None = None  # of the outcome; by default what the kind has, or any but 0 for what may also hang
    deadline: str = ""  # the clock that rings, counted from the fault; empty: the fault itself
    says: list[str] = []  # what the output or the report must contain
    exits: dict[str, int] = {}  # the exit code of each rank, where they do not all say the same as the outcome
    same_losses: bool = False  # all metrics equal those of a training without a fault, to the last digit
    warns: str = ""  # and this exactly once
    root_cause: str = ""  # how the last failure of torchrun's table begins: "rank 1: rank_killed"
    args: list[str] = []
    program: str = ""  # of programs.py, instead of training
    check: str = ""  # of checkpoints.py, instead of a run
    processes: int = 2
    script: bool = False  # start it by launch/torchrun.sh
    torchrun: list[str] = []  # further options of torchrun
    by_hand: list[dict[str, str | int]] = []  # no launcher: a process for each of these sets of variables
    env: dict[str, str] = {}  # "+9" is the unix time in nine seconds
    in_the_way: str = ""  # a file stands where this directory is needed
    full: str = ""  # every write to this file fails for want of space
    gpu: bool = False  # is run on GPUs as well
    three: dict[str, Any] | None = None  # run it with three ranks as well, where these keys have other values

    @property
    def codes(self) -> set[int]:
        """Exit codes that are right."""
        if self.code is not None:
            return {self.code}
        if self.kind in ("mismatched_collectives", "divergent_control_flow"):
            return {1, 70}  # noticed at an agreement, or when calls hang
        return {CODES.get(self.kind, 1)}

    @property
    def deadline_s(self) -> float:
        return CLOCKS[self.deadline] if self.deadline else 0.0


def cases() -> list[Case]:
    """All cases, in order: those of cases.yaml, then what people have reported in public (reports_*.yaml)."""
    here = Path(__file__).parent
    found: list[Case] = []
    for path in [here / "cases.yaml", *sorted(here.glob("reports_*.yaml"))]:
        for case in yaml.safe_load(path.read_text()):
            found.append(Case(**case))
            if found[-1].three is not None:
                name = f"{found[-1].name}, three ranks"
                found.append(Case(**{**case, "name": name, "processes": 3, "three": None, **found[-1].three}))
    return found
