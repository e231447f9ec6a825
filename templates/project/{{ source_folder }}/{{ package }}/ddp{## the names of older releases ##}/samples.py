# Moved to loading/samples.py in 0.4.0. This name stays for one release.
import sys

from .loading import samples as moved
from .loading.samples import *  # noqa: F403

sys.modules[__name__] = moved
