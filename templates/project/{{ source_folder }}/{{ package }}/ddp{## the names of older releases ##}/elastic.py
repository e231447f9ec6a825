# Moved to start/elastic.py in 0.4.0. This name stays for one release.
import sys

from .start import elastic as moved
from .start.elastic import *  # noqa: F403

sys.modules[__name__] = moved
