"""An announcer renews its records, tells of changes at once, tries again after failures, and
ends."""

import asyncio
import random
from collections.abc import Awaitable, Callable

from swarmnet_protocols.directory.announcer import RETRY_S, Announcement, Announcer
from swarmnet_protocols.errors import Unreachable
from tests.support.network import virtual_time

EVERY_S = 20.0


class Board:
    """A directory that notes what it takes, and fails while ``is_down``."""

    def __init__(self) -> None:
        self.is_down = False
        self.tried: list[float] = []
        self.taken: list[bytes] = []

    async def publish(self, topic: str, body: bytes, *, lifetime_s: float) -> None:
        self.tried.append(asyncio.get_running_loop().time())
        if self.is_down:
            raise Unreachable("no peer answers")
        self.taken.append(body)


def announcer(board: Board, body: Callable[[], bytes] = lambda: b"online", **changes: object) -> Announcer:
    def compose() -> list[Announcement]:
        return [Announcement("topic", body(), 60.0)]

    return Announcer(board, random.Random(0), compose, EVERY_S, **changes)  # type: ignore[arg-type]


def during(seconds: float, scenario: Callable[[], Awaitable[Announcer]]) -> None:
    """Run the announcer that ``scenario`` returns for some seconds of virtual time."""

    async def main() -> None:
        running = asyncio.create_task((await scenario()).run())  # type: ignore[var-annotated]
        await asyncio.wait({running}, timeout=seconds)
        running.cancel()

    virtual_time.run(main())


def test_a_record_is_announced_at_the_start_and_renewed() -> None:
    board = Board()

    async def scenario() -> Announcer:
        return announcer(board)

    during(10 * EVERY_S, scenario)
    assert board.tried[0] == 0.0
    assert 10 <= len(board.tried) <= 13


def test_an_announcement_made_meanwhile_puts_off_the_next() -> None:
    board = Board()

    async def scenario() -> Announcer:
        each = announcer(board)
        await each.announce()
        return each

    during(EVERY_S / 2, scenario)
    assert len(board.tried) == 1


def test_a_change_is_announced_at_once() -> None:
    board, places = Board(), [b"here"]

    async def scenario() -> Announcer:
        asyncio.get_running_loop().call_later(2.5, places.append, b"there")
        return announcer(board, lambda: places[-1], facts=lambda: places[-1], check_s=1.0)

    during(EVERY_S / 2, scenario)
    assert board.taken == [b"here", b"there"]
    assert board.tried[1] <= 3.5


def test_a_failed_announcement_is_tried_again_less_and_less_often() -> None:
    board = Board()
    board.is_down = True

    async def scenario() -> Announcer:
        asyncio.get_running_loop().call_later(200.0, setattr, board, "is_down", False)
        return announcer(board)

    during(400.0, scenario)
    pauses = [later - earlier for earlier, later in zip(board.tried, board.tried[1:], strict=False)]
    assert pauses[0] <= RETRY_S
    assert all(0.8 * RETRY_S * 2**n <= pause <= RETRY_S * 2**n for n, pause in enumerate(pauses[:4]))
    assert max(pauses) <= EVERY_S
    assert len(board.taken) >= 9


def test_what_readers_do_not_need_is_not_announced() -> None:
    board = Board()

    async def is_needed() -> bool:
        return False

    async def scenario() -> Announcer:
        return announcer(board, is_needed=is_needed)

    during(5 * EVERY_S, scenario)
    assert not board.tried


def test_the_end_is_announced_but_not_waited_for() -> None:
    board = Board()

    async def scenario() -> Announcer:
        each = announcer(board, ending=lambda: [Announcement("topic", b"leaving", 60.0)])
        await each.announce()
        await each.withdraw()
        assert board.taken == [b"online", b"leaving"]
        board.is_down = True
        await each.withdraw()

        async def hang(topic: str, body: bytes, *, lifetime_s: float) -> None:
            await asyncio.Future()

        board.publish = hang  # type: ignore[method-assign]
        await each.withdraw(1.0)
        assert asyncio.get_running_loop().time() == 1.0
        return each

    during(1.0, scenario)
