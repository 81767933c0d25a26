"""Displays of long runs: bars on a terminal, lines elsewhere, JSON for programs."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from swarmnet.cli.output import note, plain_lines, print_json
from swarmnet.terminal import shown

if TYPE_CHECKING:
    from rich.console import Console

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Bar:
    """Progress of the whole run, in rounds or steps."""

    name: str
    done: int
    total: int


@dataclass(frozen=True)
class Telling:
    """An event as users see it.

    - ``is_news``: whether ``sentence`` stays on the terminal.
    - ``summary``: a text about the run so far. None if the previous summary still holds.
    """

    sentence: str
    is_news: bool = True
    summary: str | None = None
    bar: Bar | None = None


class Display(Protocol):
    def show(self, event: Fields, telling: Telling) -> None:
        """Show an event: ``event`` as JSON, or ``telling`` for users."""

    def progress(self, description: str, done: int, total: int | None) -> None:
        """Show the progress of a long step. May be called from any thread."""


@contextmanager
def display(*, as_json: bool) -> Iterator[Display]:
    """Yield the display for this output: JSON, bars on a terminal, or lines."""
    if as_json:
        yield JsonLines()
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines()
        return
    with bars(console) as with_bars:
        yield with_bars


class JsonLines:
    def show(self, event: Fields, telling: Telling) -> None:
        print_json(event)

    def progress(self, description: str, done: int, total: int | None) -> None:
        pass


class Lines:
    """One line for each event, and before the run begins one for each long step."""

    def __init__(self) -> None:
        self._steps = plain_lines()
        self._has_begun = False

    def show(self, event: Fields, telling: Telling) -> None:
        self._has_begun |= telling.bar is not None
        note(telling.sentence)

    def progress(self, description: str, done: int, total: int | None) -> None:
        if not self._has_begun:
            self._steps(description, done, total)


@contextmanager
def bars(console: "Console") -> Iterator[Display]:
    """Show a bar for the run and one for each long step, and a summary below all bars. Events that
    are news are printed above the bars."""
    from rich import progress as rich_progress
    from rich.console import RenderableType
    from rich.table import Column
    from rich.text import Text

    class Bars(rich_progress.Progress):
        run: rich_progress.TaskID | None = None
        summary = ""

        def get_renderables(self) -> Iterable[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            if self.summary:
                yield Text(shown(self.summary), overflow="fold")

        def show(self, event: Fields, telling: Telling) -> None:
            if telling.bar is not None:
                self._go_on(telling.bar)
            if telling.summary is not None:
                self.summary = telling.summary
            if telling.is_news:
                self.console.print(Text(shown(telling.sentence)))

        def progress(self, description: str, done: int, total: int | None) -> None:
            description = shown(description)
            found = next((task.id for task in self.tasks if task.description == description), None)
            if found is None:
                found = self.add_task(description, total=total)
            self.update(found, completed=done, total=total, visible=done != total)

        def _go_on(self, bar: Bar) -> None:
            if self.run is None:  # the run begins: the long steps before it are done
                for task in self.tasks:
                    self.remove_task(task.id)
                self.run = self.add_task(bar.name, total=bar.total)
            self.update(self.run, completed=bar.done)

    columns = (
        rich_progress.TextColumn(
            "{task.description}", markup=False, table_column=Column(max_width=40, no_wrap=True)
        ),
        rich_progress.BarColumn(bar_width=24),
        rich_progress.TaskProgressColumn(show_speed=False),
        rich_progress.TimeRemainingColumn(elapsed_when_finished=True),
    )
    # The time left is estimated from the last hour, because a round or a step may take minutes.
    with Bars(*columns, console=console, speed_estimate_period=3600.0) as display:
        yield display
