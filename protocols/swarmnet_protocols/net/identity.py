"""The identity of a peer: an Ed25519 key, and the libp2p peer id that contains its public key."""

import hashlib
import os
import tempfile
from pathlib import Path

from base58 import b58decode, b58encode
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.files import make_private
from swarmnet_protocols.machine.platform import mode_for_others
from swarmnet_protocols.net import PeerId

KEY_BYTES = 32
SIGNATURE_BYTES = 64

# libp2p's crypto.proto, {Type: Ed25519, Data: ...}. The data of a private key is the seed, then the
# public key.
_PRIVATE_KEY_PREFIX = b"\x08\x01\x12\x40"
_PUBLIC_KEY_PREFIX = b"\x08\x01\x12\x20"
_IDENTITY_MULTIHASH_PREFIX = b"\x00\x24"
_FILE_BYTES = len(_PRIVATE_KEY_PREFIX) + 2 * KEY_BYTES

MAX_PEER_ID_CHARS = 128


class Identity:
    """An Ed25519 key pair."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public_key: bytes = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.peer_id: PeerId = peer_id_of(self.public_key)

    @classmethod
    def from_seed(cls, seed: bytes) -> "Identity":
        """Return an identity derived from a seed of any length. For simulations and tests."""
        return cls(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(seed).digest()))

    @classmethod
    def load_or_create(cls, path: Path) -> "Identity":
        """Load the identity from ``path``, or create the file (0600, in p2pd's format).

        Raises ``ConfigError`` if others can read the file, if it is not an Ed25519 key, or if it
        cannot be written.
        """
        try:
            if not path.exists():
                _create_key_file(path)
            return _read_key_file(path)
        except OSError as error:
            raise ConfigError(
                f"cannot use the identity file {path}: {error.strerror}", hint="choose another --data-dir"
            ) from error

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data)

    def seed(self) -> bytes:
        """Return the private key, for libraries that prove this identity themselves."""
        return self._key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())


def verify(public_key: bytes, signature: bytes, data: bytes) -> bool:
    """Tell whether ``signature`` is a signature of ``data`` by ``public_key``."""
    if len(public_key) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except InvalidSignature:
        return False
    return True


def peer_id_of(public_key: bytes) -> PeerId:
    """Return the libp2p peer id of a raw Ed25519 public key. Raises ``ValueError`` for another
    size.
    """
    if len(public_key) != KEY_BYTES:
        raise ValueError(f"an Ed25519 public key has {KEY_BYTES} bytes, not {len(public_key)}")
    return PeerId(b58encode(_IDENTITY_MULTIHASH_PREFIX + _PUBLIC_KEY_PREFIX + public_key).decode())


def public_key_of(peer: PeerId) -> bytes:
    """Return the raw Ed25519 public key in a peer id. Raises ``ValueError`` for an id without
    one."""
    key = b58decode(peer[:MAX_PEER_ID_CHARS])[-KEY_BYTES:]
    if peer_id_of(key) != peer:
        raise ValueError(f"{peer[:MAX_PEER_ID_CHARS]} is not the peer id of an Ed25519 key")
    return key


def _create_key_file(path: Path) -> None:
    make_private(path.parent)
    key = Ed25519PrivateKey.generate()
    seed = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(_PRIVATE_KEY_PREFIX + seed + public)
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, never replaces a key that another process created meanwhile.
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(temporary)


def _read_key_file(path: Path) -> Identity:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        data = file.read(_FILE_BYTES + 1)
    if mode_for_others(status):
        raise ConfigError(f"the identity file {path} can be read by others", hint=f"chmod 600 {path}")
    corrupt = ConfigError(
        f"the identity file {path} is not an Ed25519 key", hint="move it away to get a new identity"
    )
    if len(data) != _FILE_BYTES or not data.startswith(_PRIVATE_KEY_PREFIX):
        raise corrupt
    seed, public = data[-2 * KEY_BYTES : -KEY_BYTES], data[-KEY_BYTES:]
    identity = Identity(Ed25519PrivateKey.from_private_bytes(seed))
    if identity.public_key != public:
        raise corrupt
    return identity
