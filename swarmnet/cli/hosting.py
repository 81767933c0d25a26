"""A node in the foreground: it reports, and ends in good order when it is told to."""

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import typer

from swarmnet.cli.control import DEFAULT_GRACE_S
from swarmnet.cli.interrupts import Interrupts
from swarmnet.cli.output import note, print_json, progress
from swarmnet_protocols.models import Progress

if TYPE_CHECKING:
    from swarmnet_node.control import NodeStatus


class HostedNode(Protocol):
    """A node that serves."""

    def status(self) -> "NodeStatus": ...

    def finish(self, grace_s: float) -> None: ...

    async def finished(self) -> None: ...


@dataclass(frozen=True)
class Foreground:
    """How a node runs in the foreground: ``start`` gives the serving node, ``data_dir`` gets its socket and addresses."""

    start: Callable[[Progress], AbstractAsyncContextManager[HostedNode]]
    data_dir: Path
    as_json: bool
    stop_on_eof: bool = False  # stop when stdin ends: with the process that started this one

    def run(self) -> None:
        """Serve until the node has finished. Raises ``KeyboardInterrupt`` when it was stopped at once."""
        import uvloop

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve())
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    async def _serve(self) -> None:
        from swarmnet_node import control

        interrupts = Interrupts.catch()
        if self.stop_on_eof:
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _at_eof, interrupts)
        async with AsyncExitStack() as stack:
            with progress(quiet=self.as_json) as report:
                node = await stack.enter_async_context(self.start(report))
            await stack.enter_async_context(control.serve(node, self.data_dir))
            interrupts.first = lambda: self._finish(node)
            self._announce(node.status())
            await node.finished()
        self._say({"event": "stopped"}, "stopped")

    def _finish(self, node: HostedNode) -> None:
        self._say(
            {"event": "finishing", "grace_s": DEFAULT_GRACE_S},
            f"stopping: sessions have {DEFAULT_GRACE_S:g} s to move away; press Ctrl-C again to stop at once",
        )
        node.finish(DEFAULT_GRACE_S)

    def _announce(self, status: "NodeStatus") -> None:
        addresses = list(status.addresses)
        (self.data_dir / "addresses").write_text("".join(f"{address}\n" for address in addresses))
        if self.as_json:
            event = {
                "event": "ready",
                "peer_id": status.peer_id,
                "addresses": addresses,
                "model": status.model,
            }
            print_json(event | {"blocks": [status.start, status.end]})
            return
        from rich.console import Console
        from rich.panel import Panel
        from rich.text import Text

        summary = (
            f"{status.model}, blocks {status.start}:{status.end} of {status.total_blocks}\n{status.peer_id}"
        )
        Console().print(Panel(Text(summary), title=f"serving in the swarm {status.swarm}", expand=False))
        typer.echo("others reach this node with one of")
        for address in addresses:
            typer.echo(f"  --bootstrap {address}")
        note("stop with Ctrl-C, or with `swarmnet finish` from another terminal")

    def _say(self, event: dict[str, object], text: str) -> None:
        # Whoever read what we print may be gone; that must not keep a node from leaving in good order.
        with suppress(BrokenPipeError):
            if self.as_json:
                print_json(event)
            else:
                note(text)


def _at_eof(interrupts: Interrupts) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        interrupts()
