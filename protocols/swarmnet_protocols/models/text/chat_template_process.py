"""Renders chat templates in a process of its own, for ``chat_template.py``.

It reads requests from stdin and writes replies to stdout. Jinja's sandbox keeps a template from
files and Python objects, but limits neither time nor memory. The parent process limits both. On
Linux and macOS this process also limits itself (``setrlimit``). This program imports nothing of
swarmnet.
"""

import json
import math
import signal
import struct
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

if sys.platform != "win32":
    import resource  # noqa: TID251 - this program imports nothing of swarmnet

LENGTH = struct.Struct(">I")
"""The length in bytes that precedes each request and reply."""
MEMORY_BYTES = 64 << 20
"""Bytes that one rendering may take, beyond the idle process and ``MEMORY_PER_REQUEST_BYTE``."""
MEMORY_PER_REQUEST_BYTE = 16
"""Further bytes that one rendering may take, for each byte of its request."""
MAX_ERROR_CHARS = 500
"""Most characters of an error message."""


def memory_limit(request_bytes: int) -> int:
    """Return the bytes that rendering a request may take, in addition to those of the idle
    process."""
    return MEMORY_BYTES + MEMORY_PER_REQUEST_BYTE * request_bytes


def _renderer() -> Callable[[dict[str, Any]], str]:
    """Return a function that renders a request, with the settings, filters and functions that
    transformers gives templates."""
    from jinja2 import TemplateError, nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """The tag that marks what the model writes. Rendering keeps its content."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class PublicNamespace(Namespace):
        """Refuses attributes that begin with an underscore."""

        def __init__(*given: Any, **named: Any) -> None:
            for name in dict(*given[1:], **named):
                check_public(name)
            Namespace.__init__(*given, **named)

        def __setitem__(self, name: str, value: Any) -> None:
            check_public(name)
            super().__setitem__(name, value)

    class Dict:
        """``dict`` without the attributes of the type."""

        def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
            return dict(*given, **named)

        def fromkeys(self, *given: Any) -> dict[Any, Any]:
            return dict.fromkeys(*given)

    def check_public(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot store {name!r}")

    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)  # noqa: DTZ005 - the user's own time

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    functions = {"raise_exception": raise_exception, "strftime_now": strftime_now}
    environment.globals |= {**functions, "dict": Dict(), "namespace": PublicNamespace}
    compiled = lru_cache(maxsize=16)(environment.from_string)

    def render(request: dict[str, Any]) -> str:
        fields = {
            **request["special_tokens"],
            **request.get("variables", {}),
            "messages": request["messages"],
            "tools": request.get("tools"),
            "documents": None,
            "add_generation_prompt": request["add_generation_prompt"],
        }
        return compiled(request["template"]).render(fields)

    return render


def main() -> None:
    from jinja2 import TemplateError

    render_text = _renderer()

    def render(request: dict[str, Any]) -> dict[str, str]:
        try:
            text = render_text(request)
        except MemoryError:
            return {"failed": f"it takes more than {MEMORY_BYTES >> 20} MiB of memory"}
        except TemplateError as error:
            return {"refused": _printable(str(error))}
        except Exception as error:  # noqa: BLE001 - a template's expressions can raise anything
            return {"refused": _printable(f"{type(error).__name__}: {error}")}
        if len(text) > request["max_chars"]:
            return {"failed": f"it writes more than {request['max_chars']} characters"}
        return {"text": text}

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    limit_next = _kernel_limits()
    _send({})
    while head := sys.stdin.buffer.read(LENGTH.size):
        (size,) = LENGTH.unpack(head)
        request = json.loads(sys.stdin.buffer.read(size))
        limit_next(request["cpu_s"], memory_limit(size))
        _send(render(request))


if sys.platform == "win32":

    def _kernel_limits() -> Callable[[int, int], None]:
        return lambda _cpu_s, _memory_bytes: None
else:

    def _kernel_limits() -> Callable[[int, int], None]:
        """Set the limits that never change. Returns a function that limits the processor seconds
        and memory bytes of the next rendering."""
        for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
            resource.setrlimit(kind, (0, 0))
        idle_bytes = 0
        if sys.platform == "linux":
            idle_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

        def limit_next(cpu_s: int, memory_bytes: int) -> None:
            used = resource.getrusage(resource.RUSAGE_SELF)
            end_s = math.ceil(used.ru_utime + used.ru_stime) + cpu_s
            resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.RLIM_INFINITY))
            # macOS neither reports the size of the address space nor enforces a limit on it
            if idle_bytes:
                resource.setrlimit(resource.RLIMIT_AS, (idle_bytes + memory_bytes, resource.RLIM_INFINITY))

        return limit_next


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text[:MAX_ERROR_CHARS])


def _send(answer: dict[str, str]) -> None:
    body = json.dumps(answer).encode()
    sys.stdout.buffer.write(LENGTH.pack(len(body)) + body)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
