# Moved to preflight/links.py in 0.4.0. This name stays for one release.
import sys

from .preflight import links as moved
from .preflight.links import *  # noqa: F403

sys.modules[__name__] = moved
