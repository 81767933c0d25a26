"""Commands that run for long in the foreground of a terminal. A node prints its state, and lets its
sessions move away before it stops.

Every such command is watched and stopped in the same ways: ``monitoring`` serves its metrics, and
``controlled`` opens the socket for `swarmnet status` and `swarmnet finish`.
"""

import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet.addresses import follow_addresses, write_addresses
from swarmnet.cli.interrupts import Interrupts, run_until_stopped
from swarmnet.cli.output import note, print_json, print_text, progress, say
from swarmnet.reach import advice, describe
from swarmnet.restart import may_restart, restart
from swarmnet.systemd import notify_ready, notify_status, notify_stopping
from swarmnet.terminal import shown
from swarmnet.units import show_time
from swarmnet_protocols.models import Progress

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from swarmnet.web.monitoring import Monitor
    from swarmnet_node.owner.control import Watched
    from swarmnet_node.owner.watched_peer import GuestPeer, Purpose
    from swarmnet_node.resting import Resting
    from swarmnet_node.supervisor import Supervisor
    from swarmnet_protocols.directory import Directory
    from swarmnet_protocols.joining.network import Network
    from swarmnet_protocols.net import Transport
    from swarmnet_protocols.wire.control_pb2 import NodeStatus

DASHBOARD_FOLDER = "dashboard"
"""Folder in the data directory with a dashboard's history and control socket."""
HOW_TO_STOP = "stop with Ctrl-C, or with `swarmnet finish` from another terminal"
DEFAULT_GRACE_S = 30.0
"""Seconds that running sessions have to move to other hosts before a node stops."""


@asynccontextmanager
async def monitoring(address: tuple[str, int] | None, *, as_json: bool) -> AsyncIterator["Monitor | None"]:
    """Serve metrics and probes at ``address`` while the context is open; None serves nothing."""
    if address is None:
        yield None
        return
    from swarmnet.web.monitoring import Monitor

    monitor = Monitor()
    async with monitor.serve(*address) as url:
        say({"event": "metrics", "url": f"{url}/metrics"}, f"metrics: {url}/metrics", as_json=as_json)
        yield monitor


@asynccontextmanager
async def controlled(
    peer: "Watched", data_dir: Path, monitor: "Monitor | None", more: "Collector | None" = None
) -> AsyncIterator[None]:
    """Let the owner watch and stop ``peer`` while the context is open. ``more``: further
    metrics."""
    from swarmnet_node.owner import control

    if monitor is not None:
        monitor.watch(peer, more)
    async with control.serve(peer, data_dir):
        yield


@asynccontextmanager
async def idle_guest(
    network: "Network", purpose: "Purpose"
) -> "AsyncIterator[tuple[GuestPeer, Transport, Directory]]":
    """Run a peer that loads nothing, while its owner's limits forbid work or there is no work. The
    owner watches and controls the peer."""
    from swarmnet_node.owner.watched_peer import GuestPeer
    from swarmnet_protocols.joining.network import connect

    interrupts = Interrupts.catch()
    purpose.limits.limit_link(network.peer.link)
    async with (
        connect(network) as (transport, directory),
        GuestPeer(purpose, transport, directory).running() as peer,
        controlled(peer, purpose.folder, None),
    ):
        interrupts.first = lambda: peer.finish(0.0)
        yield peer, transport, directory


def say_pause(status: "NodeStatus", *, as_json: bool) -> None:
    """Print that a command is paused, why, and until when."""
    event = {"event": "paused", "reason": status.reason, "until": status.paused_until or None}
    say(event, f"paused: {describe_pause(status)}", as_json=as_json)


@dataclass(frozen=True)
class Foreground:
    """Runs the node that ``start`` makes, with its control socket and addresses in ``data_dir``.

    - ``stop_on_eof``: stop when stdin ends, as it does when the parent process ends.
    - ``metrics``: host and port of metrics and probes.
    - ``mdns``: True if peers in the local network find each other.
    - ``services``: further services of the node's process: name → a context that yields the URL.
    - ``companion``: work that runs as long as the node.
    - ``is_resting``: True if the node continues a pause that another program began.
    """

    start: Callable[[Progress], AbstractAsyncContextManager["Supervisor"]]
    data_dir: Path
    as_json: bool
    stop_on_eof: bool = False
    metrics: tuple[str, int] | None = None
    mdns: bool = False
    services: Mapping[str, Callable[["Supervisor"], AbstractAsyncContextManager[str]]] = field(
        default_factory=dict
    )
    companion: "Callable[[Supervisor], Coroutine[Any, Any, object]] | None" = None
    is_resting: bool = False

    def run(self) -> None:
        """Serve until the node has finished. Raises ``KeyboardInterrupt`` if a second signal stops
        it before. For a pause, the same command may replace this process, to free memory that the
        process cannot give back."""
        resting = run_until_stopped(self._serve())
        if resting is not None:
            restart(resting)

    async def _serve(self) -> "Resting | None":
        from swarmnet_protocols.machine.aio import in_background

        interrupts = Interrupts.catch()
        if self.stop_on_eof:
            interrupts.catch_end_of(sys.stdin)
        async with AsyncExitStack() as stack:
            monitor = await stack.enter_async_context(monitoring(self.metrics, as_json=self.as_json))
            with progress(quiet=self.as_json) as report:
                node = await stack.enter_async_context(self.start(report))
                node.restart_for_pauses(may_restart)
                # A node may wait long for experts of peers, and those peers may enter the swarm
                # through it.
                await stack.enter_async_context(controlled(node, self.data_dir, None))
                write_addresses(self.data_dir, list(node.status().addresses))
                following = follow_addresses(self.data_dir, lambda: node.status().addresses)
                runs = [following, *([self.companion(node)] if self.companion else [])]
                await stack.enter_async_context(in_background(*runs))
                has_started = await node.started()
            if node.resting is not None:
                return node.resting
            if not has_started:  # told to finish while it was loading
                self._say({"event": "stopped"}, "stopped")
                return None
            interrupts.first = lambda: self._finish(node)
            for name, service in self.services.items():
                url = await stack.enter_async_context(service(node))
                self._say({"event": name, "url": url}, f"{name}: {url}")
            if monitor is not None:
                monitor.watch(node)
            node.on_change(self._report)
            node.on_move(self._report_move)
            node.on_switch(self._report_switch)
            self._announce(node.status())
            await node.finished()
        if node.resting is None:
            self._say({"event": "stopped"}, "stopped")
        return node.resting

    def _report(self, status: "NodeStatus") -> None:
        notify_status(_one_line(status))
        if status.state == "paused":
            say_pause(status, as_json=self.as_json)
        else:
            self._say({"event": "serving", "blocks": _span(status)}, "serving")

    def _report_move(self, status: "NodeStatus") -> None:
        notify_status(_one_line(status))
        start, end = status.moved_from
        event: dict[str, object] = {
            "event": "moved",
            "blocks": _span(status),
            "moved_from": [start, end],
        }
        self._say(
            event | {"blocks_reason": status.blocks_reason}, f"moved from {start}:{end} to {_blocks(status)}"
        )

    def _report_switch(self, status: "NodeStatus") -> None:
        notify_status(_one_line(status))
        event: dict[str, object] = {
            "event": "switched",
            "model": status.model,
            "former_model": status.former_model,
            "model_reason": status.model_reason,
            "blocks": _span(status),
        }
        text = f"switched from {status.former_model} to {status.model}: {status.model_reason}"
        self._say(event | {"blocks_reason": status.blocks_reason}, f"{text}; {_blocks(status)}")

    def _finish(self, node: "Supervisor") -> None:
        notify_stopping()
        self._say(
            {"event": "finishing", "grace_s": DEFAULT_GRACE_S},
            f"stopping: sessions have {DEFAULT_GRACE_S:g} s to move away; press Ctrl-C again to stop at once",
        )
        node.finish(DEFAULT_GRACE_S)

    def _announce(self, status: "NodeStatus") -> None:
        if status.state == "paused" or self.is_resting:
            self._report(status)
        notify_ready(_one_line(status))
        if self.is_resting:
            return
        addresses = list(status.addresses)
        if self.as_json:
            event = {
                "event": "ready",
                "peer_id": status.peer_id,
                "addresses": addresses,
                "reach": str(status.reach.kind),
                "known_peers": status.known_peers,
                "model": status.model,
            }
            hosts = {"blocks": _span(status), "blocks_reason": status.blocks_reason}
            print_json(event | hosts | {"experts": _experts(status)})
            return
        from rich.console import Console
        from rich.panel import Panel
        from rich.text import Text

        summary = f"{status.model}, {_blocks(status)}\n{status.peer_id}"
        Console().print(
            Panel(
                Text(shown(summary)),
                title=Text(shown(f"{'paused' if status.reason else 'serving'} in the swarm {status.swarm}")),
                expand=False,
            )
        )
        note_if_alone(status, mdns=self.mdns)
        print_text(f"how other peers reach this node: {describe(status.reach, addresses)}")
        if text := advice(status.reach, addresses):
            print_text(f"  to improve it: {text}")
        elif addresses:
            print_text("others enter the swarm through it with one of")
            for address in addresses:
                print_text(f"  --bootstrap {address}")
        note(HOW_TO_STOP)

    def _say(self, event: dict[str, object], text: str) -> None:
        say(event, text, as_json=self.as_json)


def describe_pause(status: "NodeStatus") -> str:
    """Return why a node is paused, until when, and how its owner ends the pause."""
    from swarmnet_node.owner.limits import PAUSED_BY_OWNER

    if status.reason != PAUSED_BY_OWNER:
        return status.reason
    until = f" until {show_time(status.paused_until)}" if status.paused_until else ""
    return f"{status.reason}{until}; `swarmnet resume` ends the pause"


def note_if_alone(status: "NodeStatus", *, mdns: bool) -> None:
    """Tell the user if this peer has found no other peer. ``mdns``: whether it searched the local
    network."""
    if status.known_peers:
        return
    where = "; peers in this network find this one by mDNS" if mdns else ""
    note(f"no other peer of the swarm answers yet{where}")


def _one_line(status: "NodeStatus") -> str:
    return f"{status.state}: {status.model}, {hosted(status)}"


def hosted(status: "NodeStatus") -> str:
    """Return the blocks and experts that a node hosts."""
    start, end = _span(status)
    blocks = f"blocks {start}:{end} of {status.host.total_blocks}"
    experts = f"experts {_experts(status)} (blocks:experts)"
    return ", ".join([blocks] * (end > 0) + [experts] * bool(status.host.experts))


def _span(status: "NodeStatus") -> list[int]:
    return [status.host.record.start, status.host.record.end]


def _experts(status: "NodeStatus") -> str:
    from swarmnet_protocols.directory.node_reports import experts_text

    return experts_text(status.host.experts)


def _blocks(status: "NodeStatus") -> str:
    return f"{hosted(status)}: {status.blocks_reason}" if status.blocks_reason else hosted(status)
