"""Reads the claims of other hosts to blocks, for nodes that choose their blocks or move.

Only claims whose hosts answer count.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median

from swarmnet_node.host_checks import Asked, Compute, HostChecker, MakeTrial
from swarmnet_node.running_node import Dependencies
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.directory.host_announcements import HostSample
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.host_info import INCOMPATIBLE, HostInfo
from swarmnet_protocols.routing.sightings import ModelClaims, sharing
from swarmnet_protocols.routing.throughput import Claim

HOSTS_READ = 512
"""About how many announcements of other hosts a node reads to choose its blocks."""
_NOT_SERVING = ("leaving", "paused", INCOMPATIBLE)


class ClaimReader:
    """Reads the claims of all other hosts of a model with ``blocks`` blocks.

    In a large swarm it reads a random sample. This node is left out, and so are claims of hosts
    that do not answer ``checker``.
    """

    def __init__(
        self, dependencies: Dependencies, checker: HostChecker, manifest: bytes, blocks: int
    ) -> None:
        directory = dependencies.directory
        self._hosts = HostSample(directory, manifest, dependencies.rng, wanted=HOSTS_READ)
        self._swarm = directory.swarm
        self._manifest = manifest
        self._checker = checker
        self._me = dependencies.transport.peer_id
        self._blocks = blocks
        self._infos: dict[PeerId, HostInfo] = {}
        """The hosts that the last reading found."""

    async def read(
        self, *, moved: bool = False, blocks: tuple[int, int] | None = None
    ) -> tuple[list[Claim], float]:
        """Return the claims of other hosts, and the speed to expect of an unmeasured host.

        The speed is in blocks per second.

        - ``moved``: hosts that are about to move count where they will be.
        - ``blocks``: read every host of these blocks [start, end), even in a large swarm.

        Raises ``SwarmnetError`` if the directory does not answer.
        """
        self._infos = {
            host.peer: host
            for host in await self._hosts.refresh(blocks=blocks)
            if host.peer != self._me and host.state not in _NOT_SERVING
        }
        claims = [claim for host in self._infos.values() for claim in self._claims_of(host, moved=moved)]
        model = ModelClaims(self._manifest, self._blocks, claims)
        claims = await self._checker.counted(self._infos, model)
        # Nodes that join at the same time and see the same hosts compute the same value.
        measured = {claim.peer: claim.blocks_per_s for claim in claims if claim.blocks_per_s}
        usual = median(measured.values() or [1.0])
        claims = [replace(claim, blocks_per_s=claim.blocks_per_s or usual) for claim in claims]
        return sharing(claims), usual

    def _claims_of(self, host: HostInfo, *, moved: bool) -> list[Claim]:
        claim = Claim(
            host.peer,
            host.start,
            host.end,
            host.blocks_per_s,
            host.state != "choosing",
            may_move=not host.stays,
            may_switch=host.may_switch,
            load=host.load,
        )
        if host.next_span is None or host.next_span[1] > self._blocks:
            return [claim]
        start, end = host.next_span
        after = replace(claim, start=start, end=end, settled=moved)
        return [after] if moved else [claim, after]

    async def computing(
        self, claims: Sequence[Claim], make: MakeTrial, *, blocks: Collection[int], least: int
    ) -> list[Claim]:
        """Return settled ``claims`` of the last reading whose hosts compute the same as this node.

        Hosts are asked until each of ``blocks`` has ``least`` hosts in different places.
        """
        asked = Asked(self._swarm, self._manifest, frozenset(blocks), least)
        hosts = {claim: self._infos[claim.peer] for claim in claims if claim.peer in self._infos}
        return await self._checker.computing(hosts, asked, make)

    async def prove(self, claims: Sequence[Claim], block: int, inputs: Array, compute: Compute) -> None:
        """Ask the hosts of the last reading that claim ``block`` to compute it."""
        asked = Asked(self._swarm, self._manifest, frozenset({block}), 1)
        there = {claim.peer: claim for claim in claims if claim.start <= block < claim.end}
        hosts = {claim: self._infos[peer] for peer, claim in there.items() if peer in self._infos}
        await self._checker.prove(hosts, asked, inputs, compute)
