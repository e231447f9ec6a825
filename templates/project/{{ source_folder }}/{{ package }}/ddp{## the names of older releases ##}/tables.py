# Moved to preflight/tables.py in 0.4.0. This name stays for one release.
import sys

from .preflight import tables as moved
from .preflight.tables import *  # noqa: F403

sys.modules[__name__] = moved
