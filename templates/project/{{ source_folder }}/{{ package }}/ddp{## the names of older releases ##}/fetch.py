# Moved to loading/fetch.py in 0.4.0. This name stays for one release.
import sys

from .loading import fetch as moved
from .loading.fetch import *  # noqa: F403

sys.modules[__name__] = moved
