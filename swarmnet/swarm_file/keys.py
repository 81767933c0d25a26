"""Files that hold secrets: keys of authorities and issuers (Ed25519 in PEM), and API keys. A key
file that other users can read is refused."""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.machine.platform import mode_for_others

if TYPE_CHECKING:
    from swarmnet_protocols.net.identity import Identity

KEY_NAME = "authority.key"
API_KEY = "SWARMNET_API_KEY"
"""Environment variable with the API key of an endpoint. It is not an option, because all users of a
machine can read command lines."""
_MAX_KEY_BYTES = 4096
_MOUNTED = Path("/run/secrets")
"""Where container engines mount secrets. File modes there protect nothing, because a container has
one user."""


def create_key(path: Path) -> "Identity":
    """Generate a key and write it to ``path`` with mode 0600. Raises ``ConfigError`` if ``path``
    exists."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from swarmnet_protocols.net.identity import Identity

    if path.exists():
        raise ConfigError(
            f"{path} already exists", hint="choose another file: a key that is overwritten cannot be restored"
        )
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_whole(path, pem, mode=0o600)
    return Identity(key)


def load_key(path: Path) -> "Identity":
    """Return the key in ``path``. Raises ``ConfigError`` if the file holds no Ed25519 key or other
    users can read it."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from swarmnet_protocols.net.identity import Identity

    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            pem = stream.read(_MAX_KEY_BYTES)
        key = serialization.load_pem_private_key(pem, password=None)
    except OSError as error:
        raise ConfigError(
            f"cannot read the key {path}: {error.strerror}", hint="restore it from your backup"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a key", hint="restore it from your backup") from error
    if mode_for_others(status):
        raise ConfigError(f"the key {path} can be read by others", hint=f"chmod 600 {path}")
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is not an Ed25519 key", hint="restore it from your backup")
    return Identity(key)


def read_secret(path: Path, max_bytes: int) -> str:
    """Return the text in ``path``. Raises ``ConfigError`` if all users of the machine can read it,
    or it is longer than ``max_bytes``."""
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            text = stream.read(max_bytes + 1)
        if len(text) > max_bytes:
            raise ConfigError(f"{path} has more than {max_bytes} bytes", hint="give a text file with a key")
        # The group may read, because stat shows the access list of a systemd credential as group
        # permissions.
        if mode_for_others(status, stat.S_IRWXO) and not path.resolve().is_relative_to(_MOUNTED):
            raise ConfigError(
                f"the key in {path} can be read by every user of this machine", hint=f"chmod 600 {path}"
            )
        return text.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ConfigError(
            f"cannot read the key in {path}: {why}", hint="give a text file with a key"
        ) from error
