"""Keyboard input of a chat: a pseudo-terminal, and a small process that reads it."""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from swarmnet.cli.chat.keyboard import Keyboard

# The process is in a session of its own, so the terminal that it opens controls it, and Ctrl-C
# reaches it.
READER = """
import os, sys
from pathlib import Path
from swarmnet.cli.chat.keyboard import keyboard
if os.isatty(0):
    os.close(os.open(os.ttyname(0), os.O_RDWR))
with keyboard(Path(sys.argv[1]) if sys.argv[1] else None, ["/route", "/retry", "/quit"]) as keys:
    while (message := keys.read()) is not None:
        print(f"got {message!r}", flush=True)
print("left", flush=True)
"""
CTRL_C, CTRL_D, UP = b"\x03", b"\x04", b"\x1b[A"


class Typist:
    """A typist at a pseudo-terminal: types into a reader, and watches the screen."""

    def __init__(self, leader: int, process: subprocess.Popen[bytes]) -> None:
        self._leader = leader
        self._process = psutil.Process(process.pid)
        self._screen = b""

    def type(self, keys: bytes) -> None:
        os.write(self._leader, keys)

    def see(self, wanted: str) -> None:
        """Wait until the screen shows ``wanted``, after the text that was waited for before."""
        while wanted.encode() not in self._screen:
            self._screen += os.read(self._leader, 4096)
        self._screen = self._screen.split(wanted.encode(), 1)[1]

    def interrupt(self) -> None:
        """Ctrl-C for a reader that waits. CPython's readline ignores a Ctrl-C between its prompt
        and its ``select`` until the next key. A person is never that fast, a test is.
        """
        while self._process.status() != psutil.STATUS_SLEEPING:
            time.sleep(0.001)
        self.type(CTRL_C)


@contextmanager
def reader(history: Path | str) -> Iterator[tuple[Typist, subprocess.Popen[bytes]]]:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(history)],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    try:
        yield Typist(leader, process), process
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_messages_of_one_line_and_of_several(tmp_path: Path) -> None:
    with reader(tmp_path / "history") as (typist, process):
        typist.see("> ")
        for keys, message in (
            (b"hello\n", "'hello'"),
            (b'"""one\ntwo"""\n', "'one\\ntwo'"),
            (b"one \\\ntwo\n", "'one \\ntwo'"),
            (b"/rou\t\n", "'/route"),
        ):
            typist.type(keys)
            typist.see(f"got {message}")
        typist.see("> ")
        typist.type(CTRL_D)
        typist.see("left")
        assert process.wait(timeout=30) == 0


def test_the_history_of_a_chat_is_private_and_read_by_the_next_chat(tmp_path: Path) -> None:
    history = tmp_path / "state" / "history"
    with reader(history) as (typist, process):
        typist.see("> ")
        typist.type(b"a secret\n")
        typist.see("got")
        typist.see("> ")
        typist.type(CTRL_D)
        process.wait(timeout=30)
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.parent.stat().st_mode & 0o777 == 0o700
    with reader(history) as (typist, _):
        typist.see("> ")
        typist.type(UP + b"\n")
        typist.see("got 'a secret'")


def test_without_a_history_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with reader("") as (typist, process):
        typist.see("> ")
        typist.type(b"a secret\n")
        typist.see("got")
        typist.see("> ")
        typist.type(CTRL_D)
        process.wait(timeout=30)
    assert not list(tmp_path.iterdir())


def test_only_a_second_ctrl_c_right_after_the_first_leaves_the_chat(tmp_path: Path) -> None:
    with reader(tmp_path / "history") as (typist, process):
        typist.see("> ")
        typist.type(b"half a messa")
        typist.see("half a messa")
        typist.interrupt()
        typist.see("Ctrl-C again")
        typist.type(b"hello\n")
        typist.see("got 'hello'")
        typist.see("> ")
        typist.interrupt()
        typist.see("Ctrl-C again")
        typist.see("> ")
        typist.interrupt()
        typist.see("KeyboardInterrupt")
        assert process.wait(timeout=30) != 0


def test_without_a_terminal_each_line_is_a_message() -> None:
    program = READER.replace("sys.argv[1]", "''")
    done = subprocess.run(
        [sys.executable, "-c", program], input="one\ntwo", capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["got 'one'", "got 'two'", "left"]


def test_a_message_that_never_ends_is_not_read_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnet.cli.chat.keyboard.MAX_MESSAGE_CHARS", 100)
    lines = iter(['"""x' * 10] * 1000)
    monkeypatch.setattr("swarmnet.cli.chat.keyboard.Keyboard._line", lambda *_: next(lines))
    message = Keyboard(is_terminal=False).read()
    assert message is not None
    assert len(message) < 200
