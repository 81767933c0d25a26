"""Reads, verifies, writes and signs `swarm.toml`, the file that lets peers enter a swarm.

The file holds no secret and may be published.
"""

from pathlib import Path

from swarmnet.swarm_file.content import SwarmFile
from swarmnet.swarm_file.reader import MAX_FILE_BYTES, Reader
from swarmnet_protocols.errors import ConfigError, IntegrityError

FILE_NAME = "swarm.toml"


def load(path: Path) -> SwarmFile:
    """Read and verify a swarm file, or the ``swarm.toml`` in a directory.

    Raises ``ConfigError`` with the line of an invalid value, ``IncompatibleVersion`` for a newer
    format, and ``IntegrityError`` for a file that was changed after it was written, or that no
    authorised key signed.
    """
    return parse(read(path), source=str(file_in(path)))


def load_valid(path: Path, now: float) -> SwarmFile:
    """Load a swarm file as ``load`` does. Raises also ``ConfigError`` for a file that has expired
    at ``now`` (Unix time)."""
    file = load(path)
    file.check_not_expired(now)
    return file


def parse(data: bytes, *, source: str = FILE_NAME) -> SwarmFile:
    """Return the verified content of a swarm file. Raises what ``load`` raises; messages name
    ``source``."""
    reader = Reader(decode(data, source), source)
    file = reader.content()
    if reader.swarm_id() != file.swarm_id:
        raise _changed(source)
    if file.authority is not None:
        signature = reader.signature()
        if not file.authority.has_signed_rotations(file.swarm_id) or not file.is_signed_by_authority(
            signature
        ):
            raise _changed(source)
    return file


def read(path: Path) -> bytes:
    """Return the bytes of a swarm file, or of the one in a directory; at most ``MAX_FILE_BYTES`` +
    1, because ``decode`` refuses more."""
    try:
        with file_in(path).open("rb") as stream:
            return stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the swarm file {path}: {error.strerror}",
            hint="create a swarm with `swarmnet swarm create NAME --out DIR`, or get the file from the person who runs it",
        ) from error


def decode(data: bytes, source: str) -> str:
    """Return the text of a swarm file. Raises ``ConfigError`` if it is too large or not UTF-8."""
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{source} is larger than {MAX_FILE_BYTES} bytes", hint="this is not a swarm file")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not a text file", hint="this is not a swarm file") from error


def file_in(path: Path) -> Path:
    """Return the swarm file in ``path`` if that is a directory, else ``path``."""
    return path / FILE_NAME if path.is_dir() else path


def _changed(source: str) -> IntegrityError:
    return IntegrityError(
        f"{source} was changed after it was made",
        hint="if you run the swarm: swarmnet swarm sign; if not, get the file again from the person who does",
    )
