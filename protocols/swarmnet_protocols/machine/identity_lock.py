"""One process at a time is found on the network under an identity: two would be taken for one peer, and each get half of what is its."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swarmnet_protocols.errors import ConfigError

_LOCKS = Path("/proc/locks")


@contextmanager
def identity_in_use(path: Path, *, alone: bool) -> Iterator[None]:
    """Use the identity in the file ``path``, which is there, until the block ends or the process dies.

    Those who only dial may share it; ``alone`` is for whoever is dialled. Raises ``ConfigError``, naming the other process where the
    system tells which it is, when one that is dialled has it, or when anybody has it and we want it alone.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"cannot use the identity file {path}: {error.strerror}", hint="choose another --data-dir"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holders = ", ".join(f"pid {pid}" for pid in _holders(descriptor))
            raise ConfigError(
                f"another process{f' ({holders})' if holders else ''} uses this identity: {path}",
                hint="stop it first, or give this one another --data-dir; a copied identity is no second peer",
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
    """The processes that have locked a file; none where the system does not tell."""
    info = os.fstat(descriptor)
    file = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    try:
        lines = _LOCKS.read_text().splitlines()
    except OSError:
        return []
    locks = [fields for line in lines if len(fields := line.split()) > 5 and fields[5] == file]
    return sorted({int(fields[4]) for fields in locks if fields[1] == "FLOCK" and int(fields[4]) > 0})
