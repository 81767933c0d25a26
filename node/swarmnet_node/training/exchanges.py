"""The exchanges of one worker, one in each round: with whom it averages, and the average.

1. ``form_group`` returns the roster of a round (``matchmaking``).
2. ``start`` begins to average with its members, while the next inner steps run
   (``rounds.averaging``). Pairs average at once (``pairs``).
3. ``finish`` waits for the outcome.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import torch

from swarmnet_node.training.known_workers import KnownWorkers
from swarmnet_node.training.replica import Replica
from swarmnet_node.training.steps.trainer import StepReport
from swarmnet_protocols.machine.aio import cancel, loop_time
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.training.bandwidth import ArrivalRates
from swarmnet_protocols.training.codecs import get_codec
from swarmnet_protocols.training.codecs.values import Values
from swarmnet_protocols.training.job_settings import Job
from swarmnet_protocols.training.matchmaking.matchmaking import Matchmaking
from swarmnet_protocols.training.matchmaking.rosters import Roster
from swarmnet_protocols.training.pacing import LEAST_WAIT_S, Wait, WorkerPace
from swarmnet_protocols.training.pairs import Pairs
from swarmnet_protocols.training.rounds.aggregation_rules import AggregationRules
from swarmnet_protocols.training.rounds.averaging import Averager
from swarmnet_protocols.training.rounds.deadlines import RoundTiming
from swarmnet_protocols.training.rounds.round_runner import Outcome, RoundContext
from swarmnet_protocols.training.rounds.terms import RoundMember
from swarmnet_protocols.training.state_transfer import StateServer

GRACE_S = 2.5
"""Seconds that a running exchange has to end before a pause. With more, the memory is free later.
With less, more workers have to take over the part of a worker that pauses."""


@dataclass
class Exchange:
    """The exchange of one round."""

    round: int
    workers: int
    """The number of workers in its roster."""
    report: StepReport
    """The work behind this worker's contribution."""
    start_s: float
    """The time on the clock of the event loop when it began."""
    wait_s: float
    """Seconds that this worker has waited for it."""
    waited: Wait | None
    """The worker that the others waited for. ``finish`` sets it to None after a short wait."""


@dataclass
class Exchanges:
    """The exchanges of a worker. At most one is pending."""

    transport: Transport
    key: bytes
    """The id under which the workers meet."""
    job: Job
    replica: Replica
    workers: KnownWorkers
    pace: WorkerPace
    sign: Callable[[bytes], bytes]
    codec_executor: Executor
    on_proven: Callable[[PeerId], None]
    """Called with a worker that is proven to be dishonest."""
    round_s: Callable[[], float]
    """Returns this worker's ``round_s`` of ``RoundMember``."""
    last_number: int = 0
    """The number of the last exchange that this worker took part in."""

    def __post_init__(self) -> None:
        job, method, deadline_s = self.job, self.replica.method, self.job.exchange.deadline_s
        self.states = StateServer(self.transport, self.key, Timing())
        self.matchmaking = Matchmaking(
            self.transport,
            self.key,
            max_members=job.exchange.max_workers,
            timeout_s=deadline_s,
            timing=Timing(),
            same_state=method.shares_weights,
            is_excluded=self.workers.excluded.__contains__,
        )
        # one worker of a stage may count the data of all
        slots = job.exchange.max_workers if job.stages else 1
        exact = job.stages is not None and method.kind == "gradients"
        context = RoundContext(
            self.transport,
            self.key,
            self.sign,
            RoundTiming(deadline_s / 3, 2 * deadline_s / 3, deadline_s),
            AggregationRules.named(job.exchange.aggregate, float(slots * job.round_tokens), exact=exact),
            self.codec_executor,
            on_proven=self.on_proven,
        )
        self.averager = Averager(context)
        self._pairs = Pairs(context, self.states, self.replica.codec)
        self._rates = ArrivalRates()
        self._pending: tuple[Exchange, asyncio.Future[Outcome]] | None = None

    async def serve(self) -> None:
        """Answer other workers until the transport closes."""
        await self.states.serve()
        await self.matchmaking.serve()

    @property
    def pending_round(self) -> int | None:
        """The round whose exchange is not finished."""
        return None if self._pending is None else self._pending[0].round

    async def form_group(self, weight: float, *, in_pairs: bool = False) -> Roster:
        """Form the group of this worker's round. Return its roster.

        ``weight``: the tokens that this worker trained on in the round. ``in_pairs``: the group is
        the workers that this one knows.
        """
        spent, others = self.pace.end_round(), self.workers.alive()
        me = RoundMember(
            self.transport.peer_id,
            tuple(self.transport.addresses()),
            weight=weight,
            last_exchange=self.last_number,
            round_s=self.round_s(),
        )
        if in_pairs:
            members = sorted([me, *others], key=lambda each: each.peer)
            roster = Roster(self.matchmaking.position.round, self.last_number, tuple(members))
        else:
            roster = await self.matchmaking.form_group(me, others, self._rates.bytes_per_s(), spent)
            self.workers.set_roster(roster.members)
        self.pace.rounds_s = [member.round_s for member in roster.members]
        return roster

    async def start(
        self,
        roster: Roster,
        contribution: Values | None,
        report: StepReport,
        *,
        round: int,
        asked_s: float,
        is_last: bool,
    ) -> None:
        """Start to average the contributions to ``round``, in the background unless in pairs.

        ``asked_s``: loop time at which this worker asked for the roster. ``is_last``: no inner
        steps follow.
        """
        method, me = self.replica.method, self.transport.peer_id
        partners = method.partners(round, [member.peer for member in roster.members], me)
        members = [member for member in roster.group_of(me) if member.peer in partners]
        start, end = method.range(round)
        values = torch.zeros(end - start) if contribution is None else contribution
        start_s = loop_time() if method.shares_weights else asked_s
        running: asyncio.Future[Outcome]
        if method.shares_weights:
            averaging = self.averager.average(
                roster.exchange_number,
                members,
                values,
                weight=float(report.tokens),
                codec=self.replica.codec,
                state=self.matchmaking.position.state,
                spread_s=0.0 if is_last else self.pace.steps_s(self.pace.overlap),
                groups=roster.groups,
            )
            running = asyncio.create_task(averaging, name="exchange")
        else:
            partner = next((member for member in members if member.peer != me), None)
            running = asyncio.get_running_loop().create_future()
            running.set_result(await self._pairs.average(round, partner, values, float(report.tokens)))
        self.last_number = roster.exchange_number
        exchange = Exchange(round, len(roster.members), report, start_s, loop_time() - asked_s, roster.waited)
        self._pending = exchange, running

    async def merge(self, weight: float) -> tuple[Roster, Outcome, float]:
        """Average the replicas of all workers. Return the roster, the outcome, and its seconds.

        ``weight``: 1 for a worker with a replica of its own, else 0. Raises ``OutOfSync`` or
        ``NoPlace`` if the others leave this worker out.
        """
        roster = await self.form_group(weight)
        start_s = loop_time()
        outcome = await self.averager.average(
            roster.exchange_number,
            roster.group_of(self.transport.peer_id),
            self.replica.method.agreed(),
            weight=weight,
            codec=get_codec("float32"),
            groups=roster.groups,
        )
        return roster, outcome, loop_time() - start_s

    async def finish(self) -> tuple[Exchange, Outcome] | None:
        """Wait for the outcome of the pending exchange. None if there is none."""
        if self._pending is None:
            return None
        exchange, running = self._pending
        start_s = loop_time()
        outcome = await asyncio.shield(running)  # a pause lets it end
        self.pace.spend(network=loop_time() - start_s)
        exchange.wait_s += loop_time() - start_s
        slowest = outcome.waited
        if slowest is not None:  # a transfer during inner steps keeps nobody waiting
            slowest = replace(slowest, seconds=min(slowest.seconds, exchange.wait_s))
        waits = [
            each for each in (exchange.waited, slowest) if each is not None and each.seconds >= LEAST_WAIT_S
        ]
        exchange.waited = max(waits, key=lambda each: each.seconds, default=None)
        self._pending = None
        self._rates.add(outcome.arrivals)
        return exchange, outcome

    async def ends_in_time(self) -> bool:
        """Wait a moment for the pending exchange. Return whether it has ended; False if none is
        pending."""
        if self._pending is None:
            return False
        return bool((await asyncio.wait([self._pending[1]], timeout=GRACE_S))[0])

    async def close(self) -> None:
        """Drop the pending exchange."""
        await cancel(self._pending[1] if self._pending else None)
