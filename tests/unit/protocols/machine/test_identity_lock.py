"""The lock on an identity: one process has it, and other processes get an error that names it."""

import fcntl
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine import identity_lock
from swarmnet_protocols.machine.identity_lock import identity_in_use
from swarmnet_protocols.net.identity import Identity
from tests.defences import defence, nothing, replacing

HOLD = """
import sys
from pathlib import Path
from swarmnet_protocols.machine.identity_lock import identity_in_use
with identity_in_use(Path(sys.argv[1]), alone=sys.argv[2] == "alone"):
    print("held", flush=True)
    sys.stdin.read()
"""


def made_in(folder: Path) -> Path:
    path = folder / "identity.key"
    Identity.load_or_create(path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return made_in(tmp_path)


@contextmanager
def another_process(path: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A process that uses the identity while the context is open."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, path, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


@defence("one process uses an identity", off=replacing(fcntl, "flock", nothing), first="alone", second=True)
@pytest.mark.parametrize(("first", "second"), [("alone", True), ("alone", False), ("shared", True)])
def test_a_dialled_peer_shares_its_identity_with_no_other(path: Path, first: str, second: bool) -> None:
    with another_process(path, first) as other:
        with (
            pytest.raises(ConfigError, match=re.escape(str(path))) as info,
            identity_in_use(path, alone=second),
        ):
            pass
        if sys.platform == "linux":
            assert f"(pid {other.pid})" in str(info.value)
        assert "--data-dir" in info.value.hint


def test_peers_that_only_dial_share_an_identity(path: Path) -> None:
    with another_process(path, "shared"), identity_in_use(path, alone=False):
        Identity.load_or_create(path)


def test_the_identity_of_a_process_that_was_killed_is_free(path: Path) -> None:
    with another_process(path, "alone") as other:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
        with identity_in_use(path, alone=True):
            pass


def test_another_identity_and_one_that_was_given_back_are_free(path: Path, tmp_path: Path) -> None:
    Identity.load_or_create(tmp_path / "other.key")
    with identity_in_use(path, alone=True), identity_in_use(tmp_path / "other.key", alone=True):
        pass
    with identity_in_use(path, alone=True):
        pass


def test_no_holder_of_a_lock_is_named_where_the_system_tells_none(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_lock, "_LOCKS", path.parent / "no such file")
    with (
        identity_in_use(path, alone=True),
        pytest.raises(ConfigError, match="another process uses this identity"),
        identity_in_use(path, alone=True),
    ):
        pass


def test_an_identity_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"), identity_in_use(tmp_path / "none.key", alone=True):
        pass
