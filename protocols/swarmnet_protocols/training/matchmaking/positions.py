"""Asks the workers of a job at which position they are.

Each answer has the coordinate of the worker in the network. The asker computes its own from these.
"""

import contextlib
import random
from collections.abc import Sequence

from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import all_of, loop_time
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.protocol_ids import MATCHMAKING
from swarmnet_protocols.routing.coordinates import OwnCoordinate, read_coordinate
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.wire import workers_pb2 as pb

FEW = 8
"""Workers that a worker asks when it need not ask all. With fewer, its coordinate takes more rounds
to settle. With more, it opens more streams."""


class OutOfSync(SwarmnetError):
    """``peer`` is at another position than this worker."""

    def __init__(self, peer: PeerId, position: WorkerPosition) -> None:
        super().__init__(f"{peer} is at round {position.round} with state {position.state.hex()[:16]}")
        self.peer = peer
        self.position = position


class PositionAsker:
    """Asks the workers of ``job``. The asker need not be a worker."""

    def __init__(self, transport: Transport, job: bytes, timing: Timing) -> None:
        self._transport = transport
        self._job = job
        self._timing = timing
        self._rng = random.Random(transport.peer_id)
        self.own = OwnCoordinate(self._rng)

    async def ask(
        self, members: Sequence[RoundMember], leading: WorkerPosition | None = None
    ) -> dict[PeerId, pb.Position]:
        """Return the answers of the ``members`` that answer.

        ``leading``: the position at which this worker leads a group. None: it tells nothing.
        """
        request = pb.MatchmakingRequest(job=self._job)
        if leading is not None:
            request.round, request.state = leading.round, leading.state
        answers = zip(members, await all_of(*(self._ask(each, request) for each in members)), strict=True)
        return {member.peer: answer for member, answer in answers if answer is not None}

    async def ask_few(self, members: Sequence[RoundMember]) -> dict[PeerId, pb.Position]:
        """Ask ``FEW`` of ``members``, drawn at random."""
        return await self.ask(self._rng.sample(members, min(FEW, len(members))))

    async def _ask(self, member: RoundMember, request: pb.MatchmakingRequest) -> pb.Position | None:
        with contextlib.suppress(SwarmnetError):
            stream = await MATCHMAKING.open(
                self._transport, member.peer, self._timing, addresses=member.addresses
            )
            stream.silence_s = self._timing.silence_s
            sent_s = loop_time()
            reply, _ = await stream.ask(request)
            if (place := read_coordinate(reply.position.coordinate)) is not None:
                self.own.measured(member.peer, place, (loop_time() - sent_s) / 2)
            return reply.position
        return None


def position_from_wire(position: pb.Position) -> WorkerPosition:
    return WorkerPosition(position.round, position.state)


async def ask_positions(
    transport: Transport, job: bytes, members: Sequence[RoundMember], timing: Timing
) -> dict[PeerId, WorkerPosition]:
    """Return the positions of the workers of ``job`` that answer. The asker need not be a
    worker."""
    found = await PositionAsker(transport, job, timing).ask(members)
    return {peer: position_from_wire(each) for peer, each in found.items()}
