"""Logs on stderr: text for people, or one JSON object a line. All modules and libraries share one
format.

Modules log through ``logging`` with fields in ``extra``. Prompts, tokens and activations are never
logged. Text that looks like an invite or a private key is replaced here.
"""

import contextlib
import json
import logging
import re
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal

from swarmnet.terminal import shown

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

BURST = 20
WINDOW_S = 10.0
"""Seconds of a window. One line of code may log ``BURST`` times in each, because strangers can
cause some log records as often as they like. Debug records are not counted, because a user who asks
for them wants them all."""

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
_SECRET = re.compile(r"swn1[0-9A-Za-z_-]{16,}|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(-----END[A-Z -]*)?")


def configure(*, log_format: LogFormat, level: LogLevel) -> None:
    """Write log records from ``level`` upwards to stderr. A later call replaces this
    configuration."""
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


class _Stderr(logging.Handler):
    """Writes to the current ``sys.stderr``, because tests and progress bars replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the pipe or the terminal was closed, or the disk is full
            sys.stderr.write(f"{shown(self.format(record))}\n")


class Throttle(logging.Filter):
    """Passes ``BURST`` records of one line of code in ``WINDOW_S``, and logs later how many it
    dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[tuple[str, int], tuple[float, int]] = {}
        """Start of the window and number of records in it, by file and line. Bounded by the places
        in the code that log."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        place = record.pathname, record.lineno
        since, count = self._windows.get(place, (record.created, 0))
        if record.created - since >= WINDOW_S:
            if count > BURST:
                record.suppressed = count - BURST
            since, count = record.created, 0
        self._windows[place] = since, count + 1
        return count < BURST


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
