"""Errors of commands: their exit code, message and hint."""

import errno
import sys
from dataclasses import dataclass

import typer

from swarmnet.cli.output import note, print_json
from swarmnet_protocols import errors

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# The first class in this order that fits an error decides.
_KINDS: tuple[tuple[type[errors.SwarmnetError], str, int], ...] = (
    (errors.ConfigError, "config", 3),
    (errors.NotAuthorised, "not_authorised", 4),
    (errors.Unreachable, "unreachable", 5),
    (errors.DeadlineExceeded, "unreachable", 5),
    (errors.OutOfResources, "out_of_resources", 6),
    (errors.IntegrityError, "integrity", 7),
    (errors.IncompatibleVersion, "incompatible_version", 8),
    (errors.SwarmnetError, "failed", EXIT_FAILED),
)
_DEFAULT_HINT = "run the command again with --debug after `swarmnet` for the details"


@dataclass(frozen=True)
class Failure:
    """An error as it is printed. ``kind``: its name in JSON output."""

    kind: str
    message: str
    hint: str
    exit_code: int

    def show(self, *, as_json: bool) -> None:
        """Print to stderr, or with ``as_json`` one line to stdout."""
        if as_json:
            event = {"event": "error", "error": self.kind, "message": self.message, "hint": self.hint}
            print_json(event | {"exit_code": self.exit_code})
        else:
            sys.stdout.flush()
            note(f"error: {self.message}\nhint: {self.hint}")


def explain(error: BaseException) -> Failure:
    """Return the failure to report for ``error``. For an exception group, one of its errors is
    reported."""
    if isinstance(error, BaseExceptionGroup):
        return explain(_cause(error))
    if isinstance(error, typer.BadParameter | typer.TyperException):
        return _explain_usage(error)
    for kind, name, exit_code in _KINDS:
        if isinstance(error, kind):
            return Failure(name, str(error), error.hint or _DEFAULT_HINT, exit_code)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return explain(errors.OutOfResources(f"{where}{error.strerror}", hint="make room on this disk"))
        return Failure("failed", f"{where}{error.strerror or error}", _DEFAULT_HINT, EXIT_FAILED)
    return Failure(
        "internal",
        f"this should not have happened: {type(error).__name__}: {error}",
        _DEFAULT_HINT,
        EXIT_FAILED,
    )


def _explain_usage(error: typer.TyperException) -> Failure:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "swarmnet"
    message = (
        error.format_message()
        if isinstance(error, typer.BadParameter)
        else str(getattr(error, "message", error))
    )
    if not getattr(error, "message", "") and (about := getattr(getattr(error, "param", None), "help", "")):
        message += f" {about}"
    if likely := getattr(error, "possibilities", None):  # the most similar first
        message += f". Did you mean {likely[0]!r}?"
    # typer puts pydantic's text after its own.
    message = message.replace("Value error, ", "").replace("Input should be", "this should be")
    return Failure("usage", message, f"see `{command} --help`", EXIT_USAGE)


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error of a task group to report: a ``SwarmnetError`` before any other."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if isinstance(leaf, errors.SwarmnetError)), leaves[0])
