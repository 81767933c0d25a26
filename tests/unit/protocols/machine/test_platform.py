"""What differs between systems. No Windows is here: its branches run on stand-ins for what only it
has, in processes of their own.

``msvcrt`` is made of POSIX record locks, which belong to a process and cover ranges of bytes, as
Windows' locks do.
"""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

WINDOWS = '''
import asyncio, fcntl, os, signal, socket, subprocess, sys, types
import platformdirs, psutil

def locking(descriptor, mode, count):
    kinds = {0: fcntl.LOCK_UN, 2: fcntl.LOCK_EX | fcntl.LOCK_NB}
    place = os.lseek(descriptor, 0, os.SEEK_CUR)
    writable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)  # POSIX wants that; its close would release the lock
    try:
        fcntl.lockf(writable, kinds[mode], count, place)
    except BlockingIOError as error:
        raise PermissionError(13, "Permission denied") from error

msvcrt = types.ModuleType("msvcrt")
msvcrt.locking, msvcrt.LK_UNLCK, msvcrt.LK_NBLCK = locking, 0, 2
subprocess.CREATE_NEW_PROCESS_GROUP, signal.SIGBREAK = 0x200, signal.SIGUSR1
def become_windows():
    """What was imported before keeps to Linux."""
    absent = ("fcntl", "resource", "uvloop", "readline", "termios", "pwd", "grp")
    sys.modules |= {"msvcrt": msvcrt} | dict.fromkeys(absent)
    sys.platform = "win32"
    for name in ("SO_REUSEPORT", "AF_NETLINK"):
        delattr(socket, name)
    for name in ("getuid", "geteuid", "O_DIRECTORY", "O_CLOEXEC", "pread", "pwrite", "set_blocking", "major", "minor"):
        delattr(os, name)
'''
IMPORT_ALL = (
    WINDOWS
    + """
import importlib, pkgutil
sys.modules["uvloop"] = None
from swarmnet_protocols.machine.lean_imports import import_transformers
from swarmnet_protocols.net.p2pd.daemon import prepare_hivemind
import_transformers()
prepare_hivemind()  # hivemind imports uvloop

def import_all():
    for package in ("swarmnet_protocols", "swarmnet_client", "swarmnet_node", "swarmnet"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
            is_optional = module.name.startswith("swarmnet_protocols.net.pylibp2p.")  # py-libp2p is
            if not is_optional and not module.name.endswith("__main__"):
                importlib.import_module(module.name)

import_all()  # with all that it imports of others
for name in [name for name in sys.modules if name.startswith("swarmnet")]:
    del sys.modules[name]
become_windows()
import_all()
print(sys.modules["swarmnet_protocols.machine.platform"].HAS_UNIX_SOCKETS)
"""
)
HOLD = (
    WINDOWS
    + """
become_windows()
from swarmnet_protocols.machine.platform import lock
descriptor = os.open(sys.argv[1], os.O_RDWR)
for how in sys.argv[2:]:
    try:
        lock(descriptor, shared=how == "shared", wait=how == "wait")
        print(how, flush=True)
    except BlockingIOError:
        print("held", flush=True)
sys.stdin.read()
"""
)
USE_FILES = (
    WINDOWS
    + """
become_windows()
from pathlib import Path
from swarmnet.paths import locked_data_dir
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.files import scratch_folder, write_whole
from swarmnet_protocols.machine.identity_lock import identity_in_use
from swarmnet_protocols.machine.platform import folder_descriptor, sync
from swarmnet_protocols.net.identity import Identity
folder = Path(sys.argv[1])
with locked_data_dir(folder / "data"):
    key = folder / "data" / "identity.key"
    made = Identity.load_or_create(key)
    key.chmod(0o666)  # as every file on Windows seems to be
    with identity_in_use(key, alone=True):
        assert Identity.load_or_create(key).peer_id == made.peer_id
write_whole(folder / "file", b"whole")
with scratch_folder(folder) as scratch:
    (scratch / "file").touch()
os.close(folder_descriptor(folder))
sync(folder)
print(*sorted(path.name for path in folder.iterdir()))
"""
)
STOP = (
    WINDOWS
    + """
import typer
become_windows()
from swarmnet.cli.interrupts import Interrupts, run_until_stopped

async def main():
    stopped = asyncio.Event()
    Interrupts.catch().first = stopped.set
    print(type(asyncio.get_running_loop()).__module__.partition(".")[0], flush=True)
    await stopped.wait()
    print("first", flush=True)
    await asyncio.sleep(50)

try:
    run_until_stopped(main())
except KeyboardInterrupt:
    print("second", flush=True)
"""
)


@contextmanager
def process(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


def line(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().rstrip("\n")


def test_every_module_is_imported_without_what_only_posix_has() -> None:
    with process(IMPORT_ALL) as started:
        assert line(started) == "False"


@pytest.mark.parametrize(
    ("first", "second", "is_held"),
    [
        ("alone", "alone", True),
        ("alone", "shared", True),
        ("shared", "alone", True),
        ("shared", "shared", False),
    ],
)
def test_windows_locks_of_bytes_are_exclusive_or_shared(
    tmp_path: Path, first: str, second: str, is_held: bool
) -> None:
    path = tmp_path / "file"
    path.touch()
    with process(HOLD, path, first) as holder:
        assert line(holder) == first
        with process(HOLD, path, second) as other:
            assert line(other) == ("held" if is_held else second)
        with process(HOLD, path, "wait") as waiting:
            holder.kill()  # its locks end with it
            assert line(waiting) == "wait"


def test_keys_folders_and_locks_work_without_modes_and_owners(tmp_path: Path) -> None:
    with process(USE_FILES, tmp_path) as started:
        assert line(started) == ".lock data file"


def test_signals_are_handled_by_event_loops_without_signal_handlers(tmp_path: Path) -> None:
    with process(STOP) as started:
        assert line(started) == "asyncio"
        started.terminate()
        assert line(started) == "first"
        started.terminate()
        assert line(started) == "second"
