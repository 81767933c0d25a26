"""Averages with one partner at a time: no roster, no leader, no wait for a third worker (gossip).

A worker finds its partner of a round by the round's number and the method's shared randomness
(``Method.partners``). The life of a round:

1. A worker that has ended its inner steps offers its contribution (``StateServer.contribute``).
2. It asks its partner for the contribution to the same round. A partner that will soon have it lets
   the worker wait. Any other partner answers with its previous one at once.
3. The worker downloads the contribution by hash, and averages both. If its partner fails, the
   worker averages alone.

Both partners do this independently. So two workers that know of different others still average,
and a worker that fails delays its partner only.
"""

import asyncio
import math
import struct
from collections.abc import Callable
from typing import TypeVar

import torch

from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.catch_up import WorkerPosition
from swarmnet_protocols.training.codecs import Codec
from swarmnet_protocols.training.codecs.values import Values
from swarmnet_protocols.training.matchmaking.positions import OutOfSync
from swarmnet_protocols.training.pacing import Wait
from swarmnet_protocols.training.rounds.round_runner import Outcome, RoundContext
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.training.state_transfer import PackedState, StateServer, ask_offer, fetch_state

T = TypeVar("T")
MOST_APART = 1
"""Rounds by which partners may differ. With more, averages contain older contributions. With 0, a
worker waits for a partner that is a little slower."""
_WEIGHT = struct.Struct(">d")


class Pairs:
    """The averages of one worker with its partners, one after another."""

    def __init__(self, context: RoundContext, states: StateServer, codec: Codec) -> None:
        self._context = context
        self._states = states
        self._codec = codec
        self._sent_bytes = 0

    async def average(
        self, round: int, partner: RoundMember | None, values: Values, weight: float
    ) -> Outcome:
        """Average ``values``, float32 [n] on the CPU, with the contribution of ``partner``.

        ``weight``: the tokens behind ``values``. If ``partner`` is None or fails, the average
        contains ``values`` only. Raises ``OutOfSync`` if the partner is ahead by more than
        ``MOST_APART`` rounds.
        """
        me, count = self._context.transport.peer_id, len(values)
        start_s = loop_time()
        encoded = await self._compute(lambda: self._codec.encode(values[:]))
        packed = await self._compute(lambda: PackedState.of([_WEIGHT.pack(weight), encoded]))
        await self._states.contribute(round, packed)
        found = {me: (weight, await self._compute(lambda: self._codec.decode(encoded, count)))}
        reason, received, waited = "", 0, None
        if partner is not None:
            asked_s = loop_time()
            why = "network"
            try:
                async with asyncio.timeout(self._context.timing.deadline_s):
                    id = await self._ask(round, partner)
                    offered_s = loop_time()
                    data = await self._fetch(partner, id, _WEIGHT.size + self._codec.max_bytes(count))
                    why = "compute" if offered_s - asked_s > loop_time() - offered_s else "network"
                received = len(data)
                found[partner.peer] = await self._compute(lambda: self._read(data, count))
            except OutOfSync:
                raise
            except (SwarmnetError, TimeoutError) as error:
                reason = f"averaged without {partner.peer}: {error or 'it is too slow'}"
            waited = Wait(partner.peer, why, loop_time() - asked_s)
        average, excluded = await self._compute(lambda: self._combine(found))
        sent, self._sent_bytes = (
            self._states.contributed_bytes - self._sent_bytes,
            self._states.contributed_bytes,
        )
        contributors = tuple(peer for peer in sorted(found) if peer not in dict(excluded))
        return Outcome(
            committed=True,
            behind=False,
            average=average,
            slices=((0, count),),
            contributors=(contributors,),
            excluded=excluded,
            refuted=(),
            reason=reason,
            bytes_sent=sent,
            bytes_received=received,
            wait_s=loop_time() - start_s,
            arrivals=(),
            waited=waited,
            tokens=sum(found[peer][0] for peer in contributors),
        )

    async def _ask(self, round: int, partner: RoundMember) -> bytes:
        """Return the id of the contribution of ``partner`` to this round or one next to it."""
        context, streams = self._context, self._context.timing.streams
        offered, id = await ask_offer(context.transport, context.job, partner, round, streams)
        if offered > round + MOST_APART:
            raise OutOfSync(partner.peer, WorkerPosition(offered, b""))
        if offered < round - MOST_APART:
            raise ProtocolViolation(f"its last contribution is to round {offered}")
        return id

    async def _fetch(self, partner: RoundMember, id: bytes, max_bytes: int) -> bytearray:
        context, streams = self._context, self._context.timing.streams
        data, _ = await fetch_state(
            context.transport, context.job, id, [partner], streams, max_bytes=max_bytes
        )
        return data

    def _read(self, data: bytearray, count: int) -> tuple[float, torch.Tensor]:
        if len(data) <= _WEIGHT.size:
            raise ProtocolViolation("a contribution without values")
        (weight,) = _WEIGHT.unpack_from(data)
        _check_weight(weight, self._context.rules.max_weight)
        return weight, self._codec.decode(memoryview(data)[_WEIGHT.size :], count)

    def _combine(
        self, found: dict[PeerId, tuple[float, torch.Tensor]]
    ) -> tuple[torch.Tensor, tuple[tuple[PeerId, str], ...]]:
        """Return the average of (weight, values) by peer, and the peers left out with a reason."""
        peers, rules = sorted(found), self._context.rules
        weights = torch.tensor([found[peer][0] for peer in peers], dtype=torch.float64)
        rows = torch.stack([found[peer][1] for peer in peers])
        reasons = rules.screen(list(rows), weights)
        kept = [index for index, reason in enumerate(reasons) if not reason]
        excluded = tuple((peer, reason) for peer, reason in zip(peers, reasons, strict=True) if reason)
        return rules.aggregate(rows[kept], weights[kept]), excluded

    async def _compute(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._context.executor, function)


def _check_weight(weight: float, most: float) -> None:
    if not (math.isfinite(weight) and 0 < weight <= most):
        raise ProtocolViolation(f"a contribution of weight {weight:g}")
