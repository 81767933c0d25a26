"""The owner's limits, and whether they let a node run. Pure."""

import json
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Protocol, get_args, get_type_hints

from swarmnet_node.owner.schedule import DAYS, Schedule
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter

MIN_RATE_BYTES_PER_S = 64_000.0
"""Smallest rate allowed. Below it, a large message takes longer than its sender waits."""
MAX_BYTES = 1 << 50
MAX_CORES = 4096
MAX_IDLE_S = 24 * 3600.0
IDLE_AFTER_S = 180.0
RELAY_BYTES_PER_S = 1_250_000.0
"""Default rate of bytes forwarded for peers that cannot be dialled: 10 Mbit/s."""
PAUSED_BY_OWNER = "its owner paused it"
NOT_PAUSED = 0.0
"""Unix time at which a pause ends, if nobody asked for a pause."""
ONE_CLIENT = 0.25
"""Default share of a host's resources that one client may use."""


PRESETS = ("laptop", "desktop", "server")


@dataclass(frozen=True)
class OwnerLimits:
    """The limits of a node on its machine. None means no limit."""

    max_ram_bytes: int | None = None
    """Resident memory of the node and p2pd together."""
    max_gpu_mem: float | None = None
    """At most 1: a share of the device's memory. Otherwise bytes."""
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    monthly_bytes: int | None = None
    """Bytes in both directions in a calendar month."""
    schedule: str | None = None
    idle_only: bool = False
    idle_after_s: float = IDLE_AFTER_S
    """Seconds without use of keyboard or mouse until the machine counts as idle."""
    no_battery: bool = False
    cores: int | None = None
    relay_bytes_per_s: float = RELAY_BYTES_PER_S
    """Bytes per second forwarded for peers that cannot be dialled, if others can dial this node. 0
    for none."""
    preset: str | None = None
    """The name of the preset in these limits. None without a preset."""

    def __post_init__(self) -> None:
        """Raises ``ConfigError`` for a limit out of range."""
        _check("max-ram", self.max_ram_bytes, 1, MAX_BYTES)
        _check("max-gpu-mem", self.max_gpu_mem, 0.01, MAX_BYTES)
        _check_rate("up", self.up_bytes_per_s)
        _check_rate("down", self.down_bytes_per_s)
        _check("monthly", self.monthly_bytes, 1, MAX_BYTES)
        _check("idle-after", self.idle_after_s, 1.0, MAX_IDLE_S)
        _check_rate("relay", self.relay_bytes_per_s or None)
        _check("cores", self.cores, 1, MAX_CORES)
        if self.preset is not None and self.preset not in PRESETS:
            raise ConfigError(f"there is no preset {self.preset[:40]!r}", hint=f"use {', '.join(PRESETS)}")
        if self.schedule is not None:
            try:
                Schedule.parse(self.schedule)
            except ValueError as error:
                raise ConfigError(f"{self.schedule[:80]!r} is not a schedule", hint=str(error)) from error

    @property
    def are_conditional(self) -> bool:
        """True if the limits may pause the node without a command from its owner."""
        return bool(self.monthly_bytes or self.schedule or self.idle_only or self.no_battery)

    def limit_link(self, link: LinkLimiter) -> None:
        """Limit the bytes that ``link`` sends, receives and forwards."""
        link.up.set_rate(self.up_bytes_per_s)
        link.down.set_rate(self.down_bytes_per_s)
        link.set_relay_rate(self.relay_bytes_per_s)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "OwnerLimits":
        """Raises ``ConfigError`` for text that ``to_json`` cannot have returned."""
        try:
            # Too long an integer becomes a float, which no limit in whole bytes may be.
            found = json.loads(text, parse_int=lambda digits: (int if len(digits) < 20 else float)(digits))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise ConfigError("the limits are not a JSON object")
        types = get_type_hints(cls)
        for name, value in found.items():
            if name not in types:
                raise ConfigError(f"there is no limit {name[:40]!r}")
            allowed = get_args(types[name]) or (types[name],)
            if float in allowed and type(value) is int:
                found[name] = float(value)
            elif type(value) not in allowed:
                raise ConfigError(f"{name} cannot be {str(value)[:40]!r}")
        return cls(**found)


def preset_limits(name: str, ram_bytes: int, cores: int) -> OwnerLimits:
    """Return careful limits for a machine of this size.

    - ``laptop``: its owner carries it, pays for its traffic, and works at it.
    - ``desktop``: it is on the mains, and its owner works at it.
    - ``server``: nobody works at it.
    """
    half = max(1, cores // 2)
    match name:
        case "laptop":
            return OwnerLimits(
                max_ram_bytes=ram_bytes // 4,
                up_bytes_per_s=625_000.0,
                down_bytes_per_s=2.5e6,
                monthly_bytes=50 * 10**9,
                idle_only=True,
                no_battery=True,
                cores=half,
                relay_bytes_per_s=0.0,
                preset=name,
            )
        case "desktop":
            return OwnerLimits(
                max_ram_bytes=ram_bytes // 2,
                up_bytes_per_s=2.5e6,
                down_bytes_per_s=1.25e7,
                cores=half,
                preset=name,
            )
        case _:
            return OwnerLimits(max_ram_bytes=ram_bytes * 4 // 5, relay_bytes_per_s=6.25e6, preset=name)


def _check(name: str, value: float | None, least: float, most: float, unit: str = "") -> None:
    if value is not None and not least <= value <= most:
        bound = f"{most:g}{unit} or less" if value > most else f"{least:g}{unit} or more"
        raise ConfigError(f"a limit --{name} of {value:g}{unit} is out of range", hint=f"choose {bound}")


def _check_rate(name: str, bytes_per_s: float | None) -> None:
    kbit = 8 / 1000  # the unit of the command line
    rate = None if bytes_per_s is None else bytes_per_s * kbit
    _check(name, rate, MIN_RATE_BYTES_PER_S * kbit, MAX_BYTES * kbit, " kbit/s")


@dataclass(frozen=True)
class MonthlyUsage:
    """Bytes sent and received in ``month``, such as 2026-11."""

    month: str = ""
    up_bytes: int = 0
    down_bytes: int = 0

    def plus(self, month: str, up_bytes: int, down_bytes: int) -> "MonthlyUsage":
        """Return the usage with more bytes, counted in ``month``. A new month begins at 0."""
        before = self if self.month == month else MonthlyUsage(month)
        return replace(before, up_bytes=before.up_bytes + up_bytes, down_bytes=before.down_bytes + down_bytes)


@dataclass(frozen=True)
class Observed:
    """The state of the machine that limits depend on."""

    now: datetime
    """Local time."""
    idle_s: float | None
    """Seconds since keyboard or mouse was last used. None if unknown, or if no limit needs it."""
    on_battery: bool


class Machine(Protocol):
    """The owner's machine."""

    @property
    def paused_until(self) -> float:
        """Unix time when the owner's pause ends; infinity until ``resume``; ``NOT_PAUSED``."""

    def pause(self, for_s: float) -> None:
        """Begin a pause of this many seconds, possibly infinite. It holds over a restart."""

    def resume(self) -> None:
        """End the pause."""

    def observe(self, limits: OwnerLimits) -> Observed:
        """Return the facts that ``limits`` depend on now. May take seconds, so call it on another
        thread."""

    def usage(self) -> MonthlyUsage: ...

    def ram_bytes(self) -> int:
        """Return the resident memory of the node and p2pd."""

    def enforce(self, limits: OwnerLimits) -> None:
        """Apply limits now and after a restart."""

    def free_bytes(self) -> int:
        """Return the memory of the machine that is available to this process."""

    def release(self) -> None:
        """Return freed memory to the system. May take seconds."""


def reason_to_pause(
    limits: OwnerLimits,
    observed: Observed,
    usage: MonthlyUsage,
    *,
    paused_until: float,
    ahead_bytes: int = 0,
) -> str:
    """Return the reason why a command must not run now, worded for its owner. Empty if it may run.

    The first limit that forbids it counts. Its reason says until when. ``ahead_bytes``: bytes that
    the present round of training may still send and receive.
    """
    if observed.now.timestamp() < paused_until:
        return PAUSED_BY_OWNER
    month = month_of(observed.now)
    used = usage.up_bytes + usage.down_bytes if usage.month == month else 0
    if limits.monthly_bytes is not None and used + max(1, ahead_bytes) > limits.monthly_bytes:
        year, next_month = observed.now.year + observed.now.month // 12, observed.now.month % 12 + 1
        are_left = used < limits.monthly_bytes
        why = (
            f"a round would exceed the bytes for {month}"
            if are_left
            else f"the bytes for {month} are used up"
        )
        return f"{why}, until {year:04d}-{next_month:02d}-01"
    if limits.schedule is not None:
        schedule = Schedule.parse(limits.schedule)
        if not schedule.allows(observed.now):
            opens = schedule.opens(observed.now)
            return f"outside its hours ({limits.schedule}), until {DAYS[opens.weekday()]} {opens:%H:%M}"
    if limits.no_battery and observed.on_battery:
        return "the machine runs on battery, until it is plugged in"
    if limits.idle_only:
        until = f"until nobody has used it for {limits.idle_after_s:g} s"
        if observed.idle_s is None:
            return f"it is not known whether this machine is in use, {until}"
        if observed.idle_s < limits.idle_after_s:
            return f"this machine is in use, {until}"
    return ""


def month_of(now: datetime) -> str:
    return f"{now.year:04d}-{now.month:02d}"
