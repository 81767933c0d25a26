"""What a worker owes of its contributions, when it or another one leaves."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor

from torch import Tensor

from swarmnet_node.training.dependencies import Report
from swarmnet_node.training.replica import Replica
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.handover import Handover
from swarmnet_protocols.training.state_transfer import PackedState, StateServer


class Debts:
    """What ``replica`` owes, as an ``Heir`` and as the one that leaves. ``executor`` is the thread that computes with it."""

    def __init__(self, replica: Replica, executor: Executor, report: Report) -> None:
        self.max_bytes = replica.max_owed_bytes
        self._replica = replica
        self._executor = executor
        self._report = report

    async def hand_over(
        self, handover: Handover, states: StateServer, save: Callable[[], Awaitable[None]]
    ) -> None:
        """Give it to one that stays. ``save`` writes a checkpoint, when this worker owes nothing any more."""
        loop = asyncio.get_running_loop()
        owed = await loop.run_in_executor(self._executor, self._replica.pack_owed)
        if not owed or not handover.heirs():
            return

        async def forget() -> None:
            await loop.run_in_executor(self._executor, self._replica.owe_nothing)
            await save()

        state = await loop.run_in_executor(self._executor, PackedState.of, owed)
        try:
            heir = await handover.give(states.offer(state), forget)
        except SwarmnetError as error:
            self._report({"event": "not_handed_over", "reason": str(error)})
        else:
            self._report({"event": "handed_over", "to": heir, "bytes": state.manifest.size_bytes})

    async def examine(self, data: bytearray, factor: float) -> Tensor:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._replica.examine, data, factor)

    async def inherit(self, peer: PeerId, error: Tensor) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, self._replica.inherit, error)
        self._report({"event": "inherited", "from": peer})

    def refuse(self, peer: PeerId, reason: str) -> None:
        self._report({"event": "not_inherited", "from": peer, "reason": reason})
