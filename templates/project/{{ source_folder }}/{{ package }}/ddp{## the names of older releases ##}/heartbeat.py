# Moved to trace/heartbeat.py in 0.4.0. This name stays for good: model.py and adopted code import it.
import sys

from .trace import heartbeat as moved
from .trace.heartbeat import *  # noqa: F403

sys.modules[__name__] = moved
