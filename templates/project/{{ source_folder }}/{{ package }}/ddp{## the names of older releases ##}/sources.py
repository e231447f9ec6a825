# Moved to same/sources.py in 0.4.0. This name stays for one release.
import sys

from .same import sources as moved
from .same.sources import *  # noqa: F403

sys.modules[__name__] = moved
