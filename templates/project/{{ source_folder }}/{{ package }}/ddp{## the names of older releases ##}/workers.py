# Moved to loading/workers.py in 0.4.0. This name stays for one release.
import sys

from .loading import workers as moved
from .loading.workers import *  # noqa: F403

sys.modules[__name__] = moved
