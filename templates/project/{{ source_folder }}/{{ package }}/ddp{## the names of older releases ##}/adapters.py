# Moved to preflight/adapters.py in 0.4.0. This name stays for one release.
import sys

from .preflight import adapters
from .preflight.adapters import *  # noqa: F403

sys.modules[__name__] = adapters
