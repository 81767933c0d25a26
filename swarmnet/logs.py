"""Logs on stderr: text for people, or one JSON object a line. All modules and libraries share one
format.

Modules log through ``logging`` with fields in ``extra``. Prompts, tokens and activations are never
logged. Text that looks like an invite or a private key is replaced here.
"""

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from swarmnet.terminal import shown
from swarmnet_protocols.machine.clock import Clock

if TYPE_CHECKING:
    from swarmnet_protocols.net.limits.rate_limit import TokenBucket

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

INFOS = (2.0, 20.0)
"""Info records that one line of code may log: per second, and at once. A user who asks for info
records wants to see most of them."""
WARNINGS = (1 / 30, 20.0)
"""Warnings and errors, likewise. They have a limit, because strangers can cause some as often as
they like. With a higher rate, a flood writes more than a megabyte a day. With a lower one, an owner
misses when a fault has ended."""
OF_A_PEER = (1 / 300, 5.0)
"""Warnings about one peer from one line of code, likewise. With a higher rate, a single peer hides
the others."""
MAX_PEERS = 1024
"""Most peers that are told apart, at all lines of code together."""

_NOISY = (
    "asyncio",
    "filelock",
    "grpc",
    "hivemind",
    "httpcore",
    "httpx",
    "huggingface_hub",
    "matplotlib",
    "urllib3",
    "uvicorn",
)
"""Loggers of libraries whose debug and info records are for the developers of the library."""
_OF_EVERY_RECORD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
"""Attributes that do not come from ``extra``."""
_PEER = re.compile(r"12D3KooW[1-9A-HJ-NP-Za-km-z]{44}")
_Place = tuple[str, int]
"""File and line of the code that logs."""
_SECRET = re.compile(r"swn1[0-9A-Za-z_-]{16,}|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(-----END[A-Z -]*)?")


def configure(*, log_format: LogFormat, level: LogLevel) -> None:
    """Write log records from ``level`` upwards to stderr. A later call replaces this
    configuration."""
    # gRPC writes notes about forks to stderr, unless this is set before it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    root = logging.getLogger()
    for handler in [*root.handlers]:
        if isinstance(handler, _Stderr):
            root.removeHandler(handler)
    ours = _Stderr()
    ours.setFormatter(_Formatter(log_format))
    ours.addFilter(Throttle())
    root.addHandler(ours)
    root.setLevel(level.upper())
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    # bitsandbytes warns at its import about kernels that no command here uses.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


class _Stderr(logging.Handler):
    """Writes to the current ``sys.stderr``, because tests and progress bars replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the pipe or the terminal was closed, or the disk is full
            sys.stderr.write(f"{shown(self.format(record))}\n")


class Throttle(logging.Filter):
    """Limits how much one line of code logs, and how much of it about one peer. It logs later how
    many records it dropped.

    Debug records always pass, because a user who asks for them wants them all.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._places: dict[_Place, TokenBucket] = {}
        """Bounded by the lines of code that log."""
        self._peers: dict[tuple[_Place, str], TokenBucket] = {}
        self._dropped: Counter[_Place] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        place, now = (record.pathname, record.lineno), self._clock()
        with self._lock:
            buckets = self._buckets(place, record, now)
            if any(bucket.level(now) < 1 for bucket in buckets):
                self._dropped[place] += 1
                return False
            for bucket in buckets:
                bucket.spend(1, now)
            if dropped := self._dropped.pop(place, 0):
                record.suppressed = dropped
        return True

    def _buckets(self, place: _Place, record: logging.LogRecord, now: float) -> "list[TokenBucket]":
        # `--help` and most commands log nothing, and need not import the network.
        from swarmnet_protocols.net.limits.rate_limit import RateLimit, TokenBucket

        if record.levelno < logging.WARNING:
            return [self._places.setdefault(place, TokenBucket(RateLimit(*INFOS), now))]
        buckets = [self._places.setdefault(place, TokenBucket(RateLimit(*WARNINGS), now))]
        if peer := _PEER.search(f"{record.getMessage()} {vars(record).get('peer', '')}"):
            about = place, peer[0]
            if about not in self._peers and len(self._peers) >= MAX_PEERS:
                del self._peers[next(iter(self._peers))]
            buckets.append(self._peers.setdefault(about, TokenBucket(RateLimit(*OF_A_PEER), now)))
        return buckets


class _Formatter(logging.Formatter):
    """One line for each record. A traceback follows a text, and is a field in JSON."""

    def __init__(self, log_format: LogFormat) -> None:
        super().__init__()
        self._log_format = log_format

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: value for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
        traceback = self.formatException(record.exc_info) if record.exc_info else ""
        write = _json if self._log_format == "json" else _text
        return _SECRET.sub("[secret]", write(record, fields, traceback))


def _level(record: logging.LogRecord) -> LogLevel:
    """Return the level by the name of the option. hivemind renames the levels of the whole
    process."""
    levels: dict[int, LogLevel] = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}
    return levels.get(record.levelno, "error")


def _json(record: logging.LogRecord, fields: Mapping[str, object], traceback: str) -> str:
    when = datetime.fromtimestamp(record.created, UTC)
    common = {
        "event": record.getMessage(),
        "level": _level(record),
        "logger": record.name,
        "timestamp": f"{when:%Y-%m-%dT%H:%M:%S.%fZ}",
    }
    raised = {"exception": traceback} if traceback else {}
    return json.dumps({**fields, **common, **raised}, default=str)


def _text(record: logging.LogRecord, fields: Mapping[str, object], traceback: str) -> str:
    """Return a record for people. Only debug records name the module, for developers."""
    when = datetime.fromtimestamp(record.created).astimezone()
    # Messages of other programs, such as p2pd, have several lines.
    line = " ".join(f"{when:%Y-%m-%d %H:%M:%S} {_level(record)}: {record.getMessage()}".split())
    if record.levelno <= logging.DEBUG:
        fields = {**fields, "logger": record.name}
    parts = [line, *(" ".join(f"{name}={value}".split()) for name, value in fields.items())]
    return "  ".join(parts) + f"\n{traceback}" * bool(traceback)
