# Moved to same/layout.py in 0.4.0. This name stays for one release.
import sys

from .same import layout as moved
from .same.layout import *  # noqa: F403

sys.modules[__name__] = moved
