"""A lock on the identity file: only one process at a time is reachable under an identity.

Two such processes would share one peer's messages.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.platform import lock

_LOCKS = Path("/proc/locks")


@contextmanager
def identity_in_use(path: Path, *, alone: bool) -> Iterator[None]:
    """Hold the lock on the identity file ``path`` while the context is open.

    The kernel releases the lock if the process dies. ``alone``: this process can be dialled, so it
    needs the lock for itself. Processes that only dial share the lock.

    Raises ``ConfigError`` if another process holds the lock. The message names its pid where the
    system tells it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(
            f"cannot use the identity file {path}: {error.strerror}", hint="choose another --data-dir"
        ) from error
    try:
        try:
            lock(descriptor, shared=not alone)
        except BlockingIOError as error:
            holders = ", ".join(f"pid {pid}" for pid in _holders(descriptor))
            raise ConfigError(
                f"another process{f' ({holders})' if holders else ''} uses this identity: {path}",
                hint="stop it first, or give this one another --data-dir: two processes with one identity are not two peers",
            ) from error
        except OSError as error:
            raise ConfigError(
                f"cannot lock the identity file {path}: {error.strerror}",
                hint="choose a --data-dir on a local disk",
            ) from error
        yield
    finally:
        os.close(descriptor)


def _holders(descriptor: int) -> list[int]:
    """Return the processes that hold a lock on a file. Only Linux tells them."""
    if sys.platform != "linux":
        return []
    info = os.fstat(descriptor)
    file = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return []
    locks = [fields for line in lines if len(fields := line.split()) > 5 and fields[5] == file]
    return sorted({int(fields[4]) for fields in locks if fields[1] == "FLOCK" and int(fields[4]) > 0})
