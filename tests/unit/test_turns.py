"""Nodes of one machine compute one after the other, or knowing of each other, and nobody can keep the others from computing."""

import asyncio
import fcntl
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine import core_lock as turns
from swarmnet_protocols.machine.core_lock import ALONE, CoreLock, default_folder, take_turns

HOLD = "import fcntl, sys; room = open(sys.argv[1], 'w'); fcntl.flock(room, fcntl.LOCK_EX); print(flush=True); input()"


def test_turns_do_not_overlap_and_nobody_goes_twice_while_another_waits(tmp_path: Path) -> None:
    order: list[str] = []

    async def compute(name: str, mine: CoreLock, busy: set[str]) -> None:
        for _ in range(5):
            async with mine.turn():
                busy.add(name)
                assert busy == {name}
                order.append(name)
                await asyncio.sleep(0.005)
                busy.remove(name)

    async def main() -> None:
        busy: set[str] = set()
        with CoreLock.open(tmp_path / "t") as first, CoreLock.open(tmp_path / "t") as second:
            async with asyncio.TaskGroup() as group:
                group.create_task(compute("a", first, busy))
                group.create_task(compute("b", second, busy))

    asyncio.run(main())
    assert sorted(order) == ["a"] * 5 + ["b"] * 5
    assert order[:8] in (["a", "b"] * 4, ["b", "a"] * 4)


def test_some_compute_beside_each_other_and_a_turn_waits_for_all_of_them(tmp_path: Path) -> None:
    order: list[str] = []

    async def main(*mine: CoreLock) -> None:
        inside: set[str] = set()
        met = asyncio.Event()

        async def beside(one: CoreLock, name: str) -> None:
            async with one.beside():
                order.append(name)
                inside.add(name)
                if len(inside) == 2:
                    met.set()
                await met.wait()
                await asyncio.sleep(0.01)
                inside.remove(name)

        async def alone(one: CoreLock) -> None:
            async with one.turn():
                assert not inside
                order.append("alone")

        async with asyncio.timeout(50), asyncio.TaskGroup() as group:
            group.create_task(beside(mine[0], "a"))
            group.create_task(beside(mine[1], "b"))
            await met.wait()
            group.create_task(alone(mine[2]))
            await asyncio.sleep(0)  # it is at the door
            group.create_task(beside(mine[3], "late"))

    with ExitStack() as stack:
        asyncio.run(main(*(stack.enter_context(CoreLock.open(tmp_path / "t")) for _ in range(4))))
    assert (set(order[:2]), order[2:]) == ({"a", "b"}, ["alone", "late"])


def test_who_computes_beside_others_knows_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def sees_others(mine: CoreLock) -> bool:
        async with mine.beside() as are_others:
            return are_others

    async def main(first: CoreLock, second: CoreLock, third: CoreLock) -> None:
        assert [await sees_others(first) for _ in range(3)] == [False] * 3
        assert await sees_others(second)
        assert [await sees_others(first) for _ in range(3)] == [True] * 3  # the other may come again
        monkeypatch.setattr(turns, "RECENT_S", 0.0)
        assert not await sees_others(first)
        monkeypatch.undo()
        async with third.turn():
            pass
        assert await sees_others(first)

    with ExitStack() as stack:
        asyncio.run(main(*(stack.enter_context(CoreLock.open(tmp_path / "t")) for _ in range(3))))


def test_clients_share_the_room_and_a_turn_waits_for_them(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second, node = (stack.enter_context(CoreLock.open(tmp_path / "t")) for _ in range(3))
        inside = []

        async def alone() -> None:
            async with node.turn():
                inside.append("node")

        async def main() -> None:
            with first.share():
                with second.share():
                    turn = asyncio.create_task(alone())
                    await asyncio.sleep(0.02)
                    assert not inside
                await asyncio.sleep(0.02)
                assert not inside
            await turn

        asyncio.run(main())
        assert inside == ["node"]


def test_a_client_waits_for_a_turn_but_not_for_a_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        client, node = (stack.enter_context(CoreLock.open(tmp_path / "t")) for _ in range(2))

        def share() -> float:
            began = time.monotonic()
            with client.share():
                return time.monotonic() - began

        async def main(turn_s: float) -> float:
            async with node.turn():
                sharing = asyncio.create_task(asyncio.to_thread(share))
                await asyncio.sleep(turn_s)
                if turn_s > turns.SHARING_PATIENCE_S:
                    return await sharing  # within the turn
            return await sharing

        assert asyncio.run(main(10 * turns.SHARING_PATIENCE_S)) >= turns.SHARING_PATIENCE_S
        monkeypatch.setattr(turns, "SHARING_PATIENCE_S", 50.0)
        assert asyncio.run(main(0.1)) >= 0.09


@contextmanager
def silent_holder(room: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that holds the room and gives no sign, as a stopped one does not."""
    command = [sys.executable, "-c", HOLD, str(room)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield holder


def test_who_gives_no_sign_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patience_s = turns.PATIENCE_S

    async def main(mine: CoreLock) -> None:
        loop = asyncio.get_running_loop()
        with silent_holder(tmp_path / "t" / "room") as holder:
            began = loop.time()
            async with mine.turn():
                assert loop.time() - began >= patience_s
            monkeypatch.setattr(turns, "PATIENCE_S", 1000.0)  # for whoever would wait again
            async with asyncio.timeout(50):
                for _ in range(2):
                    async with mine.turn():
                        pass
            holder.kill()
            monkeypatch.setattr(turns, "PATIENCE_S", patience_s)
        async with mine.turn():  # the room is free again, so it is waited for again
            pass
        with silent_holder(tmp_path / "t" / "room") as holder:
            began = loop.time()
            async with mine.turn():
                assert loop.time() - began >= patience_s
            holder.kill()

    with CoreLock.open(tmp_path / "t") as mine:
        asyncio.run(main(mine))


def test_who_gave_up_waiting_does_not_get_the_room_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(impatient: CoreLock, other: CoreLock) -> None:
        with silent_holder(tmp_path / "t" / "room") as holder:
            async with impatient.turn():
                pass
            monkeypatch.setattr(turns, "SHARING_PATIENCE_S", 0.0)
            with impatient.share():
                pass
            monkeypatch.setattr(turns, "PATIENCE_S", 1000.0)
            holder.kill()
            holder.wait()
            async with asyncio.timeout(50), other.turn():
                pass

    with CoreLock.open(tmp_path / "t") as first, CoreLock.open(tmp_path / "t") as second:
        asyncio.run(main(first, second))


def test_who_is_cancelled_while_it_waits_does_not_get_the_room_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 1000.0)

    async def main(first: CoreLock, second: CoreLock, third: CoreLock) -> None:
        async def take() -> None:
            async with second.turn():
                raise AssertionError

        async with asyncio.timeout(50):
            async with first.turn():
                waiting = asyncio.create_task(take())
                await asyncio.sleep(0.02)  # it is blocked in the kernel
                waiting.cancel()
                await asyncio.wait([waiting])
                assert waiting.cancelled()
            async with third.turn():
                pass

    with ExitStack() as stack:
        asyncio.run(main(*(stack.enter_context(CoreLock.open(tmp_path / "t")) for _ in range(3))))


def test_a_lock_that_comes_too_late_does_not_end_one_that_was_taken_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "SHARING_PATIENCE_S", 0.01)
    with CoreLock.open(tmp_path / "t") as mine, (tmp_path / "t" / "room").open("w+") as theirs:
        for _ in range(50):
            fcntl.flock(theirs, fcntl.LOCK_EX)
            with mine.share():  # the wish that it gives up is in the kernel
                pass
            fcntl.flock(theirs, fcntl.LOCK_UN)
            with mine.share():
                time.sleep(0.002)  # the lock that was given up comes
                with pytest.raises(BlockingIOError):
                    fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_that_comes_when_all_is_closed_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "SHARING_PATIENCE_S", 0.01)
    (tmp_path / "t").mkdir(mode=0o700)
    with (tmp_path / "t" / "room").open("w+") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with CoreLock.open(tmp_path / "t") as mine, mine.share():
            pass
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "turns")
        fcntl.flock(theirs, fcntl.LOCK_UN)
        thread.join(50)  # what it raised would be a warning
        fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_no_thread_is_left_behind(tmp_path: Path) -> None:
    async def main(first: CoreLock, second: CoreLock) -> None:
        async def take() -> None:
            async with second.turn():
                pass

        async with first.turn():
            waiting = asyncio.create_task(take())
            await asyncio.sleep(0.02)
        await waiting

    with CoreLock.open(tmp_path / "t") as first, CoreLock.open(tmp_path / "t") as second:
        asyncio.run(main(first, second))
        threads = [thread for thread in threading.enumerate() if thread.name == "turns"]
        assert threads
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()


def test_who_goes_on_computing_is_waited_for(tmp_path: Path) -> None:
    async def main(first: CoreLock, second: CoreLock, third: CoreLock) -> None:
        held = 0

        async def compute(mine: CoreLock) -> None:
            nonlocal held
            async with mine.turn():
                held += 1
                assert held == 1
                await asyncio.sleep(2 * turns.PATIENCE_S)
                held -= 1

        async with asyncio.TaskGroup() as group:
            for mine in (first, second, third):  # one computes, one is next, one waits for that
                group.create_task(compute(mine))

    with ExitStack() as stack:
        asyncio.run(main(*(stack.enter_context(CoreLock.open(tmp_path / "t")) for _ in range(3))))


def test_the_turn_of_a_process_that_dies_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 30.0)
    with CoreLock.open(tmp_path / "t") as mine, silent_holder(tmp_path / "t" / "room") as holder:

        async def main() -> None:
            loop = asyncio.get_running_loop()
            began = loop.time()
            loop.call_later(0.02, holder.kill)
            async with mine.turn():
                assert 0.02 <= loop.time() - began < turns.PATIENCE_S

        asyncio.run(main())


def test_a_folder_that_somebody_else_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "t").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="somebody else"), CoreLock.open(tmp_path / "t"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="exists"), CoreLock.open(tmp_path / "file"):
        pass


def test_a_folder_that_cannot_be_used_costs_no_more_than_the_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with take_turns(tmp_path / "file") as none:
        assert none is ALONE
    assert "more slowly" in caplog.text


def test_no_other_user_can_make_the_folder_first() -> None:
    home = default_folder().parent.parent
    assert home.stat().st_uid == os.getuid()
    assert not home.stat().st_mode & stat.S_IWOTH
