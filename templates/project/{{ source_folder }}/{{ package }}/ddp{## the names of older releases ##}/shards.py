# Moved to loading/shards.py in 0.4.0. This name stays for one release.
import sys

from .loading import shards as moved
from .loading.shards import *  # noqa: F403

sys.modules[__name__] = moved
