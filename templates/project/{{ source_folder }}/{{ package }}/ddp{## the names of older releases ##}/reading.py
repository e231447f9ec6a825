# Moved to loading/located.py in 0.4.0. This name stays for one release.
import sys

from .loading import located as moved
from .loading.located import *  # noqa: F403

sys.modules[__name__] = moved
