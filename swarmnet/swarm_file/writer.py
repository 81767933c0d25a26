"""Creates, changes and signs swarm files. Comments and the order of keys are kept."""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnet.addresses import check_peer_address
from swarmnet.swarm_file import FILE_NAME, decode, file_in, load, parse, read
from swarmnet.swarm_file.content import FORMAT, ListedModel, Rotation, SwarmFile, rotation_bytes
from swarmnet.swarm_file.keys import KEY_NAME, create_key, load_key
from swarmnet.swarm_file.reader import MAX_BOOTSTRAPS, NAME, Reader
from swarmnet_protocols.errors import ConfigError, IncompatibleVersion, IntegrityError
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.membership.rules import Admission
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.wire.roles import Role

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

    from swarmnet_protocols.membership.signed import Signer
    from swarmnet_protocols.net.identity import Identity

_ANY = """\
format = 2
name = ""
swarm_id = ""
serial = 1
created = 1970-01-01T00:00:00Z
"""
_TEMPLATE = f"""\
# Publish this file: a peer that has it can find the swarm. It holds no secret.
# To change it: edit, then `swarmnet swarm sign DIR`.
{_ANY}# Who may take part. "certificate": invited peers; "allow-list": the peers under [[allow]]; "open": all peers.
admission = "certificate"

[network]
bootstrap = []
# Whether peers announce themselves in their local networks and find each other there, without a bootstrap address.
mdns = true

[authority]
# The first keys of the swarm. Any one of them signs this file, or any one of the last [[rotation]] if there is one.
keys = []
# Further keys that may invite, admit and revoke members: `swarmnet swarm new-key FILE` makes one.
issuers = []

[policy]
# Validity of certificates: the longest time that a member can be without an issuer. Two thirds of it are over when they are renewed.
certificate_lifetime = "7d"
# Interval at which members exchange their lists of revoked members.
revocation_refresh = "30s"

[signature]
ed25519 = ""
"""
_OPEN_TEMPLATE = f"""\
# Publish this file: a peer that has it can take part in the swarm. It holds no secret.
# Only the bootstrap list may be edited. Any other change makes it the file of another swarm.
{_ANY}nonce = ""
admission = "open"

[network]
bootstrap = []
"""


@dataclass(frozen=True)
class NewSwarm:
    """The founder's choices for a new swarm."""

    name: str
    bootstrap: tuple[str, ...] = ()
    not_after: datetime | None = None
    is_open: bool = False
    """True if the swarm has no authority. Otherwise the swarm admits peers as ``like`` does;
    without ``like``, by certificate."""
    mdns: bool | None = None
    """True if peers find each other in local networks. None: as in ``like``; without ``like``, only
    if there is an authority."""
    like: Path | None = None
    """A swarm file whose admission, policy and other tables are copied."""
    models: tuple[ListedModel, ...] = ()
    """The models of the swarm. Empty: the models of ``like``, or any model."""
    backup_keys: tuple[bytes, ...] = ()
    """Public keys that may sign, in addition to the generated one."""


def create(directory: Path, new: NewSwarm, *, now: float, overwrite: bool = False) -> SwarmFile:
    """Write ``swarm.toml`` into ``directory`` and, unless the swarm is open, ``authority.key``
    (mode 0600).

    Raises ``ConfigError`` if a file exists. With ``overwrite``, the swarm file is replaced, damaged
    or not, and an existing authority key is kept: the same name then gives the same swarm, with a
    higher serial.
    """
    if not NAME.fullmatch(new.name):
        raise ConfigError(
            f"{new.name!r} cannot name a swarm",
            hint="use 1 to 64 letters, digits, '.', '_' and '-', a letter or digit first",
        )
    _check_bootstrap(new.bootstrap)
    path, key_path = directory / FILE_NAME, directory / KEY_NAME
    if not overwrite:
        for each in (path,) if new.is_open else (path, key_path):
            if each.exists():
                raise ConfigError(
                    f"{each} already exists", hint="choose another --out, or replace it with --force"
                )
    document, source = _draft(new)
    document |= {"format": FORMAT, "name": new.name, "created": _time(now)}
    if new.not_after is not None:
        document["not_after"] = new.not_after
    _set(
        document,
        "network",
        "bootstrap",
        list(new.bootstrap) or document.get("network", {}).get("bootstrap", []),
    )
    if new.mdns is not None:
        _set(document, "network", "mdns", new.mdns)
    if new.models:
        _list_models(document, new.models)
    with _writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    if new.is_open:
        document |= {"serial": 1, "nonce": secrets.token_hex(16)}
        return _write(path, document, None, source)
    # The draft is checked with a placeholder key, so that an invalid one leaves no key file behind.
    _fill_authority(document, [bytes(32)])
    document["serial"] = 1
    Reader(_dump(document), source).content()
    key = load_key(key_path) if key_path.exists() else create_key(key_path)
    _fill_authority(document, [key.public_key, *new.backup_keys])
    document["serial"] = _next_serial(path, now)
    return _write(path, document, key, source)


def sign(path: Path, *, now: float, key_path: Path | None = None, bootstrap: Sequence[str] = ()) -> SwarmFile:
    """Sign an edited file with a higher serial, and with ``bootstrap`` added to its list.

    A swarm without an authority needs no signature and keeps its serial. Raises ``ConfigError``
    with the line of an invalid value, for an edit that changes the swarm id, and for a key that is
    not the authority's.
    """
    path = file_in(path)
    reader, document = _open(path)
    file = reader.content()
    if reader.swarm_id() != file.swarm_id:
        raise ConfigError(
            f"{path}: this would be another swarm",
            hint="restore the name and the first keys (of an open swarm: all but bootstrap), or create a new swarm",
        )
    known = list(file.bootstrap)
    known += [address for address in bootstrap if address not in known]
    _check_bootstrap(known)
    _set(document, "network", "bootstrap", known)
    if file.authority is None:
        if key_path is not None:
            raise ConfigError(f"{path} has no authority, so no key signs it", hint="leave --key out")
        return _write(path, document, None, str(path))
    key = load_key(key_path or path.parent / KEY_NAME)
    document |= {"serial": file.serial + 1, "created": _time(now)}
    return _write(path, document, key, str(path))


def list_model(path: Path, model: ListedModel, *, now: float) -> SwarmFile:
    """List ``model`` in the swarm file, in place of a model of the same name, and sign the file.

    Raises ``ConfigError`` without an authority or its key.
    """
    path = file_in(path)
    _, document = _open(path)
    file = load(path)
    if file.authority is None:
        raise ConfigError(
            f"{path} has no authority, so nobody can add a model to it",
            hint="create the swarm with --model, or host the model under the name of its folder",
        )
    key = load_key(path.parent / KEY_NAME)
    _list_models(document, [*(each for each in file.models if each.name != model.name), model])
    document |= {"serial": file.serial + 1, "created": _time(now)}
    return _write(path, document, key, str(path))


def allow(path: Path, peer: PeerId, roles: Iterable[Role], *, now: float) -> SwarmFile:
    """Add ``peer`` with ``roles`` to the allow-list, in place of an earlier entry, and sign."""
    return _edit_members(file_in(path), peer, sorted(roles), now)


def disallow(path: Path, peer: PeerId, *, now: float) -> SwarmFile:
    """Remove ``peer`` from the allow-list, and sign."""
    return _edit_members(file_in(path), peer, [], now)


def rotate_key(path: Path, *, now: float, overlap_s: float) -> "tuple[SwarmFile, Identity]":
    """Replace all authority keys with a new one, and return the swarm file and the new key.

    The old key file stays next to the new one. Signatures of the old keys stay valid for
    ``overlap_s`` seconds, so that members can renew their certificates. With 0 the keys count as
    stolen: their signatures are invalid at once, and every member that they admitted needs a new
    invite, even if another issuer has renewed its certificate since.
    """
    path = file_in(path)
    file, key_path = load(path), path.parent / KEY_NAME
    if file.authority is None:
        raise ConfigError(f"{path} has no authority", hint="a swarm made with --open has no key to rotate")
    next_path, number = key_path.with_suffix(".next"), len(file.authority.rotations)
    with _writing(path.parent):
        new = load_key(next_path) if next_path.exists() else create_key(next_path)
        # An earlier rotation was interrupted between writing the file and replacing the key.
        if new.public_key in file.authority.keys:
            _replace_key_file(key_path, next_path, number - 1)
            return file, new
        old = load_key(key_path)
        if old.public_key not in file.authority.keys:
            raise _wrong_key(path)
        rotation = Rotation((new.public_key,), _time(now + overlap_s if overlap_s else 0), b"")
        rotation = replace(rotation, signature=old.sign(rotation_bytes(file.swarm_id, number, rotation)))
        _, document = _open(path)
        _add_rotation(document, rotation)
        document |= {"serial": file.serial + 1, "created": _time(now)}
        written = _write(path, document, new, str(path))
        _replace_key_file(key_path, next_path, number)
    return written, new


def _replace_key_file(key_path: Path, next_path: Path, number: int) -> None:
    if key_path.exists():
        key_path.replace(key_path.with_suffix(f".{number}.old"))
    next_path.replace(key_path)


def _draft(new: NewSwarm) -> "tuple[TOMLDocument, str]":
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    if new.like is None:
        return tomlkit.parse(_OPEN_TEMPLATE if new.is_open else _TEMPLATE), FILE_NAME
    source = str(file_in(new.like))
    try:
        document = tomlkit.parse(decode(read(new.like), source))
    except TOMLKitError as error:
        raise ConfigError(
            f"{source} is not valid TOML: {error}", hint="see deploy/swarms for examples"
        ) from error
    for key in ("rotation", "nonce", "not_after"):
        document.pop(key, None)
    if new.is_open:
        for key in ("authority", "signature"):
            document.pop(key, None)
    return document, source


def _open(path: Path) -> "tuple[Reader, TOMLDocument]":
    import tomlkit

    text = decode(read(path), str(path))
    reader = Reader(text, str(path))
    reader.content()  # raises for invalid TOML, so that tomlkit does not
    return reader, tomlkit.parse(text)


def _write(path: Path, document: "TOMLDocument", key: "Signer | None", source: str) -> SwarmFile:
    """Set the id and the signature, and write the file if ``parse`` accepts it."""
    file = Reader(_dump(document), source).content()
    document["swarm_id"] = f"sha256:{file.swarm_id.hex()}"
    if file.authority is not None and key is not None:
        if key.public_key not in file.authority.keys:
            raise _wrong_key(path)
        _set(document, "signature", "ed25519", key.sign(file.signed_bytes()).hex())
    data = _dump(document).encode()
    written = parse(data, source=source)
    with _writing(path.parent):
        write_whole(path, data, mode=0o644)
    return written


def _edit_members(path: Path, peer: PeerId, roles: list[Role], now: float) -> SwarmFile:
    import tomlkit

    _, document = _open(path)
    file = load(path)
    if file.admission is not Admission.ALLOW_LIST:
        raise ConfigError(f"{path} has no list of members", hint='set admission = "allow-list"')
    members = tomlkit.aot()
    for each in document.get("allow", []):
        if each["peer"] != peer:
            members.append(each)
    if roles:
        entry = tomlkit.table()
        entry |= {"peer": str(peer), "roles": [str(role) for role in roles]}
        members.append(entry)
    document.pop("allow", None)
    if members:
        document["allow"] = members
    document |= {"serial": file.serial + 1, "created": _time(now)}
    return _write(path, document, load_key(path.parent / KEY_NAME), str(path))


def _add_rotation(document: "TOMLDocument", rotation: Rotation) -> None:
    import tomlkit

    entry = tomlkit.table()
    entry |= {
        "keys": [f"ed25519:{key.hex()}" for key in rotation.keys],
        "previous_until": rotation.previous_until,
        "signature": rotation.signature.hex(),
    }
    if "rotation" not in document:
        document.add(tomlkit.nl())
        document["rotation"] = tomlkit.aot()
    document["rotation"].append(entry)


def _list_models(document: "TOMLDocument", models: Sequence[ListedModel]) -> None:
    import tomlkit

    listed = tomlkit.aot()
    for model in models:
        entry = tomlkit.table()
        entry |= {"name": model.name, "manifest": f"sha256:{model.manifest.hex()}"}
        if model.pieces is not None:
            entry["pieces"] = f"sha256:{model.pieces.hex()}"
        listed.append(entry)
    document["models"] = listed


def _fill_authority(document: "TOMLDocument", keys: Sequence[bytes]) -> None:
    _set(document, "authority", "keys", [f"ed25519:{key.hex()}" for key in dict.fromkeys(keys)])


def _set(document: "TOMLDocument", table: str, key: str, value: object) -> None:
    import tomlkit

    item = tomlkit.item(value)
    if isinstance(item, tomlkit.items.Array):
        item.multiline(len(item) > 0)
    if table not in document:
        document[table] = tomlkit.table()
    document[table][key] = item


def _dump(document: "TOMLDocument") -> str:
    import tomlkit

    return tomlkit.dumps(document)


def _next_serial(path: Path, now: float) -> int:
    if not path.exists():
        return 1
    try:
        old = load(path)
    except (ConfigError, IncompatibleVersion, IntegrityError):
        # The serial of a damaged file is unknown, and Unix time in seconds is higher than any
        # number of changes.
        return int(now)
    if old.authority is not None and old.authority.rotations:
        raise ConfigError(
            f"{path} had other keys: a new file would be another swarm",
            hint="edit it and sign it with `swarmnet swarm sign`",
        )
    return old.serial + 1


def _check_bootstrap(addresses: Sequence[str]) -> None:
    if len(addresses) > MAX_BOOTSTRAPS:
        raise ConfigError("too many bootstrap addresses", hint=f"give {MAX_BOOTSTRAPS} at most")
    for address in addresses:
        check_peer_address(address)


def _wrong_key(path: Path) -> ConfigError:
    return ConfigError(
        f"the key does not belong to the authority of {path}",
        hint="use the authority.key that was made with this file",
    )


def _time(now: float) -> datetime:
    return datetime.fromtimestamp(int(now), UTC)


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """Convert an ``OSError`` raised inside to ``ConfigError``."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write into {directory}: {error.strerror}", hint="choose another directory"
        ) from error
