"""``swarm.toml``: what one has to know to enter a swarm. It holds no secret and may be published.

A private swarm has an authority, an Ed25519 key that signs the whole file; the swarm's id is a hash of that key and
the name, so the file can be renewed (a higher ``serial``) without becoming another swarm. An open swarm has a random
nonce instead; its id is a hash of everything but the bootstrap list, which anybody may edit.
"""

import hashlib
import json
import os
import re
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnet.addresses import check_peer_address
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.toml_lines import line_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FILE_NAME = "swarm.toml"
KEY_NAME = "authority.key"
FORMAT = 1
MAX_FILE_BYTES = 64 << 10
MAX_BOOTSTRAPS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ID_DOMAIN = b"swarmnet-swarm-id-1\0"
_SIGNATURE_DOMAIN = b"swarmnet-swarm-file-1\0"


@dataclass(frozen=True)
class SwarmFile:
    """The verified content of a swarm file. Exactly one of ``authority`` (32 bytes) and ``nonce`` (16) is there."""

    name: str
    serial: int
    created: datetime
    not_after: datetime | None
    bootstrap: tuple[str, ...]
    authority: bytes | None = None
    nonce: bytes | None = None

    @property
    def is_open(self) -> bool:
        return self.authority is None

    @property
    def swarm_id(self) -> bytes:
        """32 bytes that name the swarm."""
        fields = self._fields()
        if self.is_open:
            del fields["bootstrap"]
        else:
            fields = {"name": self.name, "authority": fields["authority"]}
        return hashlib.sha256(_ID_DOMAIN + _canonical(fields)).digest()

    def signed_bytes(self) -> bytes:
        """What the authority signs: every field."""
        return _SIGNATURE_DOMAIN + _canonical(self._fields())

    def check_not_expired(self, now: float) -> None:
        """Raise ``ConfigError`` when the file was not to be used any more at ``now`` (Unix seconds)."""
        if self.not_after is not None and now >= self.not_after.timestamp():
            raise ConfigError(
                f"the swarm file of {self.name!r} expired on {self.not_after:%Y-%m-%d}",
                hint="get the current swarm.toml from whoever runs the swarm",
            )

    def _fields(self) -> dict[str, object]:
        return {
            "format": FORMAT,
            "name": self.name,
            "serial": self.serial,
            "created": self.created.isoformat(),
            "not_after": self.not_after.isoformat() if self.not_after else None,
            "bootstrap": list(self.bootstrap),
            "authority": self.authority.hex() if self.authority else None,
            "nonce": self.nonce.hex() if self.nonce else None,
        }


@dataclass(frozen=True)
class NewSwarm:
    """What the founder of a swarm decides."""

    name: str
    bootstrap: tuple[str, ...] = ()
    not_after: datetime | None = None
    is_open: bool = False


def create(directory: Path, new: NewSwarm, *, now: float, overwrite: bool = False) -> SwarmFile:
    """Write ``swarm.toml`` into ``directory`` and, for a private swarm, ``authority.key`` (0600).

    Existing files are refused; with ``overwrite`` the swarm file is written anew, whatever it is, and an authority key that
    is already there is kept: the same name then gives the same swarm, with a higher serial.
    """
    if not _NAME.fullmatch(new.name):
        raise ConfigError(
            f"{new.name!r} cannot name a swarm",
            hint="use 1 to 64 letters, digits, '.', '_' and '-', a letter or digit first",
        )
    if len(new.bootstrap) > MAX_BOOTSTRAPS:
        raise ConfigError("too many bootstrap addresses", hint=f"give {MAX_BOOTSTRAPS} at most")
    for address in new.bootstrap:
        check_peer_address(address)
    toml_path, key_path = directory / FILE_NAME, directory / KEY_NAME
    if not overwrite:
        for path in (toml_path,) if new.is_open else (toml_path, key_path):
            if path.exists():
                raise ConfigError(
                    f"{path} already exists", hint="choose another --out, or replace it with --force"
                )
    created = datetime.fromtimestamp(int(now), UTC)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if new.is_open:
            file = SwarmFile(
                new.name, 1, created, new.not_after, new.bootstrap, nonce=secrets.token_bytes(16)
            )
            _replace(toml_path, _encode(file, signature=None), mode=0o644)
            return file
        key = _load_key(key_path) if key_path.exists() else _create_key(key_path)
        serial = _next_serial(toml_path, now)
        authority = key.public_key().public_bytes_raw()
        file = SwarmFile(new.name, serial, created, new.not_after, new.bootstrap, authority=authority)
        _replace(toml_path, _encode(file, signature=key.sign(file.signed_bytes())), mode=0o644)
    except OSError as error:
        raise ConfigError(
            f"cannot write into {directory}: {error.strerror}", hint="choose another --out"
        ) from error
    return file


def _next_serial(path: Path, now: float) -> int:
    if not path.exists():
        return 1
    try:
        return load(path).serial + 1
    except (ConfigError, IntegrityError):
        # What a damaged file had nobody knows; seconds since 1970 are more than anybody has renewed one.
        return int(now)


def load(path: Path) -> SwarmFile:
    """Read and verify a swarm file, or the ``swarm.toml`` in a directory.

    Raises ``ConfigError``, with the number of the line, for what is not a swarm file, and ``IntegrityError`` for one that
    was changed after it was made.
    """
    if path.is_dir():
        path = path / FILE_NAME
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"cannot read the swarm file {path}: {error.strerror}",
            hint="create a swarm with `swarmnet swarm create NAME --out DIR`, or get the file from whoever runs it",
        ) from error
    return parse(data, source=str(path))


def load_valid(path: Path, now: float) -> SwarmFile:
    """``load``, and refuse a file that has expired at ``now`` (Unix seconds)."""
    file = load(path)
    file.check_not_expired(now)
    return file


def parse(data: bytes, *, source: str = FILE_NAME) -> SwarmFile:
    """The verified content of a swarm file; errors as for ``load``, which name ``source``."""
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{source} is larger than {MAX_FILE_BYTES} bytes", hint="this is not a swarm file")
    try:
        text = data.decode()
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{source} is not valid TOML: {error}", hint="get the file again from whoever runs the swarm"
        ) from error
    return _Reader(document, text, source).read()


class _Reader:
    """Checks a parsed document key by key; knows the line of each key for the messages."""

    def __init__(self, document: Mapping[str, Any], text: str, source: str) -> None:
        self._document = document
        self._text = text
        self._source = source

    def read(self) -> SwarmFile:
        if self._take("", "format", int) != FORMAT:
            raise self._wrong("", "format", f"must be {FORMAT}")
        authority = signature = nonce = None
        if "authority" in self._document:
            authority = self._take_hex("authority", "key", "ed25519:", 32)
            signature = self._take_hex("signature", "ed25519", "", 64)
            sections = {"network", "authority", "signature"}
        else:
            nonce = self._take_hex("", "nonce", "", 16)
            sections = {"network"}
        file = SwarmFile(
            name=self._take("", "name", str),
            serial=self._take("", "serial", int),
            created=self._take_time("created"),
            not_after=self._take_time("not_after") if "not_after" in self._document else None,
            bootstrap=self._take_bootstrap(),
            authority=authority,
            nonce=nonce,
        )
        swarm_id = self._take_hex("", "swarm_id", "sha256:", 32)
        top = {"format", "name", "swarm_id", "serial", "created", "not_after"} | (
            {"nonce"} if nonce else set()
        )
        self._refuse_unknown("", top | sections)
        for section, keys in (("network", {"bootstrap"}), ("authority", {"key"}), ("signature", {"ed25519"})):
            if section in sections:
                self._refuse_unknown(section, keys)
        if not _NAME.fullmatch(file.name):
            raise self._wrong("", "name", "must be 1 to 64 letters, digits, '.', '_' and '-'")
        if not 1 <= file.serial < 1 << 63:
            raise self._wrong("", "serial", "must be a positive number")
        changed = IntegrityError(
            f"{self._source} was changed after it was made",
            hint="get the file again from whoever runs the swarm",
        )
        if swarm_id != file.swarm_id:
            raise changed
        if authority is not None and signature is not None and not _is_signed(file, authority, signature):
            raise changed
        return file

    def _take(self, section: str, key: str, kind: type) -> Any:
        table = self._document.get(section, {}) if section else self._document
        if not isinstance(table, dict):
            raise self._wrong("", section, "must be a table")
        if key not in table:
            where = f" in [{section}]" if section else ""
            raise ConfigError(
                f"{self._source}:{line_of(self._text, section, '')}: the key {key!r}{where} is missing",
                hint="get the complete file from whoever runs the swarm",
            )
        value = table[key]
        if type(value) is not kind:  # a bool is an int to isinstance
            raise self._wrong(section, key, f"must be a {kind.__name__}")
        return value

    def _take_hex(self, section: str, key: str, prefix: str, size: int) -> bytes:
        value = self._take(section, key, str)
        if not re.fullmatch(f"{prefix}[0-9a-f]{{{2 * size}}}", value):
            raise self._wrong(section, key, f"must be {prefix or 'text with'} {2 * size} hexadecimal digits")
        return bytes.fromhex(value.removeprefix(prefix))

    def _take_time(self, key: str) -> datetime:
        value: datetime = self._take("", key, datetime)
        try:
            if value.tzinfo is not None:
                return value.astimezone(UTC)
        except OverflowError:
            pass
        raise self._wrong("", key, "must be a date and time with a time zone")

    def _take_bootstrap(self) -> tuple[str, ...]:
        addresses = self._take("network", "bootstrap", list)
        if len(addresses) > MAX_BOOTSTRAPS:
            raise self._wrong("network", "bootstrap", f"may have {MAX_BOOTSTRAPS} entries at most")
        for address in addresses:
            if not isinstance(address, str):
                raise self._wrong("network", "bootstrap", "must be a list of addresses")
            try:
                check_peer_address(address)
            except ConfigError as error:
                raise self._wrong("network", "bootstrap", f"is wrong: {error}") from error
        return tuple(addresses)

    def _refuse_unknown(self, section: str, known: set[str]) -> None:
        table = self._document[section] if section else self._document
        for key in table:
            if key not in known:
                where = f" in [{section}]" if section else ""
                raise ConfigError(
                    f"{self._source}:{line_of(self._text, section, key)}: unknown key {key!r}{where}",
                    hint=f"remove it; known are {', '.join(sorted(known))}",
                )

    def _wrong(self, section: str, key: str, must: str) -> ConfigError:
        return ConfigError(
            f"{self._source}:{line_of(self._text, section, key)}: {key!r} {must}",
            hint="get the file again from whoever runs the swarm",
        )


def _canonical(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _is_signed(file: SwarmFile, authority: bytes, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(authority).verify(signature, file.signed_bytes())
    except InvalidSignature:
        return False
    return True


def _encode(file: SwarmFile, *, signature: bytes | None) -> bytes:
    lines = [
        "# Publish this file: whoever has it can find the swarm. It holds no secret.",
        f"format = {FORMAT}",
        f'name = "{file.name}"',
        f'swarm_id = "sha256:{file.swarm_id.hex()}"',
        f"serial = {file.serial}",
        f"created = {file.created.isoformat()}",
    ]
    if file.not_after is not None:
        lines.append(f"not_after = {file.not_after.isoformat()}")
    if file.nonce is not None:
        lines.append(f'nonce = "{file.nonce.hex()}"')
    lines += ["", "[network]", "bootstrap = [", *(f'    "{address}",' for address in file.bootstrap), "]"]
    if file.authority is not None and signature is not None:
        lines += ["", "[authority]", f'key = "ed25519:{file.authority.hex()}"']
        lines += ["", "[signature]", f'ed25519 = "{signature.hex()}"']
    return ("\n".join(lines) + "\n").encode()


def _create_key(path: Path) -> "Ed25519PrivateKey":
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _replace(path, pem, mode=0o600)
    return key


def _load_key(path: Path) -> "Ed25519PrivateKey":
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        with path.open("rb") as stream:
            key = serialization.load_pem_private_key(stream.read(MAX_FILE_BYTES), password=None)
    except ValueError as error:
        raise ConfigError(f"{path} is not an authority key", hint="restore it from your backup") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path} is not an Ed25519 key", hint="restore the authority key from your backup")
    return key


def _replace(path: Path, data: bytes, *, mode: int) -> None:
    """Write all of ``data`` under ``path``, or nothing."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
