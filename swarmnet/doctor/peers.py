"""What others see of this machine, asked of the peers it would start from."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from swarmnet.doctor import facts
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.clock import wall_clock

if TYPE_CHECKING:
    from swarmnet.swarm_file.entry import Entry
    from swarmnet_protocols.net import Transport

OPEN_S = 3.0
MAX_PEERS = 8


async def ask(
    entry: "Entry", listen: Sequence[str], dialled: Sequence[str] = ()
) -> tuple[list[facts.Peer], list[int]]:
    """What each peer answers, and the TCP ports it was asked to dial: those of ``dialled``, or else where we listen now.

    Raises a ``SwarmnetError`` when no p2pd can be started.
    """
    async with _connected(entry, listen) as transport:
        ports = tcp_ports(dialled or transport.addresses())
        others = [each for each in entry.bootstrap if not each.endswith(f"/p2p/{transport.peer_id}")]
        answers = await asyncio.gather(*(_ask(transport, each, ports) for each in others[:MAX_PEERS]))
        return answers, ports


@asynccontextmanager
async def _connected(entry: "Entry", listen: Sequence[str]) -> "AsyncIterator[Transport]":
    """On the network as a node of the entry's identity, without a part in the directory."""
    # The import of libp2p's bindings takes seconds on a slow machine: others' deadlines go on meanwhile.
    await asyncio.to_thread(_import_transport)
    from swarmnet_protocols.membership.guarded_transport import GuardedTransport
    from swarmnet_protocols.membership.handshake import Handshakes
    from swarmnet_protocols.membership.membership import Membership
    from swarmnet_protocols.net.identity import Identity
    from swarmnet_protocols.net.p2pd.transport import P2pdConfig, P2pdTransport
    from swarmnet_protocols.timing import Timing

    peer = Identity.load_or_create(entry.identity_path).peer_id
    membership = Membership(entry.file.rules(), peer, wall_clock, folder=entry.folder)
    # A peer that is asked to dial our ports makes a handshake with the process there: a client may run beside us.
    config = P2pdConfig(
        entry.identity_path, listen=tuple(listen), named=tuple(entry.bootstrap), only_dials=True
    )
    async with (
        P2pdTransport.create(config) as raw,
        Handshakes.run(raw, membership, Timing()) as handshakes,
    ):
        yield GuardedTransport(raw, handshakes)


def _import_transport() -> None:
    from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind

    prepare_hivemind()
    import hivemind.p2p  # noqa: F401


async def _ask(transport: "Transport", address: str, ports: Sequence[int]) -> facts.Peer:
    from swarmnet_protocols.net.p2pd.transport import peer_of
    from swarmnet_protocols.net.probes import probe
    from swarmnet_protocols.net.protocol_ids import PROBE

    try:
        stream = await transport.open(peer_of(address), PROBE, addresses=[address], deadline_s=OPEN_S)
        try:
            return facts.Peer(address, await probe(stream, ports, wall_clock))
        finally:
            stream.close()
    except SwarmnetError as error:
        # go-libp2p lists every address it tried, one a line
        return facts.Peer(address, error=str(error).splitlines()[-1].strip())


def tcp_ports(addresses: Sequence[str]) -> list[int]:
    """The distinct TCP ports of multiaddrs that do not lead through a relay."""
    found = []
    for address in addresses:
        match address.split("/"):
            case ["", _, _, "tcp", port, *rest] if port.isdigit() and "p2p-circuit" not in rest:
                found.append(int(port))
    return list(dict.fromkeys(found))
