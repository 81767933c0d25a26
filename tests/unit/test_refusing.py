"""How long whoever refuses a stream waits until that is heard."""

import asyncio
from typing import Any

import pytest

from swarmnet_protocols.transport.refusing import linger
from tests.support.virtual_time import run

PATIENCE_S = 60.0


class Writer:
    """As much of a ``StreamWriter`` as is needed to end a stream."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


async def lingered(reader: asyncio.StreamReader) -> None:
    writer: Any = Writer()
    async with asyncio.timeout(PATIENCE_S):
        await linger(reader, writer)
    assert writer.is_closed


@pytest.mark.parametrize("says_first", [b"", b"hello"])
def test_who_has_heard_it_and_closes_is_waited_for(says_first: bytes) -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(says_first)
        lingering = asyncio.create_task(lingered(reader))
        await asyncio.sleep(1.0)
        assert not lingering.done()
        reader.feed_eof()
        await lingering

    run(main())


def test_who_does_not_close_is_not_waited_for() -> None:
    async def main() -> None:
        await lingered(asyncio.StreamReader())

    run(main())


def test_who_goes_on_speaking_is_not_listened_to() -> None:
    async def main() -> None:
        reader = asyncio.StreamReader()

        async def speak() -> None:
            while True:
                reader.feed_data(bytes(1 << 10))
                await asyncio.sleep(0.001)

        speaking = asyncio.create_task(speak())
        try:
            async with asyncio.timeout(1.0):
                await lingered(reader)
        finally:
            speaking.cancel()

    run(main())
