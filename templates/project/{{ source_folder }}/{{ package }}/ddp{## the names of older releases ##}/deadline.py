# Moved to preflight/deadline.py in 0.4.0. This name stays for one release.
import sys

from .preflight import deadline as moved
from .preflight.deadline import *  # noqa: F403

sys.modules[__name__] = moved
