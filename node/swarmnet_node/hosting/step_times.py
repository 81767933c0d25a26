"""Times of the steps of one session, for a client that traces them."""

import asyncio
from collections.abc import Callable

from swarmnet_protocols.session.hop_times import HOP_MOMENTS, HopTimes, Moment

MAX_STEPS = 1024
"""Most steps of one session that are being recorded, and most recorded steps that wait to be sent.
Beyond this, the oldest recording and the newest recorded step are dropped."""


class HopStepTimes:
    """Records the times of a session's steps, if its client asked for them."""

    def __init__(self, stopwatch: Callable[[], float], *, are_wanted: bool) -> None:
        """``stopwatch`` returns seconds."""
        self.are_wanted = are_wanted
        self.complete: asyncio.Queue[HopTimes] = asyncio.Queue(MAX_STEPS)
        """The times of steps that have been sent on."""
        self._stopwatch = stopwatch
        self._opened_s = stopwatch()
        self._under_way: dict[int, dict[Moment, float]] = {}

    def received(self, seq: int) -> None:
        """Note that the inputs of a step have arrived. Do not call this for a replay."""
        if not self.are_wanted:
            return
        if len(self._under_way) >= MAX_STEPS:
            del self._under_way[next(iter(self._under_way))]
        self._under_way[seq] = {}
        self.mark(seq, Moment.RECEIVED)

    def mark(self, seq: int, moment: Moment) -> None:
        """Note that ``moment`` is now. The first time counts, because a step may be sent again."""
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
