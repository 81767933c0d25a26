"""Averages a vector among the members of a roster: the entry point of a round, and its server side.

1. ``Averager.average`` runs one exchange and returns its ``Outcome``.
2. Streams of other members arrive in ``Averager._accept``, and go to the exchange that they name.

All members that commit have the same bits. A member that does not commit knows whether the others
may have committed.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from typing import Self

import torch

from swarmnet_protocols.errors import ConfigError, ProtocolViolation, SwarmnetError
from swarmnet_protocols.machine.aio import News, all_of, cancel, loop_time, race
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.protocol_ids import EXCHANGE
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.net.typed_stream import TypedStream
from swarmnet_protocols.training.codecs import Codec
from swarmnet_protocols.training.codecs.values import Values
from swarmnet_protocols.training.rounds.deadlines import RoundTiming
from swarmnet_protocols.training.rounds.messages import HASH_BYTES
from swarmnet_protocols.training.rounds.reduction import GroupMean, Result, read_result, read_summary
from swarmnet_protocols.training.rounds.round_runner import Outcome, RoundContext, RoundRunner
from swarmnet_protocols.training.rounds.terms import RoundMember, RoundTerms
from swarmnet_protocols.training.rounds.transfers import Assembly, Outgoing
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import training_pb2 as pb

_Key = tuple[int, int]
"""An exchange: its number, and its ``slice_number`` (``RoundTerms``)."""

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
        self._runners: dict[_Key, RoundRunner] = {}
        """The exchanges under way."""
        self._between: set[asyncio.Task[Outcome]] = set()
        """The exchanges between groups. They go on when the group's own exchange has ended, because
        other groups may need this member's vote."""
        self._latest = -1
        self._begun = News()
        self._open = False

    async def __aenter__(self) -> Self:
        self._open = True
        await EXCHANGE.serve(self._context.transport, self._accept, self._context.timing.streams)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._open = False
        await cancel(*self._between)
        await all_of(*(runner.close() for runner in self._runners.values()))
        await self._begun.tell()

    async def average(  # noqa: PLR0913 - what, with whom, and how
        self,
        exchange_number: int,
        members: Sequence[RoundMember],
        values: Values,
        *,
        weight: float,
        codec: Codec,
        state: bytes = b"",
        spread_s: float = 0.0,
        groups: Sequence[Sequence[RoundMember]] = (),
    ) -> Outcome:
        """Average ``values``, float32 [n] on the CPU, with the other ``members``.

        They may not change during the exchange. All members must use the same roster, n and codec.

        - ``exchange_number`` must be higher than in the call before.
        - ``weight`` 0: this worker receives without contributing.
        - ``state``: the id of the state that all members start from. Members with other states
          refuse each other. Empty if states may differ.
        - ``spread_s``: seconds to spread transfers over, as far as the deadlines allow; 0 for as
          fast as possible.
        - ``groups``: the groups of the round if there are several; ``members`` is one of them.

        Returns within ``deadline_s`` and a heartbeat period, plus the time to encode and decode.
        Raises ``ConfigError`` for invalid arguments.
        """
        if not self._open or exchange_number <= self._latest:
            raise ConfigError(f"exchange {exchange_number} cannot begin after exchange {self._latest}")
        if not (math.isfinite(weight) and weight >= 0):
            raise ConfigError(f"a weight of {weight:g}")
        if not (math.isfinite(spread_s) and spread_s >= 0):
            raise ConfigError(f"an exchange cannot be spread over {spread_s:g} s")
        if isinstance(values, torch.Tensor) and (values.dtype != torch.float32 or values.dim() != 1):
            raise ConfigError("only a flat float32 vector can be averaged")
        context = self._context
        terms = RoundTerms.of(
            context.job,
            exchange_number,
            members,
            len(values),
            codec,
            context.rules,
            state=state,
            groups=groups,
        )
        between = None
        if groups:
            context = replace(context, timing=context.timing.within_groups())
            between = partial(self._average_between, terms, loop_time())
        runner = RoundRunner(terms, context, spread_s, between)
        self._latest = exchange_number
        for old in [each for each in self._runners if self._is_over(each, terms)]:
            await self._runners.pop(old).close()
        await runner.prepare(values, weight)
        del values  # freed here: the exchange keeps only the encoded form
        return await self._run(runner, terms)

    async def _run(self, runner: RoundRunner, terms: RoundTerms) -> Outcome:
        self._runners[terms.exchange_number, terms.slice_number] = runner
        await self._begun.tell()
        return await runner.run()

    def _is_over(self, old: _Key, terms: RoundTerms) -> bool:
        """Return whether an old exchange is over.

        It is if all its members are in the new one, or ``ROUNDS_KEPT`` newer ones exist.
        """
        here = {member.peer for group in terms.everybody for member in group}
        return old[0] <= terms.exchange_number - ROUNDS_KEPT or self._runners[old].peers <= here

    # ---- between groups -------------------------------------------------------------------------

    async def _average_between(
        self, terms: RoundTerms, began_s: float, index: int, mean: GroupMean
    ) -> tuple[torch.Tensor, Mapping[PeerId, int]] | None:
        """Average slice ``index`` with the other groups. ``mean`` is this group's.

        A member that the group did not send, or that lost the others, fetches the result. None if
        there is none.
        """
        across = terms.between(index)
        elapsed_s = loop_time() - began_s
        timing = self._context.timing.between_groups(elapsed_s)
        if timing is not None and across.find(self._context.transport.peer_id) is not None:
            task = asyncio.create_task(self._exchange_between(across, timing, mean))
            self._between.add(task)
            task.add_done_callback(self._between.discard)
            outcome = await asyncio.shield(task)
            if outcome.average is not None:
                return outcome.average, outcome.inside
            if not outcome.behind:
                return None
        own = {member.peer for member in terms.members}
        start = index % len(across.members)
        for member in (*across.members[start:], *across.members[:start]):
            if member.peer not in own:
                with suppress(SwarmnetError):
                    return await self._fetch(across, member)
        return None

    async def _exchange_between(self, terms: RoundTerms, timing: RoundTiming, mean: GroupMean) -> Outcome:
        runner = RoundRunner(terms, replace(self._context, timing=timing), 0.0)
        if mean.values is not None:
            await runner.prepare(mean.values, mean.weight, mean.inside)
        return await self._run(runner, terms)

    async def _fetch(
        self, terms: RoundTerms, member: RoundMember
    ) -> tuple[torch.Tensor, Mapping[PeerId, int]]:
        """Fetch the result of an exchange from ``member``, when it has ended there.

        Raises ``SwarmnetError`` if the member has none.
        """
        context = self._context
        stream = await EXCHANGE.open(
            context.transport, member.peer, context.timing.streams, addresses=member.addresses
        )
        with closing(stream):
            await stream.send(pb.ExchangeRequest(hello=terms.hello()))
            assembly = Assembly()
            limit, whole = terms.result_bytes(terms.count, 1), None
            while whole is None:
                reply, part = await stream.receive()
                whole = assembly.add(0, reply.result, part, limit, loop_time())
        result = Result(whole.hash, whole.summary, whole.data)
        values = read_result(terms, 0, result, -1, None)
        named = read_summary(terms, 0, result.summary).contributors
        return values, {terms.members[each.member].peer: each.inside for each in named}

    # ---- streams of other members ---------------------------------------------------------------

    async def _accept(self, stream: "TypedStream[pb.ExchangeReply, pb.ExchangeRequest]") -> None:
        first, _ = await stream.receive()
        stream.silence_s = math.inf  # a member has nothing to send while it computes
        heartbeat = pb.ExchangeReply(heartbeat=pb.Heartbeat())
        period_s = self._context.timing.streams.heartbeat_s
        final = await race(
            self._serve(stream, first.hello), stream.send_heartbeats(period_s, lambda: heartbeat)
        )
        for message, payload in final:
            await stream.send(pb.ExchangeReply(result=message.result), payload)

    async def _serve(
        self, typed: "TypedStream[pb.ExchangeReply, pb.ExchangeRequest]", hello: pb.Hello
    ) -> list[Outgoing]:
        """Serve a member until its stream ends. Returns the results for a peer that is no member
        of an exchange between groups."""
        scope = typed.stream.scope
        try:
            with scope.reserve(Resource.PENDING_ROUNDS):
                runner = await self._runner_of((hello.exchange_number, hello.between))
            with scope.reserve(Resource.ROUNDS):
                if hello.between and typed.peer not in runner.peers:
                    return await runner.final(hello.agreement)
                return await runner.serve(typed, hello.agreement)
        except ProtocolViolation as error:
            typed.refuse(Refusal(refusal_pb2.REASON_PROTOCOL, str(error)))
            raise

    async def _runner_of(self, key: _Key) -> RoundRunner:
        """Wait until the exchange with this number has begun here.

        Raises ``ProtocolViolation`` if it is over or was skipped.
        """
        await self._begun.until(lambda: key in self._runners or key[0] < self._latest or not self._open)
        runner = self._runners.get(key)
        if runner is None or not self._open:
            raise ProtocolViolation(f"exchange {key[0]} is over here, or was skipped")
        return runner
