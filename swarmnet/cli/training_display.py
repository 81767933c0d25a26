"""What ``train join`` shows while it works: bars on a terminal, lines elsewhere, JSON for programs."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from swarmnet.cli.output import note, plain_lines, print_json

if TYPE_CHECKING:
    from rich.console import Console

Fields = Mapping[str, Any]


class Display(Protocol):
    def show(self, event: Fields, status: Fields) -> None:
        """Show an event of the worker, and where it stands now."""

    def progress(self, description: str, done: int, total: int | None) -> None:
        """Show how far a long step has come. Called from any thread."""


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
    def show(self, event: Fields, status: Fields) -> None:
        print_json(event)

    def progress(self, description: str, done: int, total: int | None) -> None:
        pass


class Lines:
    """A sentence an event; of long steps, that they begin. Once the worker is ready, its rounds say how far it is."""

    def __init__(self) -> None:
        self._steps = plain_lines()
        self._ready = False

    def show(self, event: Fields, status: Fields) -> None:
        self._ready |= event["event"] == "ready"
        note(sentence(event))

    def progress(self, description: str, done: int, total: int | None) -> None:
        if not self._ready:
            self._steps(description, done, total)


@contextmanager
def bars(console: "Console") -> Iterator[Display]:
    """A bar for the rounds and one for whatever takes long, above them a line for what is worth reading later."""
    from rich import progress as rich_progress
    from rich.console import RenderableType
    from rich.table import Column
    from rich.text import Text

    class Bars(rich_progress.Progress):
        summary = ""

        def get_renderables(self) -> Iterable[RenderableType]:
            yield self.make_tasks_table(self.tasks)
            if self.summary:
                yield Text(self.summary, overflow="fold")

        def show(self, event: Fields, status: Fields) -> None:
            if event["event"] == "ready":
                for task in self.tasks:
                    self.remove_task(task.id)
                self.add_task("rounds", total=status["rounds"], completed=status["round"])
            elif self.tasks and event["event"] != "leaving":
                self.update(self.tasks[0].id, completed=status["round"])
            self.summary = summary(status)
            if _is_news(event):
                self.console.print(Text(sentence(event)))

        def progress(self, description: str, done: int, total: int | None) -> None:
            found = next((task.id for task in self.tasks if task.description == description), None)
            if found is None:
                found = self.add_task(description, total=total)
            self.update(found, completed=done, total=total, visible=done != total)

    columns = (
        rich_progress.TextColumn("{task.description}", table_column=Column(max_width=40, no_wrap=True)),
        rich_progress.BarColumn(bar_width=24),
        rich_progress.TaskProgressColumn(show_speed=False),
        rich_progress.TimeRemainingColumn(elapsed_when_finished=True),
    )
    # The time left is told from the last hour: a round may take minutes.
    shown = Bars(*columns, console=console, speed_estimate_period=3600.0)
    with shown:
        yield shown


def summary(status: Fields) -> str:
    """Where a worker stands, in one line."""
    parts = [f"round {status['round']} of {status['rounds']}"] if "rounds" in status else []
    for name, label in (("loss", "loss"), ("val_loss", "validation")):
        if status.get(name) is not None:
            parts.append(f"{label} {status[name]:.4f}")
    if "workers" in status:
        parts.append(f"{status['workers']} {'worker' if status['workers'] == 1 else 'workers'}")
        parts.append(f"{status['bytes_sent'] / 1e6:.2f} MB sent")
        parts.append(f"{status['bytes_received'] / 1e6:.2f} MB received")
    if "wait_share" in status:
        parts.append(f"{status['wait_share']:.0%} waiting")
    return ", ".join(parts)


def sentence(event: Fields) -> str:
    """An event in words."""
    match event["event"]:
        case "round":
            outcome = "committed" if event["committed"] else f"discarded ({event['reason']})"
            loss = "only listened" if event["loss"] is None else f"loss {event['loss']:.4f}"
            sent, received = event["bytes_sent"] / 1e6, event["bytes_received"] / 1e6
            text = (
                f"round {event['round']} {outcome}: {loss}, {event['workers']} workers, "
                f"{sent:.2f} MB sent, {received:.2f} MB received, {event['wait_s']:.1f} s waited"
            )
            excluded = (f"  excluded {each['peer_id']}: {each['reason']}" for each in event["excluded"])
            return "\n".join([text, *excluded])
        case "eval":
            return f"round {event['round']}: validation loss {event['val_loss']:.4f}"
        case "ready":
            text = f"training {event['name']} as {event['peer_id']}; others join with --bootstrap and one of"
            return "\n".join([text, *(f"  {address}" for address in event["addresses"])])
        case "waiting":
            return f"round {event['round']}: waiting for more workers, {event['workers']} so far"
        case "healed":
            dropped = (f"; dropped {each['peer_id']}: {each['reason']}" for each in event["dropped"])
            size = event["bytes"] / 1e6
            return (
                f"fetched the state of round {event['round']}: {size:.1f} MB in {event['seconds']:.1f} s"
                + "".join(dropped)
            )
        case "leaving":
            return "leaving after this round; press Ctrl-C again to leave at once"
        case "done":
            return f"done after {event['round']} rounds, {event['revision']} of them committed"
        case kind:
            rest = ", ".join(f"{name} {value}" for name, value in event.items() if name != "event")
            return f"{kind}: {rest}" if rest else str(kind)


def _is_news(event: Fields) -> bool:
    """Whether an event is more than the bars show."""
    if event["event"] == "round":
        return not event["committed"] or bool(event["excluded"])
    return event["event"] not in {"eval", "waiting"}
