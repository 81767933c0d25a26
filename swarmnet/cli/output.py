"""Printing: JSON and answers to stdout, progress and notes to stderr.

All text passes through ``shown``, because answers, errors and names come from other peers and may
hold control sequences. JSON escapes them.
"""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import typer

from swarmnet.terminal import shown

if TYPE_CHECKING:
    from swarmnet_protocols.models import Progress

INDENT = 2
"""Indent of continuation lines, in columns."""
MIN_ROOM = 20
"""Least columns for the values of a table; with fewer, values are not folded."""


def print_text(text: str = "", *, end: str = "\n") -> None:
    """Print text on stdout and flush it."""
    typer.echo(shown(text) + end, nl=False)
    sys.stdout.flush()


def print_json(fields: Mapping[str, object]) -> None:
    """Print one JSON object on one line of stdout and flush it."""
    sys.stdout.write(json.dumps(fields, allow_nan=False) + "\n")
    sys.stdout.flush()


def print_result(fields: Mapping[str, object], text: str, *, as_json: bool) -> None:
    """Print the result of a command on stdout: ``fields`` as JSON, or ``text`` for users."""
    if as_json:
        print_json(fields)
    else:
        print_text(text)


def note(text: str) -> None:
    """Print a line for the user on stderr."""
    typer.echo(shown(text), err=True)


def say(event: Mapping[str, object], text: str, *, as_json: bool) -> None:
    """Report an event of a long-running command: ``event`` as JSON, or ``text`` for users.

    A closed pipe is ignored, so that the command ends in order.
    """
    with suppress(BrokenPipeError):
        if as_json:
            print_json(event)
        else:
            note(text)


@contextmanager
def progress(*, quiet: bool, first: str = "starting") -> "Iterator[Progress]":
    """Show reported progress as bars on stderr, or as plain lines if stderr is not a terminal.

    A terminal shows ``first`` until something is reported, so that a command that imports or waits
    is not silent.
    """
    if quiet:
        yield _ignore
        return
    from rich import progress as rich_progress
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield plain_lines()
        return
    columns = (
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("{task.fields[left]}"),
        rich_progress.TimeRemainingColumn(),
    )
    with rich_progress.Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, rich_progress.TaskID] = {}
        begun = [bars.add_task(first, total=None, left="")]

        def report(description: str, done: int, total: int | None) -> None:
            while begun:
                bars.remove_task(begun.pop())
            description = shown(description)
            if description not in tasks:
                tasks[description] = bars.add_task(description, total=total, left="")
            bars.update(tasks[description], completed=done, total=total, left="left:" if total else "")

        yield report


def _ignore(description: str, done: int, total: int | None) -> None:
    pass


def plain_lines() -> "Progress":
    """Print one line on stderr when each step begins."""
    seen: set[str] = set()

    def report(description: str, done: int, total: int | None) -> None:
        if description not in seen:
            seen.add(description)
            note(description)

    return report


def clear_terminal() -> None:
    """Clear the terminal on stdout. Does nothing if stdout is not a terminal."""
    from rich.console import Console

    console = Console()
    if console.is_terminal:
        console.clear()


def print_table(title: str, rows: Mapping[str, object]) -> None:
    """Print names and values on stdout. A terminal folds long values between words only, so that
    addresses can be copied."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    if title:
        console.print(Text(shown(title), style="italic"))
    width = max((len(name) for name in rows), default=0) + 2
    room = console.width - width if console.is_terminal else None
    for name, value in rows.items():
        first, *others = folded(shown(str(value)), room)
        console.print(Text.assemble((name.ljust(width), "bold"), first))
        for line in others:
            console.print(Text(" " * width + line))


def print_folded(text: str) -> None:
    """Print a line on stdout. On a terminal it is folded, and further lines are indented."""
    room = shutil.get_terminal_size().columns - INDENT if sys.stdout.isatty() else None
    print_text(f"\n{' ' * INDENT}".join(folded(text, room)))


def folded(text: str, room: int | None) -> list[str]:
    """Return ``text`` in lines of at most ``room`` characters; longer words stay whole. If ``room``
    is None or too small, the lines of ``text`` stay as they are."""
    lines = text.split("\n")
    if room is None or room < MIN_ROOM:
        return lines
    return [
        part
        for line in lines
        for part in (
            textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False)
            if len(line) > room
            else [line]
        )
    ]
