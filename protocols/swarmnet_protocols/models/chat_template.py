"""Renders chat templates of models in a separate process, with limits on time, memory and output.

A template is a program by the publisher of the model: the process (``chat_template_process.py``) keeps it from this process's secrets,
and can be killed.
"""

import atexit
import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.chat_template_process import LENGTH

MAX_CHARS = 8 << 20
"""Characters of a rendered conversation at most, by default."""
CPU_S = 2
"""Seconds of processor time that one rendering may take, rounded up to whole seconds of the process."""
START_S = 120.0
"""Seconds that the process may take to start, also on a busy machine."""
RENDER_S = 30.0
"""Seconds that one rendering may take by the wall clock. ``CPU_S``, the limit of processor time, is usually reached first."""
_PROGRAM = Path(__file__).with_name("chat_template_process.py")
_PART_BYTES = 1 << 16
_ESCAPED_BYTES = 12
"""Bytes of one character in the reply at most: the reply is JSON in ASCII."""


class TemplateFailed(ConfigError):
    """A chat template could not be rendered."""


class TemplateRefused(TemplateFailed):
    """A chat template raised an error for these messages, for example for a role that the model does not know."""


def prepare_rendering() -> None:
    """Start the process without waiting for it, so that the first rendering is fast."""
    _renderer.prepare()


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool,
    max_chars: int = MAX_CHARS,
) -> str:
    """``messages`` rendered with the chat template of ``tokenizer``: ``apply_chat_template(tokenize=False)``.

    Thread-safe. Blocks for some tenths of a millisecond, the first time until the process has started. Raises ``TemplateRefused``, and
    ``TemplateFailed`` for a template that exceeds ``CPU_S``, its memory limit, or ``max_chars`` characters.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise TemplateFailed("the model has no default chat template") from error
    request = {
        "template": template,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "special_tokens": tokenizer.special_tokens_map,
        "max_chars": max_chars,
        "cpu_s": CPU_S,
    }
    answer = _renderer.request(
        json.dumps(request, default=str).encode(), max_chars * _ESCAPED_BYTES + _PART_BYTES
    )
    if "refused" in answer:
        raise TemplateRefused(f"the model's chat template refuses these messages: {answer['refused']}")
    if "text" not in answer:
        raise TemplateFailed(f"the model's chat template cannot be rendered: {answer.get('failed')}")
    return answer["text"]


class _Renderer:
    """The process: started for the first request, and again after it was killed."""

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
                answer = _exchange(process, LENGTH.pack(len(request)) + request, RENDER_S, max_bytes)
            except BaseException as error:
                # A late reply would be taken for the reply to the next request.
                self._stop()
                if isinstance(error, _ProcessFailed):
                    failed = f"it takes more than {CPU_S} s of processor time, or ended the process that renders it"
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
            start_new_session=True,  # so that Ctrl-C does not reach it
        )
        return self._process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        if self._is_ready:
            return
        try:
            _exchange(process, b"", START_S, _PART_BYTES)
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
    """The process ended, took too long, or sent something invalid."""


def _exchange(
    process: subprocess.Popen[bytes], request: bytes, limit_s: float, max_bytes: int
) -> dict[str, str]:
    """Write ``request`` and read the reply, which is not trusted: a template may have taken the process over."""
    deadline = time.monotonic() + limit_s
    unsent, received = memoryview(request), bytearray()
    source, sink = _pipe(process.stdout).fileno(), _pipe(process.stdin).fileno()
    os.set_blocking(sink, False)
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        if unsent:
            selector.register(sink, selectors.EVENT_WRITE)
        while True:
            if not (ready := selector.select(max(0.0, deadline - time.monotonic()))):
                raise _ProcessFailed("it takes too long")
            for key, _ in ready:
                if key.fd == source:
                    part = os.read(source, _PART_BYTES)
                    if not part:
                        raise _ProcessFailed("it ended")
                    received += part
                else:
                    try:
                        unsent = unsent[os.write(sink, unsent[:_PART_BYTES]) :]
                    except BrokenPipeError as error:
                        raise _ProcessFailed("it ended") from error
                    if not unsent:
                        selector.unregister(sink)
            if len(received) < LENGTH.size:
                continue
            (size,) = LENGTH.unpack_from(received)
            if size > max_bytes or len(received) > LENGTH.size + size:
                raise _ProcessFailed("its reply is too long")
            if len(received) == LENGTH.size + size:
                return _parsed(received[LENGTH.size :])


def _parsed(body: bytearray) -> dict[str, str]:
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
