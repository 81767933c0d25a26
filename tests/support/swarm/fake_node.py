"""A node that does nothing, for tests of the code around a node."""

import math
from collections.abc import Callable

from swarmnet_node.owner.limits import OwnerLimits
from swarmnet_protocols.directory.node_reports import describe_experts
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.net.limits.resources import ResourceManager
from swarmnet_protocols.wire import control_pb2
from swarmnet_protocols.wire.control_pb2 import NodeStatus
from swarmnet_protocols.wire.records_pb2 import HostRecord
from swarmnet_protocols.wire.report_pb2 import HostReport, Reach, TrunkReport

NO_CORES = 4096
"""A limit on threads that this node refuses."""
ADDRESS = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooW"
STATUS = NodeStatus(
    peer_id="12D3KooW",
    command="join",
    state="online",
    model="smollm2-135m-instruct",
    host=HostReport(
        record=HostRecord(manifest=b"\x01" * 32, start=10, end=20, sessions=2),
        total_blocks=30,
        cache_bytes=1 << 33,
        cache_bytes_limit=1 << 34,
        positions=1 << 40,
        forwards=7,
    ),
    addresses=(ADDRESS, "/ip4/10.0.0.1/tcp/1/p2p/12D3KooW"),
    uptime_s=12.5,
    weight_bytes=70_000_000,
    version="0.1.0",
    swarm="lab",
    blocks_reason="no other host has these blocks",
    limits=control_pb2.Limits(json=OwnerLimits().to_json()),
    usage=control_pb2.Usage(),
    reach=Reach(kind="unknown"),
)
TRUNK_STATUS = NodeStatus.FromString(STATUS.SerializeToString())
TRUNK_STATUS.host.experts.extend(describe_experts({10: {0, 1, 2, 3}}, {(10, 0): 1 << 40}))
TRUNK_STATUS.host.expert_streams = 2
TRUNK_STATUS.host.trunk.CopyFrom(
    TrunkReport(
        lacks=describe_experts({10: {4, 5, 6, 7}, 11: set(range(8))}),
        missing=describe_experts({11: {7}}),
        round_trips_s=(0.0005, 0.002),
        far=1,
        rows=1 << 40,
        failed=3,
        hedged=4,
        loaded=5,
    )
)


class FakeNode:
    """Records in ``graces_s`` the grace period of each ``finish``, and in ``asked`` the calls of
    pause and resume."""

    def __init__(self) -> None:
        self.graces_s: list[float] = []
        self.asked: list[str] = []
        self.kept = OwnerLimits()
        self.shown = STATUS

    @property
    def resources(self) -> ResourceManager:
        return ResourceManager()

    def status(self) -> NodeStatus:
        return self.shown

    async def started(self) -> bool:
        return True

    @property
    def engine(self) -> None:
        return None

    @property
    def host(self) -> None:
        return None

    def finish(self, grace_s: float) -> None:
        self.graces_s.append(grace_s)

    def pause(self, for_s: float = math.inf) -> None:
        self.asked.append("pause" if for_s == math.inf else f"pause {for_s:g} s")

    def resume(self) -> None:
        self.asked.append("resume")

    resting = None

    def restart_for_pauses(self, frees_memory: Callable[[], bool]) -> None:
        """Never restarts: nothing pauses it."""

    def limits(self) -> OwnerLimits:
        return self.kept

    def set_limits(self, limits: OwnerLimits) -> None:
        if limits.cores == NO_CORES:
            raise ConfigError("there are not so many", hint="use fewer")
        self.kept = limits

    def on_change(self, listener: Callable[[NodeStatus], None]) -> None:
        """Never calls back: nothing changes."""

    def on_move(self, listener: Callable[[NodeStatus], None]) -> None:
        """Never calls back: the node does not move."""

    def on_switch(self, listener: Callable[[NodeStatus], None]) -> None:
        """Never calls back: the node does not switch."""
