"""Waiting by looking: for what gives no notice, or must not be waited for in a call that blocks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable


def poll(done: Callable[[], bool], wait_s: float = math.inf, pause_s: float = 0.05, longest_s: float = 0.0) -> bool:
    """Ask `done()` again and again, for at most `wait_s`; returns its last answer. All in seconds.

    For what gives no notice, or may not be waited for: a blocked call of a store can neither print nor notice a signal.

    Args:
        pause_s: between two questions; it grows by half each time, up to `longest_s`, if that is given.
    """
    deadline = time.monotonic() + wait_s
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, max(longest_s, pause_s))
    return True
