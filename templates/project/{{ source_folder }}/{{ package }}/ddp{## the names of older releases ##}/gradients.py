# Moved to trace/gradients.py in 0.4.0. This name stays for one release.
import sys

from .trace import gradients as moved
from .trace.gradients import *  # noqa: F403

sys.modules[__name__] = moved
