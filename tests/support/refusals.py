"""Refusals that tests expect."""

import contextlib
from collections.abc import Awaitable

import pytest

from swarmnet_protocols.net import Stream
from swarmnet_protocols.net.refusal import Refused


async def refusal(reading: Awaitable[object]) -> Refused:
    """The refusal that ends ``reading``."""
    with pytest.raises(Refused) as info:
        await reading
    return info.value


async def final_refusal(stream: Stream) -> Refused:
    """The refusal at the end of ``stream``, after any messages. Closes the stream."""

    async def drain() -> None:
        while True:
            await stream.receive()

    with contextlib.closing(stream):
        return await refusal(drain())
