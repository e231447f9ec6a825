# Moved to preflight/adapters.py in 0.4.0. This name stays for one release.
import sys

from .preflight import adapters as moved
from .preflight.adapters import *  # noqa: F403

sys.modules[__name__] = moved
