"""How long steps take: notices one slow step, and steps that become slower and slower, while training goes on."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping

# What a training step consists of; evaluation, sampling and checkpoints are no part of it.
STEP_PHASES = ("data", "forward", "backward", "optim", "log")
USUAL = 50  # steps that make up what is usual
WAITS = "; there it also waits for other ranks: their logs say more"
SLOW, GROWN = 2.0, 2.0  # times the usual; times the first ones


class Pace:
    """Fed once a step by `step_done`; `take_notes` hands over what is worth a warning."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._recent: deque[float] = deque(maxlen=USUAL)
        self._phases: deque[dict[str, float]] = deque(maxlen=USUAL)
        self._first: float | None = None  # median of the first full window: what later ones are compared with
        self._notes: list[str] = []

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
                self._notes.append(
                    f"slow step: step {step} took {took:.1f} s, {usual:.2g} s is usual; "
                    f"{spent[most]:.1f} s in {most}, {each[most]:.2g} s is usual{WAITS if most == 'backward' else ''}"
                )
        self._recent.append(took)
        self._phases.append(spent)
        if len(self._recent) == USUAL and step % USUAL == 0:
            self._compare(step)

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
