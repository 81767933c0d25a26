"""Ends a Python process that unpickles, or that runs code from outside the files of the program.

``tests/conftest.py`` puts this folder on the PYTHONPATH of every process a test starts; Python
imports a module of this name when it starts. It imports only the standard library.
"""

import os
import sys
import traceback
from collections.abc import Callable, Collection
from types import FrameType

EXIT_CODE = 86

EVENTS = {
    "pickle.find_class", "os.system", "subprocess.Popen", "marshal.loads", "marshal.load", "exec", "compile"
}  # fmt: skip
UNPICKLES = {"pickle.find_class"}

MAY_COMPILE = {
    "ast": "parses only",
    "collections": "fields of a named tuple",
    "dataclasses": "fields of a dataclass",
    "jinja2.environment": "a chat template, which jinja's sandbox runs",
    "runpy": "python -m",
    "swarmnet_protocols.training.methods.outside": "a method's file, named on the command line",
    "typing": "an annotation of a class",
}
"""Modules that compile code after their import: of other projects their own, and one of ours what
the user names."""

_IMPORTS = "<frozen importlib."
"""The prefix of the file names of the import machinery."""


def objection(event: str, arguments: tuple[object, ...], caller: FrameType | None) -> str | None:
    """The violation by an audit event that ``caller`` raised; None if the event is allowed."""
    match event:
        case "pickle.find_class":
            return f"unpickles {arguments[0]}.{arguments[1]}"
        case "os.system":
            return f"runs {arguments[0]!r} in a shell"
        case "subprocess.Popen" if list(arguments[1])[:2] == ["/bin/sh", "-c"]:  # type: ignore[call-overload]
            return f"runs {arguments[1]!r} in a shell"
        case "marshal.loads" | "marshal.load" if not _is_importing(caller):
            return "unmarshals"
        case "exec" | "compile" if caller is not None:  # without a caller it is the program itself
            name = caller.f_globals.get("__name__")
            if name not in MAY_COMPILE and not _is_importing(caller):
                return f"{name} compiles or runs code"
    return None


def install(object_to: Callable[[str], None], events: Collection[str]) -> None:
    """From now on, call ``object_to`` for each of these events of this process that is a
    violation."""

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in events and (wrong := objection(event, arguments, _caller())):
            object_to(wrong)

    sys.addaudithook(hook)


def _caller() -> FrameType | None:
    """The frame that raised the event: below it are this function and the hook."""
    frame = sys._getframe()
    for _ in range(2):
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return frame


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTS):
            return True
        frame = frame.f_back
    return False


def _end(wrong: str) -> None:
    sys.stderr.write(f"not allowed: {wrong}\n")
    traceback.print_stack(file=sys.stderr)
    sys.stderr.flush()
    os._exit(EXIT_CODE)


if __name__ == "sitecustomize":
    install(_end, EVENTS)
