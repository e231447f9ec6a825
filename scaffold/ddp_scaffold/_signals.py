"""SIGTERM and SIGHUP end a run as Ctrl-C does: by KeyboardInterrupt, so that all is cleaned up.

It must not be raised while a prompt's event loop runs. asyncio takes a callback out of its queue before it calls it,
and loses it if the handler of a signal raises in between; weak references and prompt_toolkit's own callbacks swallow
what is raised in them. Whoever waits for that callback then waits for ever. So an open prompt is told to end, as by a
key, and raises KeyboardInterrupt when its loop is done.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGHUP)
TICK_S = 0.05


@contextmanager
def ending_on_signals() -> Iterator[None]:
    """Handle them within the block, but not what is ignored here: nohup, for one, ignores SIGHUP."""
    for number in ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _Ending().begin)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Ending:
    """What is left to do after such a signal: once, KeyboardInterrupt comes out of a prompt, or is raised between two.

    A timer looks again and again: the prompt may have got its answer just before, and be about to close its loop.
    """

    def __init__(self) -> None:
        self.raised = False

    def begin(self, number: int, frame: FrameType | None) -> None:
        """End the run. More such signals, which often come in pairs, do not disturb that."""
        for other in ENDING:
            signal.signal(other, lambda number, frame: None)  # of SIG_IGN Python complains if the pair came at once
        # A prompt that is given up may not have begun: that is not worth a word.
        warnings.filterwarnings("ignore", message="coroutine .* was never awaited")
        signal.signal(signal.SIGALRM, self.go_on)
        signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
        self.go_on(number, frame)

    def go_on(self, number: int, frame: FrameType | None) -> None:
        if _is_swallowed(frame):
            return  # until the timer comes again
        asyncio = sys.modules.get("asyncio")  # if nothing has imported it, no loop runs
        loop = asyncio._get_running_loop() if asyncio else None
        if loop is not None:
            loop.call_soon_threadsafe(self.end_prompt)
        elif not self.raised:
            self.raised = True
            raise KeyboardInterrupt

    def end_prompt(self) -> None:
        """Let the open prompt raise KeyboardInterrupt, unless it is ending already."""
        from prompt_toolkit.application import get_app_or_none

        prompt = get_app_or_none()
        if prompt is not None and prompt.future is not None and not prompt.future.done():
            self.raised = True
            prompt.exit(exception=KeyboardInterrupt, style="class:aborting")


def _is_swallowed(frame: FrameType | None) -> bool:
    """Tell whether Python would print and forget what is raised there: in a weak reference's callback, or `__del__`."""
    while frame is not None:
        if frame.f_globals.get("__name__") in ("weakref", "_weakrefset") or frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
