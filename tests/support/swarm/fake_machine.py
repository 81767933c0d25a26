"""A machine whose clock, battery and idle time a test sets."""

from dataclasses import dataclass, field, replace
from datetime import datetime

from swarmnet_node.owner.limits import NOT_PAUSED, MonthlyUsage, Observed, OwnerLimits

MONDAY_NOON = datetime(2026, 11, 23, 12, 0)  # noqa: DTZ001 - as an owner's clock shows it


@dataclass
class FakeMachine:
    """The machine's state as a supervisor observes it, and the calls that it made."""

    seen: Observed = field(default_factory=lambda: Observed(MONDAY_NOON, idle_s=None, on_battery=False))
    used: MonthlyUsage = field(default_factory=lambda: MonthlyUsage("2026-11"))
    ram: int = 0
    free: int = 1 << 40
    enforced: list[OwnerLimits] = field(default_factory=list)
    released: int = 0
    paused_until: float = NOT_PAUSED

    def pause(self, for_s: float) -> None:
        self.paused_until = self.seen.now.timestamp() + for_s

    def resume(self) -> None:
        self.paused_until = NOT_PAUSED

    def see(self, **changes: object) -> None:
        """Change the result of the next observations."""
        self.seen = replace(self.seen, **changes)  # type: ignore[arg-type]

    def observe(self, limits: OwnerLimits) -> Observed:
        return self.seen if limits.idle_only else replace(self.seen, idle_s=None)

    def usage(self) -> MonthlyUsage:
        return self.used

    def ram_bytes(self) -> int:
        return self.ram

    def free_bytes(self) -> int:
        return self.free

    def enforce(self, limits: OwnerLimits) -> None:
        self.enforced.append(limits)

    def release(self) -> None:
        self.released += 1
