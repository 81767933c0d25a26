"""The claims of other hosts to blocks that count, by which a node chooses its blocks and moves to
others."""

import random
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median

from swarmnet_node.host_checks import Asked, HostChecker, MakeTrial
from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.host_announcements import HostSample
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.routing.chain_search import HostInfo
from swarmnet_protocols.routing.sightings import ModelClaims, sharing
from swarmnet_protocols.routing.throughput import Claim
from swarmnet_protocols.wire import records_pb2 as pb

HOSTS_READ = 512
"""Announcements of other hosts that a node reads to choose its blocks, about."""
_NOT_SERVING = (pb.HOST_STATE_LEAVING, pb.HOST_STATE_PAUSED)


class ClaimReader:
    """Reads the claims of all hosts of a model with ``blocks`` blocks but ``me``, or of a random
    sample of them in a large swarm.

    Claims of hosts that do not answer ``checker`` do not count.
    """

    def __init__(
        self,
        directory: Directory,
        manifest: bytes,
        rng: random.Random,
        checker: HostChecker,
        *,
        me: PeerId,
        blocks: int,
    ) -> None:
        self._hosts = HostSample(directory, manifest, rng, wanted=HOSTS_READ)
        self._directory = directory
        self._manifest = manifest
        self._checker = checker
        self._me = me
        self._blocks = blocks
        self._infos: dict[PeerId, HostInfo] = {}
        """The hosts that the last reading found."""

    async def read(
        self, *, moved: bool = False, blocks: tuple[int, int] | None = None
    ) -> tuple[list[Claim], float]:
        """The blocks that others serve or intend to, and the blocks per second to expect of a host
        that is not measured yet.

        ``moved``: hosts that are about to move count where they will be. ``blocks``: with every
        host of these blocks [start, end), also in a large swarm. Raises ``SwarmnetError`` if the
        directory does not answer.
        """
        others = [
            (each.info, each.body)
            for each in await self._hosts.refresh(blocks=blocks)
            if each.info.peer != self._me and each.body.state not in _NOT_SERVING and not each.is_incompatible
        ]
        self._infos = {info.peer: info for info, _ in others}
        claims = []
        for info, body in others:
            claim = Claim(
                info.peer,
                info.start,
                info.end,
                1 / info.block_s if info.step_s > 0 else 0.0,
                body.state != pb.HOST_STATE_CHOOSING,
                may_move=not body.stays,
                may_switch=body.may_switch,
                load=load_of(body),
            )
            if body.next_start < body.next_end <= self._blocks:
                after = replace(claim, start=body.next_start, end=body.next_end, settled=moved)
                claims += [after] if moved else [claim, after]
            else:
                claims.append(claim)
        model = ModelClaims(self._manifest, self._blocks, claims)
        claims = await self._checker.counted(self._infos, model)
        # Nodes that join at the same time and see the same hosts compute the same value.
        measured = {claim.peer: claim.blocks_per_s for claim in claims if claim.blocks_per_s}
        usual = median(measured.values() or [1.0])
        claims = [replace(claim, blocks_per_s=claim.blocks_per_s or usual) for claim in claims]
        return sharing(claims), usual

    async def computing(
        self, claims: Sequence[Claim], make: MakeTrial, *, blocks: Collection[int], least: int
    ) -> list[Claim]:
        """Return settled ``claims`` of the last reading whose hosts compute what this node
        computes.

        Hosts are asked until each of ``blocks`` has ``least`` hosts in different places.
        """
        asked = Asked(self._directory.swarm, self._manifest, frozenset(blocks), least)
        hosts = {claim: self._infos[claim.peer] for claim in claims if claim.peer in self._infos}
        return await self._checker.computing(hosts, asked, make)


def load_of(record: pb.HostRecord) -> float:
    """The load of a host, as it announces it; 0 if that is out of range. At most n / (n + 1) with n
    open sessions: one client that waits for each of its tokens keeps a host busy, and another host
    would not make it faster."""
    return min(record.load, record.sessions / (record.sessions + 1)) if 0 <= record.load <= 1 else 0.0
