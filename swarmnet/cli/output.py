"""What the commands print: JSON and answers on stdout, everything about progress on stderr."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import typer


class Report(Protocol):
    """Hears how far a step has come; ``total`` is None while it is unknown."""

    def __call__(self, description: str, done: int, total: int | None) -> None: ...


def print_json(fields: Mapping[str, object]) -> None:
    """One JSON object on one line of stdout, seen at once by whoever reads it."""
    sys.stdout.write(json.dumps(fields, allow_nan=False) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line for the person in front of the terminal."""
    typer.echo(text, err=True)


@contextmanager
def progress(*, quiet: bool) -> Iterator[Report]:
    """Shows what is reported as bars on stderr, or as plain lines when stderr is no terminal."""
    if quiet:
        yield _ignore
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _plain_lines()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def report(description: str, done: int, total: int | None) -> None:
            if description not in tasks:
                tasks[description] = bars.add_task(description, total=total)
            bars.update(tasks[description], completed=done, total=total)

        yield report


def _ignore(description: str, done: int, total: int | None) -> None:
    pass


def _plain_lines() -> Report:
    seen: set[str] = set()

    def report(description: str, done: int, total: int | None) -> None:
        if description not in seen:
            seen.add(description)
            note(description)

    return report


def print_table(title: str, rows: Mapping[str, object]) -> None:
    """Names and values on stdout."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), Text(str(value), overflow="fold"))
    Console(soft_wrap=False).print(table)
