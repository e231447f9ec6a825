# Moved to loading/streams.py in 0.4.0. This name stays for one release.
import sys

from .loading import streams as moved
from .loading.streams import *  # noqa: F403

sys.modules[__name__] = moved
