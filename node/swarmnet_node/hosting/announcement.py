"""The announcement of a host: the signed record that says which blocks it serves, in which state, where and how fast.

A node publishes it in each state:

1. ``choosing``: the blocks that it intends to take, so that other joining nodes take others.
2. ``joining``: the blocks that it loads.
3. ``online``: clients may open sessions. Published again every ``Timing.announce_s``, because records expire.
4. ``leaving`` and ``paused``: clients must not choose this host.

Clients and joining nodes read announcements with ``directory/host_announcements.py``, which bounds what they may claim.
"""

from collections.abc import Sequence

from swarmnet_node.engine.engine import Engine
from swarmnet_node.owner.control import NodeStatus
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.host_announcements import PROTOCOL, hosts_topic, listed
from swarmnet_protocols.wire import records_pb2 as pb


async def announce(
    directory: Directory,
    status: NodeStatus,
    engine: Engine | None,
    *,
    step_s: float,
    public_name: str,
    lifetime_s: float,
) -> None:
    """Publish the announcement of a host. Raises what ``Directory.publish`` raises.

    ``engine``: None before the blocks are loaded. ``step_s``: seconds for one token through all blocks; 0 if not measured.
    """
    record = pb.HostRecord(
        manifest=status.manifest,
        start=status.start,
        end=status.end,
        state=f"HOST_STATE_{status.state.upper()}",
        version=status.version,
        protocol=PROTOCOL,
        step_s=step_s,
        token_s=engine.token_s if engine else 0.0,
        cache_bytes_free=max(0, engine.max_cache_bytes - engine.cache_bytes) if engine else 0,
        sessions=status.sessions,
        addresses=_public_first(status.addresses),
        public_name=public_name,
    )
    await directory.publish(hosts_topic(status.manifest), record.SerializeToString(), lifetime_s=lifetime_s)


def _public_first(addresses: Sequence[str]) -> list[str]:
    """As many addresses as readers accept, those of the loopback interface last."""
    return listed(sorted(addresses, key=lambda address: "/127." in address or "/::1/" in address))
