"""Ask one peer after another, without waiting for slow peers."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from swarmnet_protocols.machine.aio import cancel

P = TypeVar("P")
HEDGE_S = 2.0
"""Seconds until the next peer is asked, too. With less, many peers are asked for the same; with
more, a silent peer costs more time."""


async def hedged(
    peers: Sequence[P],
    ask: Callable[[P], Coroutine[Any, Any, bool]],
    on_late: Callable[[P], None] = lambda _: None,
) -> None:
    """Call ``ask`` with one peer after another until it returns True.

    If a peer has not answered after ``HEDGE_S``, ``on_late`` is called with it once, and the next
    peer is asked.
    """
    waiting = deque(peers)
    running: dict[asyncio.Task[bool], P] = {}
    late: set[asyncio.Task[bool]] = set()
    try:
        while waiting or running:
            if waiting:
                peer = waiting.popleft()
                running[asyncio.create_task(ask(peer))] = peer
            ended, _ = await asyncio.wait(
                running, timeout=HEDGE_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in ended:
                del running[task]
            if not ended:
                for peer in [peer for task, peer in running.items() if task not in late]:
                    on_late(peer)
                late.update(running)
            results = [task.result() for task in ended]
            if any(results):
                return
    finally:
        await cancel(*running)
