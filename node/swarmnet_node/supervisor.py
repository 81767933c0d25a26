"""Runs and pauses a node as its owner's limits say, and reports why it is paused.

The states of a supervised node:

1. **Loading.** The limits let it run, so it loads its blocks. A pause or ``finish`` stops the
   loading.
2. **Serving.** The node hosts its blocks, and ``memory_limit.py`` keeps its memory below the limit.
   Its ``Guard`` reads clock, battery and idle time every ``OBSERVE_S``.
3. **Stopping.** A limit, the owner or a restart of p2pd requires a pause. Sessions have
   ``PAUSE_GRACE_S`` to move to other hosts.
4. **Paused.** Blocks, caches and sessions are freed. The transport and the directory stay, and the
   node announces that it is paused. If torch is in the process, the node restarts without it
   (``swarmnet/restart.py``).
5. **Finished.** The owner called ``finish``, or the node has failed.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from swarmnet_node.engine.engine import Engine
from swarmnet_node.hosted_blocks import Hosting, OtherModels
from swarmnet_node.hosting.host import Host
from swarmnet_node.loading.memory_limit import MemoryLimit
from swarmnet_node.node import Node
from swarmnet_node.owner.guard import Guard
from swarmnet_node.owner.limits import Machine, OwnerLimits
from swarmnet_node.relocating import Relocator
from swarmnet_node.resting import Resting
from swarmnet_node.running_node import Dependencies, Ending
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import cancel, in_background, loop_time, persist, race
from swarmnet_protocols.net.limits.resources import ResourceManager
from swarmnet_protocols.routing.relocation import Relocation
from swarmnet_protocols.wire import report_pb2
from swarmnet_protocols.wire.control_pb2 import NodeStatus

if TYPE_CHECKING:
    from swarmnet_node.expert_node import ExpertHosting, ExpertNode

_log = logging.getLogger(__name__)

PAUSE_GRACE_S = 2.5
"""Seconds that sessions have to move away before a pause frees the memory. The whole pause must
take at most 5 s."""


class Supervisor(Ending):
    """Runs a ``Node`` while its owner's limits allow it. :meth:`run` makes one."""

    def __init__(
        self,
        dependencies: Dependencies,
        hosting: "Hosting | ExpertHosting",
        machine: Machine,
        limits: OwnerLimits,
        wake: Callable[[], Awaitable["Hosting | ExpertHosting"]] | None = None,
    ) -> None:
        """After a restart for a pause, ``hosting`` only describes the node, and ``wake`` reads its
        model."""
        super().__init__()
        self.volunteers = ""
        """The reason why a volunteer hosts. Empty for other nodes."""
        self._listeners: list[Callable[[NodeStatus], None]] = []
        self._move_listeners: list[Callable[[NodeStatus], None]] = []
        self._switch_listeners: list[Callable[[NodeStatus], None]] = []
        self.dependencies = dependencies
        self._memory = MemoryLimit(machine, self.limits)
        self._hosting = self._watched(hosting) if isinstance(hosting, Hosting) else hosting
        self._former: Hosting | None = None
        """The hosting before a switch to another model. None once the other model serves."""
        self._machine = machine
        self._changed = asyncio.Event()
        self._guard = Guard(machine, limits, self._changed.set)
        self._node = _node(dependencies, self._hosting)
        self._is_loading = False
        self._has_moved = False
        """True if the node ended to serve other blocks, and does not serve them yet."""
        self._step_aside_reason = ""
        """The reason of ``step_aside``. Empty outside it."""
        self._wake = wake
        """Reads the model after a restart for a pause. None once it is read."""
        self._frees_memory: Callable[[], bool] = bool
        self.resting: Resting | None = None
        """The paused node, for the next program. None until this program ends for a restart."""
        self._paused = asyncio.Event()
        self._reason = ""
        self._finishing_s: float | None = None
        self._started_or_paused = asyncio.Event()
        self._started = loop_time()

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Supervisor"]:
        """Run a node while the context is open. On entry the node still loads: see ``started``."""
        await self._guard.observe()
        async with in_background(self._run(), persist("the watch over the machine", self._guard.watch)):
            yield self

    async def started(self) -> bool:
        """Wait until the node serves or is paused. Return False if it was told to finish before.

        Raises the errors of loading.
        """
        await race(self._started_or_paused.wait(), self.finished())
        return self._started_or_paused.is_set()

    @property
    def engine(self) -> Engine | None:
        """The engine of the node. None while the node is paused."""
        return self._node.engine

    @property
    def host(self) -> Host | None:
        """The host of the node. None while the node is paused."""
        return self._node.host

    @property
    def resources(self) -> ResourceManager:
        return self._node.resources

    @property
    def span(self) -> tuple[int, int]:
        return self._node.span

    @property
    def is_online(self) -> bool:
        """True if the node serves now."""
        return self._node.is_online

    def report(self) -> report_pb2.NodeReport:
        """Return the report for dashboards. Raises ``Unreachable`` while the node is paused."""
        return self._node.report()

    def status(self) -> NodeStatus:
        """Return the status of the node."""
        status = self._node.status()
        self._guard.describe(status, self._reason)
        status.volunteers = self.volunteers
        status.uptime_s = loop_time() - self._started
        return status

    def on_change(self, listener: Callable[[NodeStatus], None]) -> None:
        """Call ``listener`` whenever the node pauses or serves again."""
        self._listeners.append(listener)

    def on_move(self, listener: Callable[[NodeStatus], None]) -> None:
        """Call ``listener`` whenever the node has moved to other blocks."""
        self._move_listeners.append(listener)

    def on_switch(self, listener: Callable[[NodeStatus], None]) -> None:
        """Call ``listener`` whenever the node has switched to another model."""
        self._switch_listeners.append(listener)

    def limits(self) -> OwnerLimits:
        return self._guard.limits

    def set_limits(self, limits: OwnerLimits) -> None:
        """Apply other limits.

        Raises ``ConfigError`` or ``OutOfResources`` for limits that cannot be kept; the old limits
        stay.
        """
        hosting = self._hosting
        may_drop = isinstance(hosting, Hosting) and hosting.may_move
        self._memory.check(limits, self._node.engine, may_drop=may_drop)
        self._guard.set_limits(limits)
        if isinstance(self._node, Node):
            self._node.limits_changed.set()

    def pause(self, for_s: float = math.inf) -> None:
        """Ask sessions to move away, and free memory for ``for_s`` seconds or until ``resume``.

        The pause holds over a restart.
        """
        self._guard.pause(for_s)

    def resume(self) -> None:
        """End ``pause``."""
        self._guard.resume()

    def restart_for_pauses(self, frees_memory: Callable[[], bool]) -> None:
        """Finish in a pause if ``frees_memory`` says that a restart frees much memory. ``resting``
        then describes the node."""
        self._frees_memory = frees_memory
        self._changed.set()

    @asynccontextmanager
    async def step_aside(self, reason: str) -> AsyncIterator[None]:
        """Pause the node while the context is open.

        Entered when its sessions have moved away, or after twice ``PAUSE_GRACE_S``.
        """
        self._step_aside_reason = reason
        self._changed.set()
        try:
            with contextlib.suppress(TimeoutError, SwarmnetError):  # a failed node ends anyway
                async with asyncio.timeout(2 * PAUSE_GRACE_S):
                    await race(self._paused.wait(), self.finished())
            yield
        finally:
            self._step_aside_reason = ""
            self._changed.set()

    def finish(self, grace_s: float) -> None:
        """Take no new sessions, and ask clients to move.

        ``finished`` returns when they have moved, or after ``grace_s``.
        """
        self._finishing_s = grace_s
        self._changed.set()

    @property
    def grace_s(self) -> float | None:
        """Seconds that sessions have to move away. None until the node is told to finish."""
        return self._finishing_s

    # ---- running and pausing --------------------------------------------------------------------

    def _reason_to_pause(self) -> str:
        """Return the reason why the node must not run now. Empty if it may run."""
        return self._step_aside_reason or self._guard.reason()

    async def _run(self) -> None:
        try:
            while not self._is_finishing and self.resting is None:
                if not self._reason_to_pause():
                    # A pause does not wait until the blocks are loaded.
                    try:
                        await race(self._serve(), self._until_loading_must_stop())
                    except SwarmnetError as error:
                        if self._former is None:
                            raise
                        self._go_back(self._former, self._hosting.manifest, error)
                else:
                    await self._rest()
        except Exception as error:  # noqa: BLE001 - the supervisor: ``finished`` raises it
            self.fail(error)
        else:
            self.end()

    async def _serve(self) -> None:
        self._is_loading = True
        if self._wake is not None:
            self._hosting = self._with_former_blocks(await self._wake())
            self._wake = None
        node, before = _node(self.dependencies, self._hosting), self._hosting
        self._node, self._reason = node, ""
        async with node.running():
            self._is_loading = False
            # Return memory that loading used temporarily.
            await asyncio.get_running_loop().run_in_executor(None, self._machine.release)
            async with in_background(*self._beside(node)):
                self._notify_listeners("")
                has_fewer = isinstance(before, Hosting) and before.placed and before.placed.span != node.span
                if self._has_moved or has_fewer:
                    self._notify_of_move()
                    self._has_moved = False
                if self._former is not None:
                    self._former = None
                    for listener in self._switch_listeners:
                        listener(self.status())
                await race(self._until(self._must_stop), node.finished())
                node.finish(PAUSE_GRACE_S if self._finishing_s is None else self._finishing_s)
                await node.finished()
            weight_bytes = node.weight_bytes
        self._hosting = again = node.hosting_again()
        if not isinstance(node, Node) or not isinstance(again, Hosting) or node.relocation is None:
            return
        if not node.relocation.is_switch:
            self._has_moved = True
        elif again.others is not None and not self._must_stop():
            await self._switch(node, node.relocation, weight_bytes, again, again.others)
        else:
            node.relocation = None

    def _beside(self, node: "Node | ExpertNode") -> Iterator[Coroutine[Any, Any, object]]:
        """Yield what runs while ``node`` serves."""
        if isinstance(node, Node):
            yield persist("the watch over limits", partial(self._memory.govern, node))
            yield persist("the choice of blocks", Relocator(node).run)

    async def _switch(
        self, node: Node, switch: Relocation, weight_bytes: int, former: Hosting, others: OtherModels
    ) -> None:
        """Read the model that ``node`` has ended for, to run a node of it next.

        If that fails, run a node with the former blocks.
        """
        now = loop_time()
        self._is_loading = True
        announcing = asyncio.create_task(
            persist("the announcement", node.keep_announced), name="announce intent"
        )
        try:
            hosting = await others.hosting(switch.manifest, weight_bytes, self._guard.limits)
        except SwarmnetError as error:
            await cancel(announcing)
            await node.withdraw(switch)
            self._go_back(former, switch.manifest, error)
        else:
            self._former = former
            hosting = replace(
                hosting,
                former_model=former.model,
                model_reason=switch.reason,
                memory=former.memory.after_switch(now),
            )
            self._memory.forget_blocks()
            self._hosting = self._watched(hosting)
            self._node = _node(self.dependencies, self._hosting)
        finally:
            self._is_loading = False
            await cancel(announcing)

    def _go_back(self, former: Hosting, manifest: bytes, error: SwarmnetError) -> None:
        """Run a node with its former blocks next, because the switch to another model failed."""
        _log.warning("the switch to another model failed: %s", error)
        memory = former.memory.after_failure(manifest, loop_time())
        self._hosting, self._former = replace(former, memory=memory), None

    def _with_former_blocks(self, hosting: "Hosting | ExpertHosting") -> "Hosting | ExpertHosting":
        """Return ``hosting`` with the blocks that the node hosted before its restart."""
        if not isinstance(hosting, Hosting) or not isinstance(self._hosting, Hosting):
            return hosting
        return self._watched(replace(hosting, placed=self._hosting.placed or hosting.placed))

    def _watched(self, hosting: Hosting) -> Hosting:
        return replace(
            hosting,
            has_room=self._memory.has_room,
            fitting=partial(self._memory.fitting, hosting.most_blocks),
            on_move=self._notify_of_move,
        )

    def _notify_of_move(self) -> None:
        for listener in self._move_listeners:
            listener(self.status())

    async def _rest(self) -> None:
        """Stay paused until the node may run again, or must end."""
        self._paused.set()
        # Do not announce blocks that are not chosen yet.
        announcing = asyncio.create_task(self._node.rest()) if self._hosting.is_chosen else None
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._machine.release)
            while (reason := self._reason_to_pause()) and not self._is_finishing:
                self.resting = self._next_program()
                if self.resting is not None:
                    return
                self._notify_listeners(reason)
                await self._until(partial(self._is_other_than, reason))
        finally:
            self._paused.clear()
            await cancel(announcing)

    @property
    def _is_finishing(self) -> bool:
        return self._finishing_s is not None

    def _next_program(self) -> Resting | None:
        """Return the node for the program that continues the pause. None if this program does.

        A node that switched models stays, because its command names the former model. A pause for a
        restart of p2pd takes seconds only.
        """
        hosting = self._hosting
        if not isinstance(hosting, Hosting) or hosting.former_model or self._step_aside_reason:
            return None
        return hosting.resting if self._frees_memory() else None

    def _is_other_than(self, reason: str) -> bool:
        is_over = self._is_finishing or self._reason_to_pause() != reason
        return is_over or self._next_program() is not None

    def _must_stop(self) -> bool:
        return self._is_finishing or bool(self._reason_to_pause())

    async def _until_loading_must_stop(self) -> None:
        await self._until(lambda: self._is_loading and self._must_stop())

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds`` is true. Check after every change."""
        while not holds():
            self._changed.clear()
            await self._changed.wait()

    def _notify_listeners(self, reason: str) -> None:
        self._reason = reason
        self._started_or_paused.set()
        for listener in self._listeners:
            listener(self.status())


def _node(dependencies: Dependencies, hosting: "Hosting | ExpertHosting") -> "Node | ExpertNode":
    if isinstance(hosting, Hosting):
        return Node(dependencies, hosting)
    from swarmnet_node.expert_node import ExpertNode

    return ExpertNode(dependencies, hosting)
