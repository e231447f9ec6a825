# Moved to same/unused.py in 0.4.0. This name stays for one release.
import sys

from .same import unused as moved
from .same.unused import *  # noqa: F403

sys.modules[__name__] = moved
