"""In-flight steps: the steps of a chain that were sent and not answered. No I/O.

They are appended to the activation log. The client's link sends them from there, and replays them
after a failure.
"""

import asyncio
import math
from collections.abc import Callable, Set
from contextlib import nullcontext

from swarmnet_client.chain.trace import StepTimer
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.errors import ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import loop_time
from swarmnet_protocols.net import Buffer
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import Scope
from swarmnet_protocols.session.activation_log import ActivationLog
from swarmnet_protocols.session.arrays import are_finite
from swarmnet_protocols.session.link import Outbox
from swarmnet_protocols.session.steps import Row, Step
from swarmnet_protocols.session.wire_tensors import decode_tensor
from swarmnet_protocols.wire import session_pb2 as pb

GiveUpIdle = Callable[[], Set[int]]
"""Drops the sequences that no answer needs any more, and returns their numbers."""


class StepsInFlight:
    """Numbers the steps of one chain, logs them in ``outbox``, and returns the outputs of each.

    A step goes on waiting while it is replayed.
    """

    def __init__(
        self,
        log_bytes: int,
        hidden_size: int,
        give_up_idle: GiveUpIdle = frozenset,
        timer: StepTimer | None = None,
    ) -> None:
        """``log_bytes`` is the limit of the activation log. ``hidden_size`` is D, the length of an
        output. ``timer``: None if hops tell no times."""
        self.timer = timer
        room = Scope("this chain", {Resource.LOG: log_bytes}, {}).reserve(Resource.LOG, 0)
        self.outbox = Outbox(ActivationLog(room), asyncio.Event())
        self._give_up_idle = give_up_idle
        self._hidden_size = hidden_size
        self._waiting: dict[int, tuple[Step, asyncio.Future[Array]]] = {}
        self._received: set[int] = set()
        self._acked = 0
        self._failure: SwarmnetError | None = None
        self._rests_since = -math.inf
        """Loop time when the last step got its outputs or failed."""

    @property
    def is_empty(self) -> bool:
        """True if no step waits for its outputs."""
        return not self._waiting

    def rests(self, seconds: float) -> bool:
        """Return whether no step has waited for its outputs for this many seconds."""
        return self.is_empty and loop_time() >= self._rests_since + seconds

    @property
    def acked(self) -> int:
        """The number of the last step up to which all steps have been answered."""
        return self._acked

    def forget_idle(self) -> None:
        """Forget the sequences that no answer needs: a replay does not send them."""
        log = self.outbox.log
        log.retain(log.lengths.keys() - self._give_up_idle())

    async def send(self, rows: tuple[Row, ...], values: Array) -> Array:
        """Send one step and return the outputs that the rows want, [wanted, D].

        ``values`` of all rows are token ids [P] or embeddings [P, D]. Raises:

        - ``ProtocolViolation`` if ``check_rows`` of ``session.steps`` refuses the rows.
        - ``OutOfResources`` if the in-flight steps alone reach the limit of the log.
        - the error given to ``fail``.
        """
        if self._failure is not None:
            raise self._failure
        step = Step(seq=self.outbox.log.last + 1, rows=rows, values=values, acked=self._acked)
        with self.timer.step(step) if self.timer is not None else nullcontext():
            self.outbox.append(step)
            future: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
            self._waiting[step.seq] = (step, future)
            try:
                return await future
            finally:
                del self._waiting[step.seq]
                self._rests_since = loop_time()

    def complete(self, output: pb.Output, payload: Buffer) -> bool:
        """Give the outputs in ``payload`` to the step that ``output`` names.

        Returns False if that step does not wait: a replay may answer twice. Raises
        ``ProtocolViolation`` if the outputs have another shape than the step wants, or contain
        infinity or NaN.
        """
        if not self._acked < output.step <= self.outbox.log.last:
            return False
        waiting = self._waiting.get(output.step)
        is_awaited = waiting is not None and not waiting[1].done()
        if waiting is not None and is_awaited:
            step, future = waiting
            wanted = sum(row.wanted for row in step.rows)
            values = decode_tensor(output.tensor, payload, positions=wanted, hidden_size=self._hidden_size)
            if not are_finite(values):
                raise ProtocolViolation("an output that is not finite")
            future.set_result(values)
        self._received.add(output.step)
        while self._acked + 1 in self._received:
            self._acked += 1
            self._received.discard(self._acked)
        return is_awaited

    def fail(self, error: SwarmnetError) -> None:
        """Raise ``error`` from every waiting ``send`` and from all later ones."""
        self._failure = error
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
