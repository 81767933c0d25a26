"""The owner's machine: observations, limits on computing, and files with limits and usage."""

import contextlib
import gc
import json
import logging
import math
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import psutil

from swarmnet_node.owner.idleness import idle_s
from swarmnet_node.owner.limits import NOT_PAUSED, MonthlyUsage, Observed, OwnerLimits, month_of
from swarmnet_protocols.errors import ConfigError, OutOfResources
from swarmnet_protocols.machine.clock import Clock
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.machine.platform import return_freed_memory
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter

_log = logging.getLogger(__name__)

LIMITS_NAME = "limits.json"
USAGE_NAME = "usage.json"
PAUSE_NAME = "pause.json"
MAX_FILE_BYTES = 1 << 16
USAGE_EVERY_S = 60.0
"""Seconds between two writes of the usage file."""
CHILDREN_EVERY_S = 30.0
"""Seconds to reuse the list of child processes. Listing them reads every process of the machine."""
_LOW_NICENESS = 10


def yield_to_others() -> None:
    """Give all other programs of this machine priority.

    Covers processor time and, where the system supports it, disk access.
    """
    process = psutil.Process()
    with contextlib.suppress(OSError, psutil.Error):
        process.nice(max(_LOW_NICENESS, process.nice()))
    with contextlib.suppress(OSError, psutil.Error, AttributeError, ValueError):
        process.ionice(psutil.IOPRIO_CLASS_IDLE)


def load_limits(folder: Path) -> OwnerLimits:
    """Return the saved limits of the node in ``folder``, or the defaults.

    Raises ``ConfigError`` for a damaged file.
    """
    path = folder / LIMITS_NAME
    text = _read(path)
    if text is None:
        return OwnerLimits()
    try:
        return OwnerLimits.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}", hint=f"correct it, or delete it: {path}") from error


def save_limits(folder: Path, limits: OwnerLimits) -> None:
    """Save ``limits`` in ``folder`` for later starts. Raises ``ConfigError`` if that fails."""
    try:
        write_whole(folder / LIMITS_NAME, limits.to_json().encode())
    except OSError as error:
        raise ConfigError(
            f"the limits cannot be kept in {folder}: {error.strerror}", hint="make room on its disk"
        ) from error


class OwnersMachine:
    """The ``Machine`` of a real node. It saves its limits and its usage of this month in
    ``folder``."""

    def __init__(
        self, folder: Path, link: LinkLimiter, clock: Clock, limit_computing: Callable[[OwnerLimits], None]
    ) -> None:
        """``limit_computing`` applies the limits on cores and on the device's memory."""
        self._folder = folder
        self._link = link
        self._clock = clock
        self._limit_computing = limit_computing
        self._process = psutil.Process()
        self._children: list[psutil.Process] = []
        self._children_at = -CHILDREN_EVERY_S
        self._usage = _load_usage(folder)
        self._paused_until = _load_pause(folder)
        self._counted = (0, 0)
        self._counting = threading.Lock()
        self._saved_at = clock()

    @property
    def paused_until(self) -> float:
        return self._paused_until

    def pause(self, for_s: float) -> None:
        self._paused_until = self._clock() + for_s
        until = {"until": self._paused_until if math.isfinite(for_s) else None}
        self._keep_pause(lambda path: write_whole(path, json.dumps(until).encode()))

    def resume(self) -> None:
        self._paused_until = NOT_PAUSED
        self._keep_pause(lambda path: path.unlink(missing_ok=True))

    def _keep_pause(self, change: Callable[[Path], None]) -> None:
        try:
            change(self._folder / PAUSE_NAME)
        except OSError as error:  # the change holds in this process
            _log.warning("the pause will not be known after a restart: %s", error)

    def observe(self, limits: OwnerLimits) -> Observed:
        now = self._clock()
        if now - self._saved_at >= USAGE_EVERY_S:
            self.save_usage()
        # Ask for the idle time only if needed: asking logind runs a process.
        return Observed(
            now=datetime.fromtimestamp(now),  # noqa: DTZ006 - the clock on the owner's wall
            idle_s=idle_s(self._clock) if limits.idle_only else None,
            on_battery=limits.no_battery and _on_battery(),
        )

    def usage(self) -> MonthlyUsage:
        month = month_of(datetime.fromtimestamp(self._clock()))  # noqa: DTZ006
        with self._counting:  # ``observe`` runs on another thread
            up, down = int(self._link.up.total_bytes), int(self._link.down.total_bytes)
            self._usage = self._usage.plus(month, up - self._counted[0], down - self._counted[1])
            self._counted = (up, down)
            return self._usage

    def save_usage(self) -> None:
        """Write the bytes used so far to the usage file."""
        usage = self.usage()
        self._saved_at = self._clock()
        write_whole(self._folder / USAGE_NAME, json.dumps(vars(usage)).encode())

    def close(self) -> None:
        """Save the usage. Raises ``OutOfResources`` if the disk is full."""
        try:
            self.save_usage()
        except OSError as error:
            raise OutOfResources(
                f"cannot write into {self._folder}: {error.strerror}", hint="make room on its disk"
            ) from error

    def ram_bytes(self) -> int:
        # psutil reads all processes of the machine to find the children.
        if self._clock() - self._children_at >= CHILDREN_EVERY_S:
            self._children_at = self._clock()
            with contextlib.suppress(psutil.Error):
                self._children = self._process.children(recursive=True)
        return sum(map(_rss_bytes, (self._process, *self._children)))

    def free_bytes(self) -> int:
        """Return the memory of the machine that is available without swapping."""
        return int(psutil.virtual_memory().available)

    def enforce(self, limits: OwnerLimits) -> None:
        save_limits(self._folder, limits)
        limits.limit_link(self._link)
        self._limit_computing(limits)

    def release(self) -> None:
        release_memory()


def _on_battery() -> bool:
    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    return battery is not None and not battery.power_plugged


def _rss_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # the process has ended
        return 0


def release_memory() -> None:
    """Return freed memory to the system, and accelerators' freed memory to their drivers."""
    gc.collect()
    if "torch" in sys.modules:
        from swarmnet_protocols.machine.devices import release_device_memory

        release_device_memory()
    return_freed_memory()


def _load_usage(folder: Path) -> MonthlyUsage:
    """Return the saved usage. Zero if the file is damaged; it is replaced within a minute."""
    try:
        fields = json.loads(_read(folder / USAGE_NAME) or "{}")
        month, up, down = fields["month"], fields["up_bytes"], fields["down_bytes"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return MonthlyUsage()
    if not (isinstance(month, str) and all(type(each) is int and each >= 0 for each in (up, down))):
        return MonthlyUsage()
    return MonthlyUsage(month, up, down)


def _load_pause(folder: Path) -> float:
    """Return the Unix time at which the stored pause ends.

    A damaged file is a pause until ``resume``: the owner did ask for a pause.
    """
    text = _read(folder / PAUSE_NAME)
    if text is None:
        return NOT_PAUSED
    try:
        until = json.loads(text)["until"]
        return float(until) if type(until) in {int, float} else math.inf
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return math.inf


def _read(path: Path) -> str | None:
    """Return the first ``MAX_FILE_BYTES`` of a text file. None if it does not exist."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
