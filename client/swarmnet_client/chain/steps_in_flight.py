"""Steps that were sent and not answered, with the log from which they are sent and replayed. No I/O."""

import asyncio

import torch

from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.net.resources import Resource, Scope
from swarmnet_protocols.session.activation_log import ActivationLog
from swarmnet_protocols.session.link import Outbox
from swarmnet_protocols.session.steps import Row, Step, decode_tensor
from swarmnet_protocols.wire import session_pb2 as pb


class StepsInFlight:
    """Numbers steps, logs them in ``outbox``, and lets each wait for its outputs, however often it is replayed meanwhile."""

    def __init__(self, log_bytes: int, hidden_size: int) -> None:
        """The log takes at most ``log_bytes``; outputs are [P, ``hidden_size``]."""
        room = Scope("this chain", {Resource.LOG: log_bytes}, {}).reserve(Resource.LOG, 0)
        self.outbox = Outbox(ActivationLog(room), asyncio.Event())
        self._hidden_size = hidden_size
        self._waiting: dict[int, tuple[Step, asyncio.Future[torch.Tensor]]] = {}
        self._received: set[int] = set()
        self._acked = 0
        self._failure: SwarmnetError | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no step waits for its outputs."""
        return not self._waiting

    async def send(self, rows: tuple[Row, ...], values: torch.Tensor) -> torch.Tensor:
        """Send one step and wait for the outputs that its rows want, [wanted, D].

        Raises ``ProtocolViolation`` for rows against ``session.steps``, and the error given to ``fail``.
        """
        if self._failure is not None:
            raise self._failure
        step = Step(seq=self.outbox.log.last + 1, rows=rows, values=values, acked=self._acked)
        self.outbox.append(step)
        future: asyncio.Future[torch.Tensor] = asyncio.get_running_loop().create_future()
        self._waiting[step.seq] = (step, future)
        try:
            return await future
        finally:
            del self._waiting[step.seq]

    def complete(self, output: pb.Output, payload: Buffer) -> bool:
        """End the wait of the step that ``output`` answers. False if none waits: a replay may answer a step twice.

        Raises ``ProtocolViolation`` for outputs of another shape than the step wants, or that are not finite.
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
        """End every step with ``error``, those that wait and those to come."""
        self._failure = error
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
