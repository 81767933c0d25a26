"""A chain of hosts as the client uses it: steps go to the first hop, outputs come from the last.

1. :meth:`Chain.forward` cuts long rows into chunks, one step each, and sends them.
2. A step is numbered, logged and waits (:class:`StepsInFlight`). The client's link to the first hop
   sends it from the log, as every hop sends its outputs to the next one (``session/link.py``).
3. The last hop answers on its session stream, which ends the step's wait.

Failures do not appear here: :class:`ChainSupervisor` replaces failed hops, and the logs replay
their inputs. A waiting step only takes longer.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from statistics import median

import numpy as np

from swarmnet_client.audit.verdict import Read
from swarmnet_client.chain.auditor import Auditor
from swarmnet_client.chain.hops import ChainReport, ChainSpec
from swarmnet_client.chain.steps_in_flight import GiveUpIdle, StepsInFlight
from swarmnet_client.chain.supervisor import ChainSupervisor
from swarmnet_client.chain.trace import StepTimer
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.errors import OutOfResources, SwarmnetError
from swarmnet_protocols.machine.aio import in_background, loop_time
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.session.arrays import split
from swarmnet_protocols.session.steps import MAX_ROWS, Row

_log = logging.getLogger(__name__)

MEASURED_STEPS = 8
"""Decode steps whose median time is one measurement of a chain's hosts."""
CHUNK = 256
"""Positions in one step. A hop computes one step while the next hop computes the previous one."""

Part = list[tuple[int, Row]]
"""The pieces of one step, each with the index of its row."""


def ignore_part(_row: int, _positions: int) -> None:
    """Do nothing when a chunk of a row came through."""


class Chain:
    """A chain over all blocks of ``spec``.

    - ``embed`` turns inputs of ``forward`` ([P] token ids, or embeddings [P, D]) into embeddings
      [P, D] for the first hop: the log keeps ids, which are smaller.
    - ``read`` turns outputs into logits, in a thread of its own. Then audits of the last hop
      compare these too.
    - ``give_up_idle`` is called whenever a hop has to be replaced. It returns the numbers of the
      sequences that no answer needs. The chain forgets them, so that a new hop computes only the
      other sequences again.
    """

    def __init__(
        self,
        hosts: ModelHosts,
        spec: ChainSpec,
        embed: Callable[[Array], Array],
        read: Read | None = None,
        give_up_idle: GiveUpIdle = frozenset,
    ) -> None:
        self.report = ChainReport()
        self._hosts = hosts
        self._spec = spec
        self._steps_s: list[float] = []
        self._tasks = asyncio.TaskGroup()
        self._timer: StepTimer | None = None
        if spec.trace is not None:
            self._timer = StepTimer(spec.blocks, spec.trace, asyncio.get_running_loop().time)
        self._in_flight = StepsInFlight(spec.log_bytes, spec.hidden_size, give_up_idle, self._timer)
        self._supervisor = ChainSupervisor(hosts, spec, self._in_flight, self.report, embed, self._tasks)
        self._auditor = Auditor(hosts, spec, self._supervisor.repair, self.report, embed, read)

    @asynccontextmanager
    async def open(self) -> AsyncIterator["Chain"]:
        """Open the chain. It is repaired for as long as the context is open."""
        async with in_background(self._run()):
            yield self
            if self._timer is not None:
                await self._timer.complete()

    @property
    def lengths(self) -> Mapping[int, int]:
        """Positions in the KV caches of the chain, by sequence."""
        return self._in_flight.outbox.log.lengths

    # ---- steps ----------------------------------------------------------------------------------

    async def forward(
        self, rows: tuple[Row, ...], values: Array, computed: Callable[[int, int], None] = ignore_part
    ) -> Array:
        """Send new positions ([P] ids or [P, D] embeddings) through all blocks.

        Returns the wanted outputs [wanted, D], row after row. Long rows travel in chunks, so that
        all hops compute at the same time. ``computed`` is called for each chunk of a row that came
        through, with the index of the row and the chunk's positions. Failures are waited out as
        long as every block is hosted.

        Raises:

        - ``NoRoute`` when a block has no host for ``recover_s``.
        - ``NoRoom`` for a prompt that is too long for the hosts.
        - ``OutOfResources`` when the hosts are full or a sequence would pass ``max_length``.
        - ``Unreachable`` when every attempt to repair the chain fails.
        - ``ConfigError`` for an adapter that lacks blocks, or when independent hosts refuse what
          the client sends.
        - ``ProtocolViolation`` for rows against ``session.steps``.
        """
        longest = self._spec.prefix_positions + max(row.end for row in rows)
        if longest > self._spec.max_length:
            raise OutOfResources(
                f"{longest} positions in a session of {self._spec.max_length}",
                hint="open the session with a larger max_length",
            )
        await self._check_room(rows)
        self.report.trips += 1
        return await self._trip(rows, values, computed)

    async def _check_room(self, rows: tuple[Row, ...]) -> None:
        """Raise ``NoRoom`` for a prompt that no known hosts have room for, before any of it is
        computed.

        Tokens of an answer go on: hosts with more room may come while the chain looks for them.
        """
        lengths = {**self.lengths, **{row.sequence: row.end for row in rows}}
        positions = sum(lengths.values()) + self._spec.prefix_positions * len(lengths)
        blocks = 0, self._spec.blocks
        if positions > self._hosts.room(blocks) and any(row.count > row.outputs for row in rows):
            with suppress(SwarmnetError):  # announcements may be old
                await self._hosts.refresh()
            self._hosts.check_room(positions, blocks)
        self._supervisor.repair.need(positions)

    async def _trip(
        self, rows: tuple[Row, ...], values: Array, computed: Callable[[int, int], None]
    ) -> Array:
        async def step(part: Part, inputs: Array) -> Array:
            outputs = await self._step(tuple(row for _, row in part), inputs)
            for index, row in part:
                computed(index, row.count)
            return outputs

        parts = cut(rows)
        steps = [
            step(part, inputs) for part, inputs in zip(parts, cut_values(parts, rows, values), strict=True)
        ]
        outputs: list[list[Array]] = [[] for _ in rows]
        for part, output in zip(parts, await asyncio.gather(*steps), strict=True):
            for (index, _), piece in zip(part, split(output, [row.wanted for _, row in part]), strict=True):
                outputs[index].append(piece)
        return np.concatenate([piece for pieces in outputs for piece in pieces])

    async def _step(self, rows: tuple[Row, ...], values: Array) -> Array:
        failovers, started = self.report.failovers, loop_time()
        asked, rows = rows, self._auditor.add_audited_outputs(rows)
        watched = self._auditor.step_sent(rows)
        is_alone, route = self._in_flight.is_empty, self.report.route
        self._supervisor.wake()
        outputs = await self._in_flight.send(rows, values)
        if is_alone and sum(row.count for row in rows) == 1 and self.report.route is route:
            self._measure(loop_time() - started)
        outputs = self._auditor.step_done(watched, asked, rows, values, outputs)
        is_decode = all(row.count == row.outputs for row in asked)
        if is_decode or self.report.failovers > failovers:
            self.report.longest_stall_s = max(self.report.longest_stall_s, loop_time() - started)
        return outputs

    def _measure(self, step_s: float) -> None:
        """Count the time of a decode step with no other in flight.

        Several steps give one measurement, their median, because a single step may have met a
        pause.
        """
        self._steps_s.append(step_s)
        if len(self._steps_s) == MEASURED_STEPS and self.report.route:
            self._hosts.measured([Hop(*each) for each in self.report.route], median(self._steps_s))
            self._steps_s.clear()

    # ---- hops -----------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Keep the chain whole, and audit it. A failure that cannot be repaired ends every step,
        later ones included.
        """
        try:
            async with self._tasks:
                self._tasks.create_task(self._auditor.run(), name="audits")
                await self._supervisor.run()
        except ExceptionGroup as errors:
            error: Exception = errors
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if not isinstance(error, SwarmnetError):  # a bug: no other host would help
                _log.error("the chain broke", exc_info=error)
                error = SwarmnetError(f"the chain broke: {type(error).__name__}: {error}")
            self._in_flight.fail(error)
        finally:
            self._supervisor.repair.close()


def cut(rows: tuple[Row, ...]) -> list[Part]:
    """Split rows into steps of at most ``CHUNK`` positions. With more rows than that, a step has at
    most one position of each row.

    A row that starts from another sequence means that sequence as it is before the batch. So all
    rows of such a batch begin in one step.
    """
    done = [0] * len(rows)
    parts: list[Part] = []
    if any(row.source != row.sequence for row in rows):
        share = max(1, CHUNK // len(rows))
        done = [min(share, row.count) for row in rows]
        parts.append([(index, _piece(row, 0, done[index])) for index, row in enumerate(rows)])
    return parts + _cut_rest(rows, done)


def cut_values(parts: Sequence[Part], rows: Sequence[Row], values: Array) -> list[Array]:
    """Return the values of each part. ``values`` [P, ...] belong to ``rows``, one after another."""
    inputs = split(values, [row.count for row in rows])
    taken = [0] * len(rows)
    cuts = []
    for part in parts:
        pieces = []
        for index, row in part:
            pieces.append(inputs[index][taken[index] : taken[index] + row.count])
            taken[index] += row.count
        cuts.append(np.concatenate(pieces))
    return cuts


def _cut_rest(rows: Sequence[Row], done: Sequence[int]) -> list[Part]:
    parts: list[Part] = []
    room = 0
    for index, row in enumerate(rows):
        reached = done[index]
        while reached < row.count:
            if room == 0 or len(parts[-1]) == MAX_ROWS:
                parts.append([])
                room = CHUNK
            count = min(room, row.count - reached)
            parts[-1].append((index, _piece(row, reached, count)))
            reached += count
            room -= count
    return parts


def _piece(row: Row, done: int, count: int) -> Row:
    """Return ``count`` positions of a row, after the first ``done`` positions that earlier steps
    have.
    """
    left = row.count - done - count
    outputs = max(0, min(count, row.outputs - left))
    first = max(0, min(count, row.first - done))
    source = row.sequence if done else row.source
    return Row(row.sequence, row.start + done, count, outputs, source, row.rewrite and not done, first)
