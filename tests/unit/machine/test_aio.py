"""Waiting until a time."""

import asyncio

import pytest

from swarmnet_protocols.machine.aio import until
from tests.support.virtual_time import VirtualLoop, run


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_messages_that_arrived_while_the_process_was_stopped_are_in_time(turns: int) -> None:
    """The result arrives ``turns`` iterations of the loop after the timeout, as may happen with any order of its callbacks."""

    async def main() -> bytes:
        reader, loop = asyncio.StreamReader(), asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        def arrive(left: int) -> None:
            if left:
                loop.call_soon(arrive, left - 1)
            else:
                reader.feed_data(b"here")

        def hold_up() -> None:
            loop.hold_up(60.0)
            arrive(turns)

        loop.call_at(1.0, hold_up)
        return await until(5.0, lambda: reader.readexactly(4))

    assert run(main()) == b"here"


def test_missing_messages_are_not_waited_for() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            await until(5.0, asyncio.Event().wait)
        return asyncio.get_running_loop().time()

    assert run(main()) == 5.0
