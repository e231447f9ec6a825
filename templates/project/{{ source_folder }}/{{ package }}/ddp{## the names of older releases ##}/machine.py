# Moved to preflight/machine.py in 0.4.0. This name stays for one release.
import sys

from .preflight import machine as moved
from .preflight.machine import *  # noqa: F403

sys.modules[__name__] = moved
