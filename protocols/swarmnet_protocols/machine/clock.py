"""The wall clock. Only this module reads it: all other code takes a ``Clock``."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds since the Unix epoch."""

MAX_CLOCK_ERROR_S = 300.0
"""Clock error in seconds that the expiries of records and certificates tolerate."""
SET_CLOCK = "sudo timedatectl set-ntp true"


def clock_advice(behind_s: float) -> str:
    """Return advice if this clock is ``behind_s`` behind the peers' clocks (negative: ahead).

    Empty within ``MAX_CLOCK_ERROR_S``.
    """
    if abs(behind_s) <= MAX_CLOCK_ERROR_S:
        return ""
    way = "behind" if behind_s > 0 else "ahead of"
    return f"the clock of this machine is {abs(behind_s) / 60:.0f} minutes {way} the clocks of peers: set it with {SET_CLOCK}"


wall_clock: Clock = time.time  # noqa: TID251 - the one permitted use
