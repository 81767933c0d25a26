"""Chat templates of models, rendered in a process of their own with bounded time, memory and output."""

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
CPU_S = 2
"""Seconds of a processor that one rendering may take, up to the next whole one."""
START_S = 120.0
"""The process has this long to start, also on a machine that is busy."""
RENDER_S = 30.0
"""The longest that one rendering may take by the wall clock. Its processor time, which is the usual limit, is ``CPU_S``."""
_CHILD = Path(__file__).with_name("chat_template_process.py")
_PART_BYTES = 1 << 16
_ESCAPED_BYTES = 12
"""The most that one character takes in the answer, which is JSON in ASCII."""


class TemplateFailed(ConfigError):
    """A chat template could not be rendered at all."""


class TemplateRefused(TemplateFailed):
    """A chat template does not take these messages, and says why."""


def prepare_rendering() -> None:
    """Start the process that renders, without waiting for it, so that the first rendering need not."""
    _renderer.prepare()


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool,
    max_chars: int = MAX_CHARS,
) -> str:
    """``messages`` as the chat template of ``tokenizer`` writes them, as ``apply_chat_template`` would without tokens.

    Blocks its thread, for some tenths of a millisecond, and for the start of the process the first time; call it from any. Raises
    ``TemplateRefused``, and ``TemplateFailed`` for a template that takes more than ``CPU_S`` seconds of a processor, too much
    memory, or writes more than ``max_chars`` characters.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:
        raise TemplateFailed("the model has no chat template that is its default") from error
    request = {
        "template": template,
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "special_tokens": tokenizer.special_tokens_map,
        "max_chars": max_chars,
        "cpu_s": CPU_S,
    }
    answer = _renderer.ask(
        json.dumps(request, default=str).encode(), max_chars * _ESCAPED_BYTES + _PART_BYTES
    )
    if "refused" in answer:
        raise TemplateRefused(f"the model's chat template refuses these messages: {answer['refused']}")
    if "text" not in answer:
        raise TemplateFailed(f"the model's chat template cannot be rendered: {answer.get('failed')}")
    return answer["text"]


class _Renderer:
    """The process that renders, started when it is first asked, and again after it was ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._turn = threading.Lock()

    def prepare(self) -> None:
        with self._turn:
            if self._process is None:
                self._start()

    def ask(self, request: bytes, max_bytes: int) -> dict[str, str]:
        with self._turn:
            try:
                process = self._process or self._start()
                self._wait_until_ready(process)
                answer = _exchange(process, LENGTH.pack(len(request)) + request, RENDER_S, max_bytes)
            except BaseException as error:
                # What it was about to say would be taken for the next answer.
                self._end()
                if isinstance(error, _Broke):
                    failed = f"it takes more than {CPU_S} s of a processor, or broke the process it runs in"
                    return {"failed": failed}
                raise
            if "failed" in answer:
                self._end()
            return answer

    def end(self) -> None:
        with self._turn:
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        # No secret of our environment, such as an API key, is in that of the templates.
        environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._is_ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for us
        )
        return self._process

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        if self._is_ready:
            return
        try:
            _exchange(process, b"", START_S, _PART_BYTES)
        except _Broke as error:
            raise TemplateFailed(
                f"the process that renders chat templates did not start: {error}",
                hint="run swarmnet doctor; plain completions need no template",
            ) from error
        self._is_ready = True

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):  # of what was not written yet
                    _pipe(stream).close()
            process.wait()


class _Broke(Exception):
    """The process did not answer as it should."""


def _exchange(
    process: subprocess.Popen[bytes], request: bytes, limit_s: float, max_bytes: int
) -> dict[str, str]:
    """Write ``request`` and read an answer, which comes from a process that a template may have taken over."""
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
                raise _Broke("it takes too long")
            for key, _ in ready:
                if key.fd == source:
                    part = os.read(source, _PART_BYTES)
                    if not part:
                        raise _Broke("it ended")
                    received += part
                else:
                    try:
                        unsent = unsent[os.write(sink, unsent[:_PART_BYTES]) :]
                    except BrokenPipeError as error:
                        raise _Broke("it ended") from error
                    if not unsent:
                        selector.unregister(sink)
            if len(received) < LENGTH.size:
                continue
            (size,) = LENGTH.unpack_from(received)
            if size > max_bytes or len(received) > LENGTH.size + size:
                raise _Broke("it says too much")
            if len(received) == LENGTH.size + size:
                return _parsed(received[LENGTH.size :])


def _parsed(body: bytearray) -> dict[str, str]:
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _Broke("it does not say what it should") from error
    if not isinstance(answer, dict) or not all(isinstance(value, str) for value in answer.values()):
        raise _Broke("it does not say what it should")
    return answer


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise TypeError("the process has no such pipe")
    return stream


_renderer = _Renderer()
atexit.register(_renderer.end)
