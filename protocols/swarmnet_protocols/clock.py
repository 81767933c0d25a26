"""The one place that reads the wall clock. Everything that stamps or judges an expiry takes a ``Clock``."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since the Unix epoch."""

wall_clock: Clock = time.time  # noqa: TID251 - the one permitted use
