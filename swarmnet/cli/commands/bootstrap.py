"""``swarmnet bootstrap``: a peer without a model, through which other peers enter the swarm."""

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnet.addresses import follow_addresses, usual_listen, write_addresses
from swarmnet.cli.foreground import HOW_TO_STOP, controlled, monitoring, note_if_alone
from swarmnet.cli.interrupts import Interrupts, run_until_stopped
from swarmnet.cli.limit_options import read_relay_rate
from swarmnet.cli.option_groups import From
from swarmnet.cli.options import (
    AnnounceOption,
    BootstrapOption,
    DataDirOption,
    IssuerOption,
    JsonFlag,
    ListenOption,
    MaxP2pdOption,
    MetricsOption,
    SwarmArgument,
    TransportOption,
)
from swarmnet.cli.output import note, print_json, print_text, say
from swarmnet.paths import locked_data_dir
from swarmnet.swarm_file.entry import enter
from swarmnet.systemd import notify_ready, notify_stopping

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnet_protocols.joining.network import Network
    from swarmnet_protocols.net import Transport
    from swarmnet_protocols.wire.control_pb2 import NodeStatus


def bootstrap(  # noqa: PLR0913 - a command line, not an interface
    swarm: SwarmArgument,
    *,
    transport: TransportOption = "auto",
    bootstrap: BootstrapOption = [],  # noqa: B006 - typer copies it
    listen: ListenOption = [],  # noqa: B006
    announce: AnnounceOption = [],  # noqa: B006
    data_dir: DataDirOption,
    issuer: IssuerOption = None,
    max_p2pd_bytes: MaxP2pdOption,
    relay_bytes_per_s: Annotated[
        float,
        typer.Option(
            "--relay", metavar="off|RATE", help="Forward traffic of peers behind routers at most this fast."
        ),
        From(str, read_relay_rate, "100mbit"),
    ],
    metrics: MetricsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Run a bootstrap peer until `swarmnet finish` or Ctrl-C. New peers enter the swarm through it,
    and it stores a part of the directory. It needs no model and little memory."""
    entry = enter(swarm, data_dir, bootstrap)
    with locked_data_dir(data_dir) as directory:
        network = entry.network(listen or usual_listen(directory), announce, issuer)
        peer = replace(network.peer, max_daemon_bytes=max_p2pd_bytes)
        network = replace(network, peer=peer, may_begin=True)
        serving = _serve(network, entry.file.name, directory, relay_bytes_per_s, metrics, as_json=as_json)
        run_until_stopped(serving)


async def _serve(
    network: "Network",
    swarm: str,
    data_dir: "Path",
    relay_bytes_per_s: float,
    metrics: tuple[str, int] | None,
    *,
    as_json: bool,
) -> None:
    from random import SystemRandom

    from swarmnet_node.owner.watched_peer import Purpose, WatchedPeer
    from swarmnet_protocols.directory.duplicate_identity import DuplicateWatch
    from swarmnet_protocols.errors import NetworkStopped
    from swarmnet_protocols.joining.network import connect
    from swarmnet_protocols.machine.aio import race
    from swarmnet_protocols.timing import Timing

    interrupts = Interrupts.catch()
    network.peer.link.set_relay_rate(relay_bytes_per_s)
    async with AsyncExitStack() as stack:
        monitor = await stack.enter_async_context(monitoring(metrics, as_json=as_json))
        transport, directory = await stack.enter_async_context(connect(network))
        watch = await stack.enter_async_context(
            DuplicateWatch(transport, directory, SystemRandom(), Timing()).running()
        )

        def add_warning(status: "NodeStatus") -> None:
            status.warning = watch.warning() or status.warning

        purpose = Purpose("bootstrap", swarm, data_dir, network.peer.link, add_warning)
        peer = await stack.enter_async_context(WatchedPeer(purpose, transport, directory).running())
        await stack.enter_async_context(controlled(peer, data_dir, monitor))
        interrupts.first = peer.stopping.set
        _announce(transport, data_dir, as_json=as_json)
        if not as_json:
            note_if_alone(peer.status(), mdns=network.mdns)
        await race(peer.stopping.wait(), transport.died(), follow_addresses(data_dir, transport.addresses))
        notify_stopping()
        if not peer.stopping.is_set():
            raise NetworkStopped
    say({"event": "stopped"}, "stopped", as_json=as_json)


def _announce(transport: "Transport", data_dir: "Path", *, as_json: bool) -> None:
    addresses = list(transport.addresses())
    write_addresses(data_dir, addresses)
    notify_ready(f"peer {transport.peer_id}")
    if as_json:
        print_json({"event": "ready", "peer_id": transport.peer_id, "addresses": addresses})
        return
    note("other peers enter the swarm here with one of")
    for address in addresses:
        print_text(f"  --bootstrap {address}")
    note(HOW_TO_STOP)
