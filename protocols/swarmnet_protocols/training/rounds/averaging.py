"""Averages a vector among the members of a roster: the entry point of a round, and its server side.

1. ``Averager.average`` runs one exchange and returns its ``Outcome``.
2. Streams of other members arrive in ``Averager._accept``, and go to the exchange that they name.

All members that commit have the same bits. A member that does not commit knows whether the others
may have committed.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Self

import torch

from swarmnet_protocols.errors import ConfigError, ProtocolViolation
from swarmnet_protocols.machine.aio import all_of, race
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.protocol_ids import EXCHANGE
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.training.codecs import Codec
from swarmnet_protocols.training.rounds.messages import HASH_BYTES
from swarmnet_protocols.training.rounds.round_runner import Outcome, RoundContext, RoundRunner
from swarmnet_protocols.training.rounds.terms import RoundMember, RoundTerms
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import training_pb2 as pb

ROUNDS_KEPT = 2
"""Exchanges that are served: the present one and the last one.

A delayed member can still fetch the outcome of the last one.
"""


class Averager:
    """The exchanges of one job at one worker, one after another. At most one per transport.

    While its context is open, streams of other members are served. That includes streams for an
    exchange that has not begun here, and for the last exchanges after their end.
    """

    def __init__(self, context: RoundContext) -> None:
        if len(context.job) != HASH_BYTES:
            raise ConfigError(f"a job id has {HASH_BYTES} bytes, not {len(context.job)}")
        self._context = context
        self._runners: dict[int, RoundRunner] = {}
        """The exchanges under way, by exchange number."""
        self._latest = -1
        self._begun = asyncio.Condition()
        self._open = False

    async def __aenter__(self) -> Self:
        self._open = True
        await EXCHANGE.serve(self._context.transport, self._accept, self._context.timing.streams)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._open = False
        await all_of(*(runner.close() for runner in self._runners.values()))
        async with self._begun:
            self._begun.notify_all()

    async def average(  # noqa: PLR0913 - what, with whom, and how
        self,
        exchange_number: int,
        members: Sequence[RoundMember],
        values: torch.Tensor,
        *,
        weight: float,
        codec: Codec,
        state: bytes = b"",
        spread_s: float = 0.0,
    ) -> Outcome:
        """Average ``values``, float32 [n] on the CPU, with the other ``members``.

        All members must use the same roster, n and codec.

        - ``exchange_number`` must be higher than in the call before.
        - ``weight`` 0: this worker receives without contributing.
        - ``state``: the id of the state that all members start from. Members with other states
          refuse each other. Empty if states may differ.
        - ``spread_s``: seconds to spread transfers over, as far as the deadlines allow; 0 for as
          fast as possible.

        Returns within ``deadline_s`` and a heartbeat period, plus the time to encode and decode.
        Raises ``ConfigError`` for invalid arguments.
        """
        if not self._open or exchange_number <= self._latest:
            raise ConfigError(f"exchange {exchange_number} cannot begin after exchange {self._latest}")
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"a weight of {weight:g}")
        if not (math.isfinite(spread_s) and spread_s >= 0):
            raise ConfigError(f"an exchange cannot be spread over {spread_s:g} s")
        if values.dtype != torch.float32 or values.dim() != 1:
            raise ConfigError("only a flat float32 vector can be averaged")
        context = self._context
        terms = RoundTerms.of(
            context.job, exchange_number, members, values.numel(), codec, context.rules, state=state
        )
        runner = RoundRunner(terms, context, spread_s)
        self._latest = exchange_number
        for old in [each for each in self._runners if self._is_over(each, terms)]:
            await self._runners.pop(old).close()
        await runner.prepare(values, weight)
        del values  # freed here: the exchange keeps only the encoded form
        self._runners[exchange_number] = runner
        async with self._begun:
            self._begun.notify_all()
        return await runner.run()

    def _is_over(self, old: int, terms: RoundTerms) -> bool:
        """Return whether an old exchange is over.

        It is if all its members are in the new one, or ``ROUNDS_KEPT`` newer ones exist.
        """
        here = {member.peer for member in terms.members}
        return old <= terms.exchange_number - ROUNDS_KEPT or self._runners[old].peers <= here

    async def _accept(self, stream: "TypedStream[pb.ExchangeReply, pb.ExchangeRequest]") -> None:
        first, _ = await stream.receive()
        stream.silence_s = math.inf  # a member has nothing to send while it computes
        heartbeat = pb.ExchangeReply(heartbeat=pb.Heartbeat())
        period_s = self._context.timing.streams.heartbeat_s
        await race(self._serve(stream, first.hello), stream.send_heartbeats(period_s, lambda: heartbeat))

    async def _serve(
        self, typed: "TypedStream[pb.ExchangeReply, pb.ExchangeRequest]", hello: pb.Hello
    ) -> None:
        scope = typed.stream.scope
        try:
            with scope.reserve(Resource.PENDING_ROUNDS):
                runner = await self._runner_of(hello.exchange_number)
            with scope.reserve(Resource.ROUNDS):
                await runner.serve(typed, hello.agreement)
        except ProtocolViolation as error:
            typed.refuse(Refusal(refusal_pb2.REASON_PROTOCOL, str(error)))
            raise

    async def _runner_of(self, exchange_number: int) -> RoundRunner:
        """Wait until the exchange with this number has begun here.

        Raises ``ProtocolViolation`` if it is over or was skipped.
        """
        async with self._begun:
            await self._begun.wait_for(
                lambda: exchange_number in self._runners or exchange_number < self._latest or not self._open
            )
        runner = self._runners.get(exchange_number)
        if runner is None or not self._open:
            raise ProtocolViolation(f"exchange {exchange_number} is over here, or was skipped")
        return runner
