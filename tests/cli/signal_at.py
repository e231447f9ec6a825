"""Run the command line and send it SIGHUP at one moment of its second question: `signal_at.py MOMENT new demo ...`.

A signal that comes from outside meets such a moment once in a thousand runs. MOMENT is the number of a callback that
the event loop has just taken out of its queue, or `end`: the question is answered, and its tasks are waited for.
"""

from __future__ import annotations

import os
import signal
import sys
from asyncio.events import Handle
from typing import Any

from prompt_toolkit.application import Application

questions = callbacks = 0
moment = sys.argv.pop(1)
real_run, real_call, real_end = Application.run, Handle._run, Application.cancel_and_wait_for_background_tasks


def run(self: Application[Any], *args: Any, **options: Any) -> Any:
    global questions
    questions += 1
    return real_run(self, *args, **options)


def call(self: Handle) -> None:
    global callbacks
    callbacks += questions == 2
    if questions == 2 and str(callbacks) == moment:
        os.kill(os.getpid(), signal.SIGHUP)
    real_call(self)


async def end(self: Application[Any]) -> None:
    if questions == 2 and moment == "end":
        os.kill(os.getpid(), signal.SIGHUP)
    await real_end(self)


Application.run, Handle._run = run, call  # type: ignore[method-assign]
Application.cancel_and_wait_for_background_tasks = end  # type: ignore[method-assign]

from ddp_scaffold.cli import main  # noqa: E402

main()
