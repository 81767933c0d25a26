"""Renders chat templates in a separate process, with limits on time, memory and output.

A template is a program by the publisher of the model. The process that runs it
(``chat_template_process.py``) holds no secrets of this process, and can be killed.
"""

import atexit
import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import psutil

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.platform import APART
from swarmnet_protocols.models.text.chat_template_process import LENGTH, MEMORY_BYTES, memory_limit

MAX_CHARS = 8 << 20
"""Most characters of a rendered conversation, by default."""
CPU_S = 2
"""Seconds of processor time that one rendering may take. The kernel counts whole seconds of the
process, so a rendering may have up to one second more."""
START_S = 120.0
"""Seconds that the process may take to start, also on a busy machine."""
RENDER_S = 30.0
"""Seconds of wall-clock time that one rendering may take. The limit of processor time, ``CPU_S``,
is usually reached first."""
_PROGRAM = Path(__file__).with_name("chat_template_process.py")
_EXTRA_BYTES = 1 << 16
"""Bytes of a reply in addition to its text."""
_WATCH_S = 0.02
"""Period at which the use of processor and memory is checked."""
_ESCAPED_BYTES = 12
"""Most bytes of one character in the reply, which is JSON in ASCII."""


_PROBE = "f3b1 9c77 e2d5"
"""A user's text that no template writes by itself."""


class TemplateFailed(ConfigError):
    """A chat template could not be rendered."""


class TemplateRefused(TemplateFailed):
    """A chat template raised an error for these messages, for example for a role that the model
    does not know."""


def prepare_rendering() -> None:
    """Start the rendering process without waiting for it, so that the first rendering is fast."""
    _renderer.prepare()


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    max_chars: int = MAX_CHARS,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render ``messages`` with the chat template of ``tokenizer``, as
    ``apply_chat_template(tokenize=False)`` does. ``variables``: more that the template may read.

    Thread-safe. Blocks for some tenths of a millisecond. The first call also waits until the
    process has started. Raises ``TemplateRefused`` if the template raises an error or leaves out
    what the user wrote, and ``TemplateFailed`` if it exceeds ``CPU_S``, its memory limit, or
    ``max_chars`` characters.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise TemplateFailed("the model has no default chat template") from error
    request = {
        "template": template,
        "add_generation_prompt": add_generation_prompt,
        "special_tokens": tokenizer.special_tokens_map,
        "max_chars": max_chars,
        "cpu_s": CPU_S,
        "tools": tools,
        "variables": variables or {},
    }
    in_parts = _takes_parts(template, json.dumps(request["special_tokens"], default=str))
    text = _render(request, messages, in_parts=in_parts)
    for number, message in enumerate(messages, 1):
        if message["role"] == "user" and message["content"].strip() not in text:
            raise TemplateRefused(f"the model's chat template leaves out the text of message {number}")
    return text


@lru_cache(maxsize=16)
def _takes_parts(template: str, special_tokens: str) -> bool:
    """Check whether a template reads content as a list of parts rather than as a string.

    Such templates loop over parts. Given a string, they loop over its letters and write nothing.
    """
    request = {
        "template": template,
        "add_generation_prompt": True,
        "special_tokens": json.loads(special_tokens),
        "max_chars": MAX_CHARS,
        "cpu_s": CPU_S,
    }
    probe = [{"role": "user", "content": _PROBE}]
    for in_parts in (False, True):
        with contextlib.suppress(TemplateRefused):
            text = _render(request, probe, in_parts=in_parts)
            is_list = "'type'" in text or '"type"' in text  # the list itself was written, as text
            if _PROBE in text and not is_list:
                return in_parts
    return False


def _render(request: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], *, in_parts: bool) -> str:
    given: Sequence[Mapping[str, Any]] = messages
    if in_parts:
        given = [
            {**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages
        ]
    answer = _renderer.request(
        json.dumps({**request, "messages": given}, default=str).encode(),
        request["max_chars"] * _ESCAPED_BYTES + _EXTRA_BYTES,
    )
    if "refused" in answer:
        raise TemplateRefused(f"the model's chat template refuses these messages: {answer['refused']}")
    if "text" not in answer:
        raise TemplateFailed(f"the model's chat template cannot be rendered: {answer.get('failed')}")
    return answer["text"]


class _Renderer:
    """The rendering process: started for the first request, and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._lock = threading.Lock()

    def prepare(self) -> None:
        with self._lock:
            if self._process is None:
                self._start()

    def request(self, request: bytes, max_bytes: int) -> dict[str, str]:
        with self._lock:
            try:
                process = self._process or self._start()
                self._wait_until_ready(process)
                limits = _Limits(RENDER_S, CPU_S, memory_limit(len(request)))
                answer = _exchange(process, LENGTH.pack(len(request)) + request, limits, max_bytes)
            except BaseException as error:
                # A late reply would be taken for the reply to the next request.
                self._stop()
                if isinstance(error, _ProcessFailed):
                    most = f"{CPU_S} s of processor time or {MEMORY_BYTES >> 20} MiB of memory"
                    failed = f"it takes more than {most}, or ended the process that renders it"
                    return {"failed": failed}
                raise
            if "failed" in answer:
                self._stop()
            return answer

    def stop(self) -> None:
        with self._lock:
            self._stop()

    def _start(self) -> subprocess.Popen[bytes]:
        # The environment of this process, which may have API keys, is not passed on.
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._is_ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            **APART,
        )
        return self._process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        if self._is_ready:
            return
        try:
            _exchange(process, b"", _Limits(START_S), _EXTRA_BYTES)
        except _ProcessFailed as error:
            raise TemplateFailed(
                f"the process that renders chat templates did not start: {error}",
                hint="run swarmnet doctor; plain completions need no template",
            ) from error
        self._is_ready = True

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):  # buffered input that was not written
                    _pipe(stream).close()
            process.wait()


class _ProcessFailed(Exception):
    """The process ended, was killed at a limit, or sent something invalid."""


@dataclass(frozen=True)
class _Limits:
    """Limits of one request: seconds of wall-clock and of processor time, and bytes of memory."""

    wall_s: float
    cpu_s: float = math.inf
    memory_bytes: float = math.inf


def _exchange(
    process: subprocess.Popen[bytes], request: bytes, limits: "_Limits", max_bytes: int
) -> dict[str, str]:
    """Write ``request`` and read the reply, which is checked like network input: a template may
    have taken over the process."""
    ended, watch = threading.Event(), psutil.Process(process.pid)
    watcher = threading.Thread(target=_kill_beyond, args=(process, watch, limits, ended), daemon=True)
    watcher.start()
    try:
        sink, source = _pipe(process.stdin), _pipe(process.stdout)
        sink.write(request)
        sink.flush()
        head = source.read(LENGTH.size)
        if len(head) < LENGTH.size:
            raise _ProcessFailed("it ended")
        (size,) = LENGTH.unpack(head)
        if size > max_bytes:
            raise _ProcessFailed("its reply is too long")
        body = source.read(size)
        if len(body) < size:
            raise _ProcessFailed("it ended")
    except (BrokenPipeError, OSError) as error:
        raise _ProcessFailed("it ended") from error
    finally:
        ended.set()
        watcher.join()
    return _parsed(body)


def _kill_beyond(
    process: subprocess.Popen[bytes], watch: psutil.Process, limits: "_Limits", ended: threading.Event
) -> None:
    """Kill ``process`` when it goes beyond ``limits``, unless ``ended`` comes first.

    On Linux and macOS the process also limits itself through the kernel
    (``chat_template_process.py``), which is exact. This check, by polling, works on every system.
    """
    deadline = time.monotonic() + limits.wall_s
    used_s, used_bytes = _usage(watch)
    while not ended.wait(_WATCH_S):
        now_s, now_bytes = _usage(watch)
        if (
            time.monotonic() > deadline
            or now_s - used_s > limits.cpu_s
            or now_bytes - used_bytes > limits.memory_bytes
        ):
            process.kill()
            return


def _usage(process: psutil.Process) -> tuple[float, int]:
    """Return the processor seconds and resident bytes of a process so far; zeros after its end."""
    try:
        with process.oneshot():
            times = process.cpu_times()
            return times.user + times.system, int(process.memory_info().rss)
    except psutil.Error:
        return 0.0, 0


def _parsed(body: bytes) -> dict[str, str]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _ProcessFailed("its reply is invalid") from error
    if not isinstance(answer, dict) or not all(isinstance(value, str) for value in answer.values()):
        raise _ProcessFailed("its reply is invalid")
    return answer


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise TypeError("the process has no such pipe")
    return stream


_renderer = _Renderer()
atexit.register(_renderer.stop)
