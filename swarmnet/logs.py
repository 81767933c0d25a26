"""Logs on stderr: text for people, or one JSON object a line. All modules and libraries share one
format.

Modules log through ``logging`` with fields in ``extra``. Prompts, tokens and activations are never
logged. Text that looks like an invite or a private key is replaced here.
"""

import contextlib
import logging
import re
import sys
from functools import cached_property
from typing import Any, Literal

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
_SECRET = re.compile(r"swn1[0-9A-Za-z_-]{16,}|-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(-----END[A-Z -]*)?")


def configure(*, log_format: LogFormat, level: LogLevel) -> None:
    """Write log records from ``level`` upwards to stderr. A later call replaces this
    configuration."""
    root = logging.getLogger()
    for handler in root.handlers:
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
    """Writes to ``sys.stderr`` as it is at the time of the record: tests and bars replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(BrokenPipeError):  # the reader has closed the pipe
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


def _on_one_line(_logger: Any, _method: str, fields: Any) -> Any:
    """Join the lines of a message. It is a processor of structlog, and messages of other programs,
    such as p2pd, have several lines."""
    return fields | {"event": " ".join(str(fields["event"]).split())}


class _Formatter(logging.Formatter):
    """structlog's formatter, imported with the first record."""

    def __init__(self, log_format: LogFormat) -> None:
        super().__init__()
        self._log_format = log_format

    def format(self, record: logging.LogRecord) -> str:
        return _SECRET.sub("[secret]", self._structlog.format(record))

    @cached_property
    def _structlog(self) -> logging.Formatter:
        import structlog

        renderer: Any
        if self._log_format == "json":
            renderer = structlog.processors.JSONRenderer()
        else:
            # Rich tracebacks would show the values of variables, prompts among them.
            renderer = structlog.dev.ConsoleRenderer(
                colors=False, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
            )
        shared: list[Any] = [
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(),
            structlog.processors.TimeStamper(fmt="iso", utc=True),
        ]
        if self._log_format == "json":
            shared.append(structlog.processors.format_exc_info)
        else:
            shared.append(_on_one_line)
        return structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
