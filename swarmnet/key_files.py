"""Key files of authorities and issuers: Ed25519 in PEM, for their owner's eyes only."""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.files import write_whole

if TYPE_CHECKING:
    from swarmnet_protocols.identity import Identity

KEY_NAME = "authority.key"
_MAX_KEY_BYTES = 4096


def create_key(path: Path) -> "Identity":
    """Make a key and write it to ``path`` (0600). Raises ``ConfigError`` if there is something already."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from swarmnet_protocols.identity import Identity

    if path.exists():
        raise ConfigError(f"{path} already exists", hint="choose another file; a key that is lost is gone")
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_whole(path, pem, mode=0o600)
    return Identity(key)


def load_key(path: Path) -> "Identity":
    """The key in ``path``. Raises ``ConfigError`` for a file that is none, or that others can read."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from swarmnet_protocols.identity import Identity

    try:
        with path.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            pem = stream.read(_MAX_KEY_BYTES)
        key = serialization.load_pem_private_key(pem, password=None)
    except OSError as error:
        raise ConfigError(
            f"cannot read the key {path}: {error.strerror}", hint="restore it from your backup"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a key", hint="restore it from your backup") from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(f"the key {path} can be read by others", hint=f"chmod 600 {path}")
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is not an Ed25519 key", hint="restore it from your backup")
    return Identity(key)
