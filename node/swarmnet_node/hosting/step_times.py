"""Times of the steps of one session, for a client that traces them."""

import asyncio
from collections.abc import Callable

from swarmnet_protocols.session.hop_times import HOP_MOMENTS, HopTimes, Moment

MAX_STEPS = 1024
"""Steps of one session whose times are taken, or wait to be told; those of the oldest, or of the newest, are left out."""


class HopStepTimes:
    """Takes the times of a session's steps, if its client asked for them, and else does nothing."""

    def __init__(self, stopwatch: Callable[[], float], *, are_wanted: bool) -> None:
        """``stopwatch`` returns seconds."""
        self.are_wanted = are_wanted
        self.complete: asyncio.Queue[HopTimes] = asyncio.Queue(MAX_STEPS)
        """The times of steps that have been sent on."""
        self._stopwatch = stopwatch
        self._opened_s = stopwatch()
        self._under_way: dict[int, dict[Moment, float]] = {}

    def received(self, seq: int) -> None:
        """The inputs of a step have arrived, and are no replay."""
        if not self.are_wanted:
            return
        if len(self._under_way) >= MAX_STEPS:
            del self._under_way[next(iter(self._under_way))]
        self._under_way[seq] = {}
        self.note(seq, Moment.RECEIVED)

    def note(self, seq: int, moment: Moment) -> None:
        """``moment`` is now. The first time counts: a step may be sent again."""
        moments = self._under_way.get(seq)
        if moments is None:
            return
        moments.setdefault(moment, self._stopwatch() - self._opened_s)
        if moment is not Moment.SENT:
            return
        del self._under_way[seq]
        if len(moments) == len(HOP_MOMENTS) and not self.complete.full():
            at_s = tuple(moments[each] for each in HOP_MOMENTS)
            self.complete.put_nowait(HopTimes(seq, at_s))
