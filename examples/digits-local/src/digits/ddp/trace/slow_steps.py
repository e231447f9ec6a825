"""How long steps take: notices one slow step, and steps that become slower and slower, while training goes on."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping

import torch.distributed as dist

# What a training step consists of; evaluation, sampling and checkpoints are no part of it.
STEP_PHASES = ("data", "forward", "backward", "optim", "log")
USUAL = 50  # steps that make up what is usual
WAITS = "; there it also waits for other ranks: their logs say more"
SINGLY = 3  # slow steps that are told one by one; then their number, each time that it has doubled
SLOW, GROWN = 2.0, 2.0  # times the usual; times the first ones


class Pace:
    """Fed once a step by `step_done`; `take_notes` hands over what is worth a warning."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._recent: deque[float] = deque(maxlen=USUAL)
        self._phases: deque[dict[str, float]] = deque(maxlen=USUAL)
        self._first: float | None = None  # median of the first full window: what later ones are compared with
        self._notes: list[str] = []
        self._slow = self._told = 0  # slow steps so far, and at the last note
        self._phases_of_slow: Counter[str] = Counter()
        self._slowest = (0.0, 0)  # seconds, and the step, of those since the last note

    @property
    def settled(self) -> bool:
        """Whether enough steps were made to tell what is usual."""
        return self._first is not None

    def step_done(self, step: int, seconds: Mapping[str, float]) -> None:
        """`seconds` are the totals spent in each phase since the start."""
        spent = {name: seconds.get(name, 0.0) - self._last.get(name, 0.0) for name in STEP_PHASES}
        self._last = {name: seconds.get(name, 0.0) for name in STEP_PHASES}
        took = sum(spent.values())
        if len(self._recent) >= 10:
            usual = statistics.median(self._recent)
            if took > SLOW * usual and took - usual > 0.5:
                each = {name: statistics.median(past[name] for past in self._phases) for name in STEP_PHASES}
                most = max(spent, key=lambda name: spent[name] - each[name])
                waits = WAITS if most == "backward" and dist.is_initialized() and dist.get_world_size() > 1 else ""
                self._note_slow(
                    f"slow step: step {step} took {took:.1f} s, {usual:.2g} s is usual; "
                    f"{spent[most]:.1f} s in {most}, {each[most]:.2g} s is usual{waits}",
                    (took, step),
                    most,
                )
        self._recent.append(took)
        self._phases.append(spent)
        if len(self._recent) == USUAL and step % USUAL == 0:
            self._compare(step)

    def _note_slow(self, text: str, slow: tuple[float, int], most: str) -> None:
        """The first ones in words, then how many there were: a warning that always comes is read by nobody."""
        self._slow += 1
        self._phases_of_slow[most] += 1
        self._slowest = max(self._slowest, slow)
        if self._slow <= SINGLY:
            self._notes.append(text)
            self._told, self._slowest = self._slow, (0.0, 0)
        elif self._slow >= 2 * self._told:
            name, many = self._phases_of_slow.most_common(1)[0]
            slowest = f"the slowest since the last note was step {self._slowest[1]} with {self._slowest[0]:.1f} s"
            so_far = f"slow steps: {self._slow} in this start, {many} of them because of {name}; {slowest}"
            self._notes.append(f"{so_far}; the next note comes after {2 * self._slow}")
            self._told, self._slowest = self._slow, (0.0, 0)

    def _compare(self, step: int) -> None:
        usual = statistics.median(self._recent)
        if self._first is None or usual < self._first:
            self._first = usual
        elif usual > GROWN * self._first and usual - self._first > 0.01:
            self._notes.append(
                f"steps become slower: {self._first:.2g} s at first, {usual:.2g} s (median of {USUAL}) at step {step}; "
                "longer samples, memory that fills, or a machine that throttles"
            )
            self._first = usual  # the next note comes when they have doubled again

    def take_notes(self) -> list[str]:
        """What was noticed since the last call."""
        notes, self._notes = self._notes, []
        return notes
