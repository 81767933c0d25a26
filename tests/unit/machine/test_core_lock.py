"""The core lock: nodes of one machine compute one after the other, and no process can keep the others from computing."""

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
from swarmnet_protocols.machine import core_lock
from swarmnet_protocols.machine.core_lock import (
    NO_CORE_LOCK,
    CoreLock,
    FileCoreLock,
    default_folder,
    open_core_lock,
)

HOLD = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"


def test_exclusive_holders_do_not_overlap_and_alternate(tmp_path: Path) -> None:
    order: list[str] = []

    async def is_waited_for() -> None:
        """Return when the other holder waits: it then holds the queue."""
        with (tmp_path / "t" / "queue").open("w") as queue:
            while True:
                try:
                    fcntl.flock(queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return
                fcntl.flock(queue, fcntl.LOCK_UN)
                await asyncio.sleep(0.001)

    async def compute(name: str, mine: CoreLock, busy: set[str]) -> None:
        for _ in range(5):
            async with mine.exclusive():
                busy.add(name)
                assert busy == {name}
                order.append(name)
                if len(order) - order.count(name) < 5:  # the other holder has not ended
                    await is_waited_for()
                busy.remove(name)

    async def main() -> None:
        busy: set[str] = set()
        with FileCoreLock.open(tmp_path / "t") as first, FileCoreLock.open(tmp_path / "t") as second:
            async with asyncio.TaskGroup() as group:
                group.create_task(compute("a", first, busy))
                group.create_task(compute("b", second, busy))

    asyncio.run(main())
    assert order in (["a", "b"] * 5, ["b", "a"] * 5)


def test_exclusive_waits_for_all_shared_holders(tmp_path: Path) -> None:
    order: list[str] = []

    async def main(*mine: CoreLock) -> None:
        inside: set[str] = set()
        met = asyncio.Event()

        async def shared(one: CoreLock, name: str) -> None:
            async with one.shared():
                order.append(name)
                inside.add(name)
                if len(inside) == 2:
                    met.set()
                await met.wait()
                await asyncio.sleep(0.01)
                inside.remove(name)

        async def alone(one: CoreLock) -> None:
            async with one.exclusive():
                assert not inside
                order.append("alone")

        async with asyncio.timeout(50), asyncio.TaskGroup() as group:
            group.create_task(shared(mine[0], "a"))
            group.create_task(shared(mine[1], "b"))
            await met.wait()
            group.create_task(alone(mine[2]))
            await asyncio.sleep(0)  # the exclusive holder waits in the queue
            group.create_task(shared(mine[3], "late"))

    with ExitStack() as stack:
        asyncio.run(main(*(stack.enter_context(FileCoreLock.open(tmp_path / "t")) for _ in range(4))))
    assert (set(order[:2]), order[2:]) == ({"a", "b"}, ["alone", "late"])


def test_shared_tells_whether_other_nodes_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def has_others(mine: CoreLock) -> bool:
        async with mine.shared() as others:
            return others

    async def main(first: CoreLock, second: CoreLock, third: CoreLock) -> None:
        assert [await has_others(first) for _ in range(3)] == [False] * 3
        assert await has_others(second)
        assert [await has_others(first) for _ in range(3)] == [True] * 3  # the other may compute again
        monkeypatch.setattr(core_lock, "RECENT_S", 0.0)
        assert not await has_others(first)
        monkeypatch.undo()
        async with third.exclusive():
            pass
        assert await has_others(first)

    with ExitStack() as stack:
        asyncio.run(main(*(stack.enter_context(FileCoreLock.open(tmp_path / "t")) for _ in range(3))))


def test_exclusive_waits_for_brief_holders(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second, node = (stack.enter_context(FileCoreLock.open(tmp_path / "t")) for _ in range(3))
        inside = []

        async def alone() -> None:
            async with node.exclusive():
                inside.append("node")

        async def main() -> None:
            with first.briefly():
                with second.briefly():
                    computing = asyncio.create_task(alone())
                    await asyncio.sleep(0.02)
                    assert not inside
                await asyncio.sleep(0.02)
                assert not inside
            await computing

        asyncio.run(main())
        assert inside == ["node"]


def test_briefly_waits_for_an_exclusive_holder_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        client, node = (stack.enter_context(FileCoreLock.open(tmp_path / "t")) for _ in range(2))

        def brief() -> float:
            began = time.monotonic()
            with client.briefly():
                return time.monotonic() - began

        async def main(held_s: float) -> float:
            async with node.exclusive():
                waiting = asyncio.create_task(asyncio.to_thread(brief))
                await asyncio.sleep(held_s)
                if held_s > core_lock.BRIEF_WAIT_S:
                    return await waiting  # while the lock is held
            return await waiting

        assert asyncio.run(main(10 * core_lock.BRIEF_WAIT_S)) >= core_lock.BRIEF_WAIT_S
        monkeypatch.setattr(core_lock, "BRIEF_WAIT_S", 50.0)
        assert asyncio.run(main(0.1)) >= 0.09


@contextmanager
def silent_holder(file: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that holds the lock without signs of life, as a stopped one."""
    command = [sys.executable, "-c", HOLD, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        yield holder


def test_a_stopped_holder_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_s = core_lock.STOPPED_S

    async def main(mine: CoreLock) -> None:
        loop = asyncio.get_running_loop()
        with silent_holder(tmp_path / "t" / "cores") as holder:
            began = loop.time()
            async with mine.exclusive():
                assert loop.time() - began >= stopped_s
            monkeypatch.setattr(
                core_lock, "STOPPED_S", 1000.0
            )  # a wait, which should not happen, fails the test
            async with asyncio.timeout(50):
                for _ in range(2):
                    async with mine.exclusive():
                        pass
            holder.kill()
            monkeypatch.setattr(core_lock, "STOPPED_S", stopped_s)
        async with mine.exclusive():  # the lock was free again, so the next holder is waited for
            pass
        with silent_holder(tmp_path / "t" / "cores") as holder:
            began = loop.time()
            async with mine.exclusive():
                assert loop.time() - began >= stopped_s
            holder.kill()

    with FileCoreLock.open(tmp_path / "t") as mine:
        asyncio.run(main(mine))


def test_a_wait_that_timed_out_does_not_lock_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(impatient: CoreLock, other: CoreLock) -> None:
        with silent_holder(tmp_path / "t" / "cores") as holder:
            async with impatient.exclusive():
                pass
            monkeypatch.setattr(core_lock, "BRIEF_WAIT_S", 0.0)
            with impatient.briefly():
                pass
            monkeypatch.setattr(core_lock, "STOPPED_S", 1000.0)
            holder.kill()
            holder.wait()
            async with asyncio.timeout(50), other.exclusive():
                pass

    with FileCoreLock.open(tmp_path / "t") as first, FileCoreLock.open(tmp_path / "t") as second:
        asyncio.run(main(first, second))


def test_a_cancelled_wait_does_not_lock_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_lock, "STOPPED_S", 1000.0)

    async def main(first: CoreLock, second: CoreLock, third: CoreLock) -> None:
        async def take() -> None:
            async with second.exclusive():
                raise AssertionError

        async with asyncio.timeout(50):
            async with first.exclusive():
                waiting = asyncio.create_task(take())
                await asyncio.sleep(0.02)  # it is blocked in the kernel
                waiting.cancel()
                await asyncio.wait([waiting])
                assert waiting.cancelled()
            async with third.exclusive():
                pass

    with ExitStack() as stack:
        asyncio.run(main(*(stack.enter_context(FileCoreLock.open(tmp_path / "t")) for _ in range(3))))


def test_a_late_lock_does_not_release_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_lock, "BRIEF_WAIT_S", 0.01)
    with FileCoreLock.open(tmp_path / "t") as mine, (tmp_path / "t" / "cores").open("w+") as theirs:
        for _ in range(50):
            fcntl.flock(theirs, fcntl.LOCK_EX)
            with mine.briefly():  # its request stays in the kernel
                pass
            fcntl.flock(theirs, fcntl.LOCK_UN)
            with mine.briefly():
                time.sleep(0.002)  # the late lock comes
                with pytest.raises(BlockingIOError):
                    fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_that_comes_after_close_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_lock, "BRIEF_WAIT_S", 0.01)
    (tmp_path / "t").mkdir(mode=0o700)
    with (tmp_path / "t" / "cores").open("w+") as theirs:
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with FileCoreLock.open(tmp_path / "t") as mine, mine.briefly():
            pass
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "core lock")
        fcntl.flock(theirs, fcntl.LOCK_UN)
        thread.join(50)  # an error in it would be a warning
        fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_waiting_thread_ends(tmp_path: Path) -> None:
    async def main(first: CoreLock, second: CoreLock) -> None:
        async def take() -> None:
            async with second.exclusive():
                pass

        async with first.exclusive():
            waiting = asyncio.create_task(take())
            await asyncio.sleep(0.02)
        await waiting

    with FileCoreLock.open(tmp_path / "t") as first, FileCoreLock.open(tmp_path / "t") as second:
        asyncio.run(main(first, second))
        threads = [thread for thread in threading.enumerate() if thread.name == "core lock"]
        assert threads
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()


def test_a_holder_that_computes_is_waited_for(tmp_path: Path) -> None:
    async def main(first: CoreLock, second: CoreLock, third: CoreLock) -> None:
        held = 0

        async def compute(mine: CoreLock) -> None:
            nonlocal held
            async with mine.exclusive():
                held += 1
                assert held == 1
                await asyncio.sleep(2 * core_lock.STOPPED_S)
                held -= 1

        async with asyncio.TaskGroup() as group:
            for mine in (first, second, third):  # one holder computes, one is next, one waits in the queue
                group.create_task(compute(mine))

    with ExitStack() as stack:
        asyncio.run(main(*(stack.enter_context(FileCoreLock.open(tmp_path / "t")) for _ in range(3))))


def test_the_lock_of_a_dead_process_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_lock, "STOPPED_S", 30.0)
    with FileCoreLock.open(tmp_path / "t") as mine, silent_holder(tmp_path / "t" / "cores") as holder:

        async def main() -> None:
            loop = asyncio.get_running_loop()
            began = loop.time()
            loop.call_later(0.02, holder.kill)
            async with mine.exclusive():
                assert 0.02 <= loop.time() - began < core_lock.STOPPED_S

        asyncio.run(main())


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "t").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="another user"), FileCoreLock.open(tmp_path / "t"):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="exists"), FileCoreLock.open(tmp_path / "file"):
        pass


def test_without_a_usable_folder_there_is_no_lock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with open_core_lock(tmp_path / "file") as none:
        assert none is NO_CORE_LOCK
    assert "more slowly" in caplog.text


def test_no_other_user_can_create_the_folder() -> None:
    home = default_folder().parent.parent
    assert home.stat().st_uid == os.getuid()
    assert not home.stat().st_mode & stat.S_IWOTH
