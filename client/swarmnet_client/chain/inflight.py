"""Steps in flight: what was sent down a chain, what came of it, and what of that can be forgotten. No I/O."""

import asyncio

import torch

from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.net.resources import Resource, Scope
from swarmnet_protocols.session.activation_log import ActivationLog
from swarmnet_protocols.session.link import Outbox
from swarmnet_protocols.session.steps import Row, Step, decode_tensor
from swarmnet_protocols.wire import session_pb2 as pb


class Inflight:
    """Steps are numbered and logged in ``outbox``, and wait for their outputs, however often they are replayed meanwhile."""

    def __init__(self, log_bytes: int, hidden_size: int) -> None:
        """The log takes at most ``log_bytes``; outputs are [P, ``hidden_size``]."""
        room = Scope("this chain", {Resource.LOG: log_bytes}, {}).reserve(Resource.LOG, 0)
        self.outbox = Outbox(ActivationLog(room), asyncio.Event())
        self._hidden_size = hidden_size
        self._waiting: dict[int, tuple[Step, asyncio.Future[torch.Tensor]]] = {}
        self._received: set[int] = set()
        self._acked = 0
        self._broken: SwarmnetError | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for an output."""
        return not self._waiting

    async def send(self, rows: tuple[Row, ...], values: torch.Tensor) -> torch.Tensor:
        """One step; the outputs its rows want, [wanted, D]. Raises ``ProtocolViolation`` for rows against ``session.steps``, and
        what was said to ``fail``."""
        if self._broken is not None:
            raise self._broken
        step = Step(seq=self.outbox.log.last + 1, rows=rows, values=values, acked=self._acked)
        self.outbox.append(step)
        future: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self._waiting[step.seq] = (step, future)
        try:
            return await future
        finally:
            del self._waiting[step.seq]

    def take(self, output: pb.Output, payload: Buffer) -> bool:
        """Give a step's output to whoever waits for it, and say whether somebody did; what comes twice, after a replay, is dropped.

        Raises ``ProtocolViolation`` for what is no output of that step.
        """
        if not self._acked < output.step <= self.outbox.log.last:
            return False
        waiting = self._waiting.get(output.step)
        is_awaited = waiting is not None and not waiting[1].done()
        if waiting is not None and is_awaited:
            step, future = waiting
            wanted = sum(row.wanted for row in step.rows)
            values = decode_tensor(output.tensor, payload, positions=wanted, hidden_size=self._hidden_size)
            if not torch.isfinite(values).all():
                raise ProtocolViolation("an output that is not finite")
            future.set_result(values)
        self._received.add(output.step)
        while self._acked + 1 in self._received:
            self._acked += 1
            self._received.discard(self._acked)
        return is_awaited

    def fail(self, error: SwarmnetError) -> None:
        """Every step that waits, now and later, ends with this."""
        self._broken = error
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
