"""The one place that reads the wall clock. Everything that stamps or judges an expiry takes a ``Clock``."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since the Unix epoch."""

MAX_CLOCK_ERROR_S = 300.0
"""A clock that is this far off does no harm."""
SET_CLOCK = "sudo timedatectl set-ntp true"


def clock_advice(behind_s: float) -> str:
    """What to do about a clock that is ``behind_s`` behind what peers say, or ahead if negative; empty while it does no harm."""
    if abs(behind_s) <= MAX_CLOCK_ERROR_S:
        return ""
    way = "behind" if behind_s > 0 else "ahead of"
    return f"the clock of this machine is {abs(behind_s) / 60:.0f} minutes {way} what peers say: set it with {SET_CLOCK}"


wall_clock: Clock = time.time  # noqa: TID251 - the one permitted use
