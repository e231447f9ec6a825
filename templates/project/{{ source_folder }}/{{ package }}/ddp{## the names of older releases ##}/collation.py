# Moved to loading/collation.py in 0.4.0. This name stays for one release.
import sys

from .loading import collation as moved
from .loading.collation import *  # noqa: F403

sys.modules[__name__] = moved
