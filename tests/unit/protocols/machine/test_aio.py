"""Waiting until a time, and loops that survive errors."""

import asyncio
from itertools import pairwise

import pytest

from swarmnet_protocols.errors import PeerUnreachable
from swarmnet_protocols.machine.aio import News, cancel, in_background, persist, until
from tests.defences import defence, replacing
from tests.support.network.virtual_time import VirtualLoop, run


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_messages_that_arrived_in_a_stopped_process_are_in_time(turns: int) -> None:
    """The result arrives ``turns`` iterations of the loop after the timeout, as may happen with any
    order of its callbacks."""

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


@defence(
    "a loop that a process lives on survives an error",
    off=replacing(__name__, "persist", lambda _, loop: loop()),
)
def test_a_loop_that_fails_begins_again_ever_later() -> None:
    began: list[float] = []

    async def loop() -> str:
        began.append(asyncio.get_running_loop().time())
        if len(began) < 9:
            raise TimeoutError("²")
        return "done"

    async def main() -> str:
        return await persist("the loop", loop)

    assert run(main()) == "done"
    pauses = [later - earlier for earlier, later in pairwise(began)]
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60])


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [(ValueError("²"), True), (PeerUnreachable("²"), False)],
    ids=["unforeseen", "known"],
)
def test_the_error_of_a_loop_is_logged(
    error: Exception, has_traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    errors = [error]

    async def loop() -> None:
        if errors:
            raise errors.pop()

    async def main() -> None:
        await persist("the loop", loop)

    run(main())
    [logged] = caplog.records
    assert logged.message == "the loop failed and begins again in 1 s: ²"
    assert (logged.exc_text is not None) == has_traceback


def test_a_loop_ends_when_it_is_cancelled() -> None:
    async def main() -> None:
        task = asyncio.create_task(persist("the loop", asyncio.Event().wait))
        await asyncio.sleep(1)
        await cancel(task)
        assert task.cancelled()

    run(main())


def test_work_in_the_background_ends_with_its_context() -> None:
    async def main() -> list[str]:
        seen: list[str] = []

        async def fail() -> None:
            raise ValueError

        async def run() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                seen.append("cancelled")

        async with in_background(fail(), run()):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            seen.append("goes on after a failure")
        return seen

    assert run(main()) == ["goes on after a failure", "cancelled"]


def test_all_that_wait_for_news_go_on_when_it_is_so() -> None:
    async def main() -> list[bool]:
        news, numbers = News(), list[int]()
        one = asyncio.create_task(news.until(lambda: len(numbers) >= 1))
        two = asyncio.create_task(news.until(lambda: len(numbers) >= 2))
        late = asyncio.create_task(news.until(lambda: len(numbers) > 2, 5.0))
        for number in range(2):
            await asyncio.sleep(1.0)
            numbers.append(number)
            await news.tell()
        return [await one, await two, await late]

    assert run(main()) == [True, True, False]
