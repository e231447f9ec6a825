# Moved to report/chart.py in 0.4.0. This name stays for one release.
import sys

from .report import chart as moved
from .report.chart import *  # noqa: F403

sys.modules[__name__] = moved
