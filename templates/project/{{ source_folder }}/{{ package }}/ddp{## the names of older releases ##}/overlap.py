# Moved to loading/overlap.py in 0.4.0. This name stays for one release.
import sys

from .loading import overlap as moved
from .loading.overlap import *  # noqa: F403

sys.modules[__name__] = moved
