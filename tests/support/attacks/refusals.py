"""Refusals that tests expect."""

import asyncio
import contextlib
from collections.abc import Awaitable

import pytest

from swarmnet_protocols.net import Stream
from swarmnet_protocols.net.refusal import Refused

TIMEOUT_S = 30.0
"""A stream that is not refused may carry heartbeats for ever."""


async def refusal(reading: Awaitable[object]) -> Refused:
    """The refusal that ends ``reading``."""
    with pytest.raises(Refused) as info:
        await reading
    return info.value


async def final_refusal(stream: Stream) -> Refused:
    """The refusal at the end of ``stream``, after any messages. Closes the stream.

    Raises ``TimeoutError`` if there is none within ``TIMEOUT_S``.
    """

    async def drain() -> None:
        while True:
            await stream.receive()

    with contextlib.closing(stream):
        async with asyncio.timeout(TIMEOUT_S):
            return await refusal(drain())
