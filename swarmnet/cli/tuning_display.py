"""What ``tune`` shows while it works: bars on a terminal, lines elsewhere, JSON for programs."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from swarmnet.cli.output import note, plain_lines, print_json

if TYPE_CHECKING:
    from rich.console import Console

Fields = Mapping[str, Any]


class Display(Protocol):
    def show(self, event: Fields) -> None:
        """Show an event of the run."""

    def progress(self, description: str, done: int, total: int | None) -> None:
        """Show how far a long step before the run has come. Called from any thread."""


@contextmanager
def display(*, as_json: bool) -> Iterator[Display]:
    """The display that fits where the output goes."""
    if as_json:
        yield JsonLines()
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines()
        return
    with bars(console) as shown:
        yield shown


class JsonLines:
    def show(self, event: Fields) -> None:
        print_json(event)

    def progress(self, description: str, done: int, total: int | None) -> None:
        pass


class Lines:
    """A sentence an event."""

    def __init__(self) -> None:
        self.progress = plain_lines()
        self._words = Words()

    def show(self, event: Fields) -> None:
        note(self._words.sentence(event))


@contextmanager
def bars(console: "Console") -> Iterator[Display]:
    """A bar for the steps with the last one in words under it; above it a line for what is worth reading later."""
    from rich import progress as rich_progress
    from rich.console import RenderableType
    from rich.text import Text

    class Bars(rich_progress.Progress):
        summary = ""
        words = Words()

        def get_renderables(self) -> Iterable[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            if self.summary:
                yield Text(self.summary, overflow="fold")

        def show(self, event: Fields) -> None:
            sentence = self.words.sentence(event)
            if event["event"] == "begin":
                for task in self.tasks:
                    self.remove_task(task.id)
                self.add_task("steps", total=event["steps"], completed=event["step"])
            elif event["event"] == "step":
                self.update(self.tasks[0].id, completed=event["step"])
                self.summary = sentence
            if event["event"] not in {"step", "saved"}:
                self.console.print(Text(sentence))

        def progress(self, description: str, done: int, total: int | None) -> None:
            found = next((task.id for task in self.tasks if task.description == description), None)
            if found is None:
                found = self.add_task(description, total=total)
            self.update(found, completed=done, total=total, visible=done != total)

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(bar_width=24),
        rich_progress.TaskProgressColumn(show_speed=False),
        rich_progress.TimeRemainingColumn(elapsed_when_finished=True),
    )
    # The time left is told from the last hour: a step may take a minute.
    with Bars(*columns, console=console, speed_estimate_period=3600.0) as shown:
        yield shown


class Words:
    """Events as sentences; bytes are added up."""

    def __init__(self) -> None:
        self._steps = 0
        self._sent = 0
        self._received = 0

    def sentence(self, event: Fields) -> str:
        self._sent += event.get("bytes_sent", 0)
        self._received += event.get("bytes_received", 0)
        match event["event"]:
            case "begin":
                return self._beginning(event)
            case "step":
                text = (
                    f"step {event['step']} of {self._steps}: loss {event['loss']:.4f}, "
                    f"{event['tokens_per_s']:.0f} tokens/s, "
                    f"{self._sent / 1e6:.1f} MB sent, {self._received / 1e6:.1f} MB received"
                )
                lost = event["failovers"]
                return text + (f", {lost} {'host' if lost == 1 else 'hosts'} replaced" if lost else "")
            case "eval":
                return f"step {event['step']}: held-out {_scores(event)}"
            case "saved":
                return f"saved after step {event['step']}: the same command goes on from here"
            case "done":
                scores = f" Held-out {_scores(event)}." if "val_loss" in event else ""
                curve = "" if event["curve"] else " No loss.png: pip install 'swarmnet-p2p[plots]'."
                return f"done: the adapter is in {event['path']}.{scores}{curve}"
            case kind:
                raise ValueError(kind)

    def _beginning(self, event: Fields) -> str:
        self._steps = event["steps"]
        parts = [
            f"{event['method']}: {event['trained_parameters']:,} parameters learn from {event['rows']} rows "
            f"in {event['steps']} steps, {event['held_out']} rows are held out"
        ]
        if event["cut"]:
            parts.append(f"{event['cut']} rows were longer than --max-length and lost their ends")
        if event["step"]:
            parts.append(f"going on after step {event['step']}")
        return "\n".join(parts)


def _scores(event: Fields) -> str:
    accuracy = f", accuracy {event['accuracy']:.1%}" if "accuracy" in event else ""
    return f"loss {event['val_loss']:.4f}{accuracy}"
