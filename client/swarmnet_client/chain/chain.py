"""A session down a chain of hops: steps go in, outputs come out; in between, peers may die.

Steps are sent and awaited here (``flight``); hops that fail are replaced meanwhile (``mending``).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from statistics import median

import torch

from swarmnet_client.chain.auditor import Auditor
from swarmnet_client.chain.chunks import cut, cut_values
from swarmnet_client.chain.hops import ChainReport, ChainSpec
from swarmnet_client.chain.inflight import Inflight
from swarmnet_client.chain.supervisor import ChainSupervisor
from swarmnet_client.swarm.swarm import Swarm
from swarmnet_protocols.errors import OutOfResources, SwarmnetError
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.routing.cost import Hop
from swarmnet_protocols.session.steps import Row

MEASURED_STEPS = 8
"""Steps of which the median time is one measurement of a chain's hosts."""


class Chain:
    """``embed`` turns logged inputs ([P] token ids, or whatever ``forward`` was given) into [P, D]."""

    def __init__(self, swarm: Swarm, spec: ChainSpec, embed: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.report = ChainReport()
        self._swarm = swarm
        self._spec = spec
        self._steps_s: list[float] = []
        self._inflight = Inflight(spec.log_bytes, spec.hidden_size)
        self._supervisor = ChainSupervisor(swarm, spec, self._inflight, self.report, embed)
        self._auditor = Auditor(swarm, spec, self._supervisor, self.report, embed)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, swarm: Swarm, spec: ChainSpec, embed: Callable[[torch.Tensor], torch.Tensor]
    ) -> AsyncIterator["Chain"]:
        """A chain that is built at once and mended for as long as the context."""
        chain = cls(swarm, spec, embed)
        keeper = asyncio.create_task(chain._keep(), name="chain")
        auditing = asyncio.create_task(chain._auditor.run(), name="audits")
        try:
            yield chain
        finally:
            await cancel(keeper, auditing)
            await chain._supervisor.close()

    @property
    def lengths(self) -> dict[int, int]:
        """Positions each lane holds."""
        return dict(self._inflight.outbox.log.lengths)

    async def forward(self, rows: tuple[Row, ...], values: torch.Tensor) -> torch.Tensor:
        """Send new positions ([P] or [P, D]) through all blocks; the outputs the rows want, [wanted, D], row after row.

        Long rows travel in chunks, so that every hop of the chain has one to work on. Waits through failures as long as
        somebody hosts every block. Raises ``NoRoute`` when nobody does for ``recover_s``, ``OutOfResources`` when the
        hosts have no room or a lane would pass ``max_length``, ``Unreachable`` when every attempt to mend the chain
        fails, ``ConfigError`` for an adapter that lacks blocks or when hosts agree that it is what we send,
        ``ProtocolViolation`` for rows against ``session.steps``.
        """
        longest = self._spec.prefix_positions + max(row.end for row in rows)
        if longest > self._spec.max_length:
            raise OutOfResources(
                f"{longest} positions in a session of {self._spec.max_length}",
                hint="open the session with a larger max_length",
            )
        parts = cut(rows)
        steps = [
            self._step(tuple(row for _, row in part), inputs)
            for part, inputs in zip(parts, cut_values(parts, rows, values), strict=True)
        ]
        outputs: list[list[torch.Tensor]] = [[] for _ in rows]
        for part, output in zip(parts, await asyncio.gather(*steps), strict=True):
            for (index, _), piece in zip(
                part, torch.split(output, [row.outputs for _, row in part]), strict=True
            ):
                outputs[index].append(piece)
        return torch.cat([piece for pieces in outputs for piece in pieces])

    async def _step(self, rows: tuple[Row, ...], values: torch.Tensor) -> torch.Tensor:
        clock = asyncio.get_running_loop().time
        before, started = self.report.failovers, clock()
        rows = self._auditor.asking(rows)
        mark = self._auditor.sent(rows)
        is_alone, route = self._inflight.is_idle, self.report.route
        self._supervisor.wake()
        came = await self._inflight.send(rows, values)
        if is_alone and sum(row.count for row in rows) == 1 and self.report.route is route:
            self._measure(clock() - started)
        output = self._auditor.came(mark, rows, values, came)
        is_single = sum(row.count for row in rows) == len(rows)
        if is_single or self.report.failovers > before:
            self.report.longest_stall_s = max(self.report.longest_stall_s, clock() - started)
        return output

    def _measure(self, step_s: float) -> None:
        """A step of one token, with no other on its way, took ``step_s``. Of several the median counts: one may have met a pause."""
        self._steps_s.append(step_s)
        if len(self._steps_s) == MEASURED_STEPS and self.report.route:
            self._swarm.measured([Hop(*each) for each in self.report.route], median(self._steps_s))
            self._steps_s.clear()

    async def _keep(self) -> None:
        """Keep the chain whole. What cannot be mended fails every step that waits, now and later."""
        try:
            await self._supervisor.run()
        except SwarmnetError as error:
            self._inflight.fail(error)
        except Exception as error:  # noqa: BLE001 - the supervisor: a step must end, whatever broke
            self._inflight.fail(SwarmnetError(f"the chain broke: {type(error).__name__}: {error}"))
