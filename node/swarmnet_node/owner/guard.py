"""Watches the owner's machine, and says whether the owner's limits let a command run now."""

import asyncio
import contextlib
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import NoReturn

from swarmnet_node.owner.limits import (
    PAUSED_BY_OWNER,
    Machine,
    MonthlyUsage,
    Observed,
    OwnerLimits,
    reason_to_pause,
)
from swarmnet_protocols.machine.aio import within
from swarmnet_protocols.wire import control_pb2
from swarmnet_protocols.wire.control_pb2 import NodeStatus

OBSERVE_S = 5.0
"""Seconds between two reads of clock, battery and idle time."""


class Guard:
    """The owner's limits and pauses, which say whether a command may run now.

    ``on_change`` is called whenever the answer of ``reason`` may have changed.
    """

    def __init__(self, machine: Machine, limits: OwnerLimits, on_change: Callable[[], None]) -> None:
        self.machine = machine
        self.limits = limits
        self._on_change = on_change
        self._observed: tuple[OwnerLimits, Observed] | None = None
        self._limits_changed = asyncio.Event()
        self._reserved = 0
        """Bytes of a round of training; 0 for other work."""
        self._since = MonthlyUsage()
        """The usage when the round began."""

    def reason(self) -> str:
        """Return the reason why the command must not run now. Empty if it may run."""
        if self._observed is None:
            return ""
        machine, usage = self.machine, self.machine.usage()
        ahead = 0
        if self._reserved:
            same = usage.month == self._since.month
            ahead = max(0, self._reserved - (_total(usage) - _total(self._since) * same))
        return reason_to_pause(*self._observed, usage, paused_until=machine.paused_until, ahead_bytes=ahead)

    def reserve(self, round_bytes: int) -> None:
        """Begin a round of training that sends and receives this many bytes.

        If the month has fewer left, ``reason`` forbids it.
        """
        self._reserved, self._since = round_bytes, self.machine.usage()
        self._on_change()

    def pause(self, for_s: float = math.inf) -> None:
        """Forbid the command to run for ``for_s`` seconds or until ``resume``.

        The pause holds over a restart.
        """
        self.machine.pause(for_s)
        self._on_change()

    def resume(self) -> None:
        """End ``pause``."""
        self.machine.resume()
        self._on_change()

    def set_limits(self, limits: OwnerLimits) -> None:
        """Replace the limits, now and after a restart.

        Raises ``ConfigError`` if they cannot be stored. The old limits then stay.
        """
        self.machine.enforce(limits)
        self.limits = limits
        self._limits_changed.set()

    async def watch(self) -> NoReturn:
        """Observe the machine every ``OBSERVE_S``, and at once after a change of the limits."""
        while True:
            await within(OBSERVE_S, self._limits_changed.wait())
            self._limits_changed.clear()
            await self.observe()

    async def observe(self) -> None:
        """Read what the limits depend on. If that fails, the last observation stays."""
        limits, loop = self.limits, asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            self._observed = limits, await loop.run_in_executor(None, self.machine.observe, limits)
        self._on_change()

    def describe(self, status: NodeStatus, reason: str) -> None:
        """Add the limits, what they count, and the pause for ``reason`` to a status."""
        if reason:
            status.state, status.reason = "paused", reason
        if reason == PAUSED_BY_OWNER and math.isfinite(self.machine.paused_until):
            status.paused_until = self.machine.paused_until
        status.limits.json = self.limits.to_json()
        status.usage.CopyFrom(control_pb2.Usage(**asdict(self.machine.usage())))
        status.ram_bytes = self.machine.ram_bytes()


def _total(usage: MonthlyUsage) -> int:
    return usage.up_bytes + usage.down_bytes
