"""Averaging a vector among the members of a round, who all end with the same bits or know that they did not."""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, Self

import torch

from swarmnet_protocols.errors import ConfigError, ProtocolViolation
from swarmnet_protocols.machine.aio import cancel, race
from swarmnet_protocols.net import Message, Stream, Transport
from swarmnet_protocols.net.messages import parse, receive_within, send_within
from swarmnet_protocols.net.protocol_ids import EXCHANGE
from swarmnet_protocols.net.resources import Resource
from swarmnet_protocols.training.codecs import Codec
from swarmnet_protocols.training.rounds.events import RoundTiming
from swarmnet_protocols.training.rounds.messages import HASH_BYTES
from swarmnet_protocols.training.rounds.round_runner import Engagement, Outcome, RoundRunner
from swarmnet_protocols.training.rounds.terms import Member, Terms
from swarmnet_protocols.training.rounds.transfers import Rules
from swarmnet_protocols.wire import training_pb2 as pb

__all__ = ["Exchange", "Member", "Outcome", "RoundTiming", "Rules"]

ROUNDS_KEPT = 2
"""A member that was held up, and is not in this round, may still learn how the last one ended and fetch what it gave."""

_TIMING = RoundTiming()
_RULES = Rules()


class Exchange:
    """The rounds of one job at one worker. One at a time on a transport.

    While the context is open, others are answered: whether or not a round has begun here, and how the last ones ended.
    """

    def __init__(
        self,
        transport: Transport,
        job: bytes,
        *,
        timing: RoundTiming = _TIMING,
        rules: Rules = _RULES,
        executor: Executor | None = None,
        sign: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """``sign`` signs with the key of ``transport``'s peer id. Raises ``ConfigError`` for verifiable rounds without it."""
        if rules.verifiable and sign is None:
            raise ConfigError("verifiable rounds need a key to sign contributions with")
        if len(job) != HASH_BYTES:
            raise ConfigError(f"a job is named by {HASH_BYTES} bytes, not {len(job)}")
        self._transport = transport
        self._job = job
        self._timing = timing
        self._rules = rules
        self._executor = executor
        self._sign = sign or _cannot_sign
        self._rounds: dict[int, RoundRunner] = {}
        self._latest = -1
        self._begun = asyncio.Condition()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._open = False

    async def __aenter__(self) -> Self:
        self._open = True
        await self._transport.serve(EXCHANGE, self._accept)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._open = False
        for conversation in self._rounds.values():
            conversation.close()
        async with self._begun:
            self._begun.notify_all()
        await cancel(*self._tasks)

    async def average(
        self,
        round: int,
        members: Sequence[Member],
        values: torch.Tensor,
        *,
        weight: float,
        codec: Codec,
        spread_s: float = 0.0,
    ) -> Outcome:
        """Average ``values`` (float32 [n] on the CPU) with the other members, who must all be given the same roster and sizes.

        Ends within ``deadline_s`` and a beat, plus the time to encode and decode. Rounds are numbered upwards; ``weight`` 0 takes part
        without contributing. What is sent goes out evenly over ``spread_s``, or as much of it as the deadlines allow; 0: at
        once. Raises ``ConfigError`` for a roster, a round, a weight or a time that cannot be.
        """
        if not self._open or round <= self._latest:
            raise ConfigError(f"round {round} cannot begin: the last one was {self._latest}")
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"a weight of {weight:g}")
        if not (math.isfinite(spread_s) and spread_s >= 0):
            raise ConfigError(f"an exchange cannot be spread over {spread_s:g} s")
        verifiable = self._rules.verifiable
        terms = Terms.of(self._job, round, members, values.numel(), codec, verifiable=verifiable)
        if values.dtype != torch.float32 or values.dim() != 1:
            raise ConfigError("only a flat float32 vector can be averaged")
        engagement = Engagement(
            self._transport, self._timing, self._rules, self._executor, self._sign, self._own
        )
        conversation = RoundRunner(terms, engagement, spread_s)
        self._latest = round
        for old in [each for each in self._rounds if self._is_over(each, terms)]:
            self._rounds.pop(old).close()
        await conversation.prepare(values, weight)
        del values  # encoded: nobody needs it for as long as the exchange takes
        self._rounds[round] = conversation
        async with self._begun:
            self._begun.notify_all()
        return await conversation.run()

    def _is_over(self, old: int, now: Terms) -> bool:
        """Whether nobody needs an old round any more: who is in this one has done with it, or too much time has passed."""
        here = {member.peer for member in now.members}
        return old <= now.round - ROUNDS_KEPT or self._rounds[old].peers <= here

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    async def _accept(self, stream: Stream) -> None:
        message = await receive_within(stream, self._timing.silence_s)
        hello = parse(pb.ExchangeRequest, message.header).hello
        await race(self._serve(stream, hello), self._heartbeat(stream))

    async def _serve(self, stream: Stream, hello: pb.Hello) -> None:
        try:
            with stream.scope.reserve(Resource.PENDING_ROUNDS):
                conversation = await self._conversation(hello)
            with stream.scope.reserve(Resource.ROUNDS):
                await conversation.serve(stream, hello.agreement)
        except ProtocolViolation as error:
            refusal = pb.Refusal(detail=str(error)[:500])
            await stream.send(Message(pb.ExchangeReply(refusal=refusal).SerializeToString()))
            raise

    async def _conversation(self, hello: pb.Hello) -> RoundRunner:
        """The round that somebody means, when it has begun here."""
        async with self._begun:
            await self._begun.wait_for(
                lambda: hello.round in self._rounds or hello.round < self._latest or not self._open
            )
        conversation = self._rounds.get(hello.round)
        if conversation is None or not self._open:
            raise ProtocolViolation(f"round {hello.round} is over here, or is not to be")
        return conversation

    async def _heartbeat(self, stream: Stream) -> None:
        heartbeat = Message(pb.ExchangeReply(heartbeat=pb.Heartbeat()).SerializeToString())
        while True:
            await asyncio.sleep(self._timing.heartbeat_s)
            await send_within(stream, heartbeat, self._timing.silence_s)


def _cannot_sign(_: bytes) -> bytes:
    raise ConfigError("this exchange has no key to sign with")
