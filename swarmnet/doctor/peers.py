"""What others see of this machine, asked of the peers it would start from."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from swarmnet.doctor import facts
from swarmnet_protocols.clock import wall_clock
from swarmnet_protocols.errors import SwarmnetError

if TYPE_CHECKING:
    from swarmnet.entering import Entry
    from swarmnet_protocols.transport import Transport

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
    from swarmnet_protocols.identity import Identity
    from swarmnet_protocols.membership.door import Door
    from swarmnet_protocols.membership.guard import GuardedTransport
    from swarmnet_protocols.membership.membership import Membership
    from swarmnet_protocols.timing import Timing
    from swarmnet_protocols.transport.p2pd import P2pdConfig, P2pdTransport

    peer = Identity.load_or_create(entry.identity_path).peer_id
    membership = Membership(entry.file.rules(), peer, wall_clock, folder=entry.folder)
    # What is asked to dial our ports says hello to whoever is there: for that, a client may run beside us.
    config = P2pdConfig(
        entry.identity_path, listen=tuple(listen), named=tuple(entry.bootstrap), only_dials=True
    )
    async with (
        P2pdTransport.create(config) as raw,
        Door.run(raw, membership, Timing()) as door,
    ):
        yield GuardedTransport(raw, door)


def _import_transport() -> None:
    from swarmnet_protocols.membership import door  # noqa: F401
    from swarmnet_protocols.transport.p2pd_daemon import prepare_hivemind

    prepare_hivemind()
    import hivemind.p2p  # noqa: F401


async def _ask(transport: "Transport", address: str, ports: Sequence[int]) -> facts.Peer:
    from swarmnet_protocols.probes import probe
    from swarmnet_protocols.protocol_ids import PROBE
    from swarmnet_protocols.transport.p2pd import peer_of

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
