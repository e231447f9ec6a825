# Moved to trace/slow_steps.py in 0.4.0. This name stays for one release.
import sys

from .trace import slow_steps as moved
from .trace.slow_steps import *  # noqa: F403

sys.modules[__name__] = moved
