"""Default folders of this user, and the lock that lets one process use a data directory."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.files import make_private
from swarmnet_protocols.machine.platform import lock

_APP = "swarmnet"

TRANSPORT_VARIABLE = "SWARMNET_TRANSPORT"
"""Environment variable that chooses the transport: p2pd, libp2p or auto."""


def default_data_dir() -> Path:
    """Return the folder of a node's key, control socket and addresses."""
    return _of_user(platformdirs.user_data_path)


def default_cache_dir() -> Path:
    """Return the folder of model files, which can be fetched again."""
    return _of_user(platformdirs.user_cache_path)


def default_state_dir() -> Path:
    """Return the folder of what commands remember about each other."""
    return _of_user(platformdirs.user_state_path)


def default_history() -> Path:
    """Return the file with the lines typed in chats."""
    return default_state_dir() / "chat_history"


def _of_user(find: Callable[..., Path]) -> Path:
    try:
        return find(_APP, appauthor=False)
    except RuntimeError as error:
        raise ConfigError(
            "this user has no home directory", hint="set HOME, or give --data-dir DIR and --cache-dir DIR"
        ) from error


class DataDirInUse(ConfigError):
    """Another process has locked a data directory."""


@contextmanager
def locked_data_dir(data_dir: Path) -> Iterator[Path]:
    """Lock ``data_dir``, created with mode 0700 if absent, until the context or the process ends.

    Raises ``DataDirInUse``, and ``ConfigError`` if the folder cannot be used at all.
    """
    try:
        make_private(data_dir)
        descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigError(
            f"cannot use the data directory {data_dir}: {why}",
            hint="make it a folder that you may write, or choose another one with --data-dir",
        ) from error
    try:
        try:
            lock(descriptor)
        except BlockingIOError as error:
            raise DataDirInUse(
                f"another command already runs with the data directory {data_dir}",
                hint="give this one another --data-dir, or stop the other; a node: swarmnet finish --data-dir DIR",
            ) from error
        yield data_dir
    finally:
        os.close(descriptor)
