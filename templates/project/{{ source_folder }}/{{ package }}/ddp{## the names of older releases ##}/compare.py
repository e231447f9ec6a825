# Moved to preflight/compare.py in 0.4.0. This name stays for one release.
import sys

from .preflight import compare as moved
from .preflight.compare import *  # noqa: F403

sys.modules[__name__] = moved
