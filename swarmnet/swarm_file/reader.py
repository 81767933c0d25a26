"""Reads the TOML of a swarm file. An unknown key, a wrong type or a value out of range is an error
that names its line."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from swarmnet.addresses import check_peer_address
from swarmnet.swarm_file.content import FORMAT, Authority, ListedModel, Policy, Rotation, SwarmFile
from swarmnet.units import parse_duration_s
from swarmnet_protocols.errors import ConfigError, IncompatibleVersion
from swarmnet_protocols.machine.toml_lines import line_of
from swarmnet_protocols.membership.rules import MAX_KEYS, MAX_LIFETIME_S, MIN_LIFETIME_S, Admission, Quotas
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.multiaddr import PEER_ID
from swarmnet_protocols.wire.roles import ANY_ROLE, Role

MAX_FILE_BYTES = 64 << 10
MAX_BOOTSTRAPS = 64
MAX_MEMBERS = 1024
MAX_MODELS = 64
MAX_TRUSTED = 256
"""Most hosts in each list of [trust]."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEY = r"ed25519:[0-9a-f]{64}"

_MAX_MODEL_NAME_CHARS = 256
_MAX_REFRESH_S = 60
"""Longest interval in seconds at which members compare revocations, so that a revocation reaches
all within two minutes."""
_MAX_QUOTA = 1 << 50
_CORRECT_IT = "correct it, or get the file again from the person who runs the swarm"
_TYPE_NAMES = {
    str: "a string",
    int: "an integer",
    bool: "true or false",
    list: "a list",
    dict: "a table",
    datetime: "a date and time with a time zone",
}
_E = TypeVar("_E", bound=StrEnum)


class Reader:
    """Reads one swarm file; ids and signatures are not verified. Each method raises ``ConfigError``
    with the line of an invalid value."""

    def __init__(self, text: str, source: str) -> None:
        try:
            document = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source} is not valid TOML: {error}", hint=_CORRECT_IT) from error
        self._top = _Table(document, "", 0, text, source)

    def content(self) -> SwarmFile:
        """Return the content, without the claimed id and the signature. Raises
        ``IncompatibleVersion`` for a newer format."""
        top = self._top
        version = top.integer("format", 1, 1 << 31)
        if version > FORMAT:
            raise IncompatibleVersion(
                f"this swarm file has format {version}, and this swarmnet reads format {FORMAT}",
                hint="install a newer swarmnet",
            )
        if version != FORMAT:
            raise top.wrong("format", f"must be {FORMAT}")
        has_authority = "authority" in top
        authority = self._authority() if has_authority else None
        admission = top.choice("admission", Admission)
        if not has_authority and admission is not Admission.OPEN:
            raise top.wrong("admission", 'can only be "open" in a swarm without [authority]')
        file = SwarmFile(
            name=top.matching("name", NAME.pattern, "must be 1 to 64 letters, digits, '.', '_' and '-'"),
            serial=top.integer("serial", 1, 1 << 53),
            created=top.time("created"),
            not_after=top.time("not_after") if "not_after" in top else None,
            bootstrap=self._bootstrap(),
            mdns=self._mdns(),
            nonce=None if has_authority else top.hex_bytes("nonce", "", 16),
            authority=authority,
            admission=admission,
            anyone=self._anyone(admission),
            allow=self._allow(admission),
            models=self._models(),
            policy=self._policy(),
            hosts=self._trusted("hosts"),
            first_and_last=self._trusted("first_and_last"),
        )
        known = {"format", "name", "swarm_id", "serial", "created", "not_after", "admission"}
        known |= {"network", "roles", "models", "policy", "trust"}
        known |= {"authority", "rotation", "allow", "signature"} if has_authority else {"nonce"}
        top.check_keys(known)
        return file

    def swarm_id(self) -> bytes:
        """Return the id that the file claims."""
        return self._top.hex_bytes("swarm_id", "sha256:", 32)

    def signature(self) -> bytes:
        """Return the signature of the authority."""
        table = self._top.table("signature")
        table.check_keys({"ed25519"})
        return table.hex_bytes("ed25519", "", 64)

    def _authority(self) -> Authority:
        table = self._top.table("authority")
        table.check_keys({"keys", "issuers"})
        rotations = []
        for each in self._top.tables("rotation", MAX_KEYS):
            each.check_keys({"keys", "previous_until", "signature"})
            rotations.append(
                Rotation(each.keys("keys"), each.time("previous_until"), each.hex_bytes("signature", "", 64))
            )
        authority = Authority(
            founders=table.keys("keys"),
            issuers=table.keys("issuers", optional=True),
            rotations=tuple(rotations),
        )
        if len(authority.trusted_keys()) > MAX_KEYS:
            raise table.wrong("keys", f"and the file's other keys together may be {MAX_KEYS} at most")
        return authority

    def _bootstrap(self) -> tuple[str, ...]:
        table = self._top.table("network")
        table.check_keys({"bootstrap", "mdns"})
        addresses = table.strings("bootstrap", MAX_BOOTSTRAPS)
        for address in addresses:
            try:
                check_peer_address(address)
            except ConfigError as error:
                raise table.wrong("bootstrap", f"is wrong: {error}") from error
        return addresses

    def _mdns(self) -> bool:
        table = self._top.table("network")
        return "mdns" in table and table.boolean("mdns")

    def _anyone(self, admission: Admission) -> frozenset[Role]:
        if "roles" not in self._top:
            return ANY_ROLE if admission is Admission.OPEN else frozenset()
        table = self._top.table("roles")
        table.check_keys({"anyone"})
        if admission is not Admission.OPEN:
            raise table.wrong("anyone", 'needs admission = "open"')
        return table.roles("anyone")

    def _allow(self, admission: Admission) -> dict[PeerId, frozenset[Role]]:
        allow: dict[PeerId, frozenset[Role]] = {}
        for each in self._top.tables("allow", MAX_MEMBERS):
            each.check_keys({"peer", "roles"})
            if admission is not Admission.ALLOW_LIST:
                raise each.wrong("peer", 'needs admission = "allow-list"')
            peer = PeerId(each.matching("peer", PEER_ID.pattern, "must be a peer id"))
            if peer in allow:
                raise each.wrong("peer", "is listed twice")
            allow[peer] = each.roles("roles")
        return allow

    def _models(self) -> tuple[ListedModel, ...]:
        models = []
        for each in self._top.tables("models", MAX_MODELS):
            each.check_keys({"name", "manifest", "pieces"})
            name = each.text("name")
            if not 0 < len(name) <= _MAX_MODEL_NAME_CHARS or not name.isprintable():
                raise each.wrong("name", f"must be 1 to {_MAX_MODEL_NAME_CHARS} printable characters")
            pieces = each.hex_bytes("pieces", "sha256:", 32) if "pieces" in each else None
            models.append(ListedModel(name, each.hex_bytes("manifest", "sha256:", 32), pieces))
        return tuple(models)

    def _trusted(self, key: str) -> tuple[PeerId, ...]:
        if "trust" not in self._top:
            return ()
        table = self._top.table("trust")
        table.check_keys({"hosts", "first_and_last"})
        peers = table.strings(key, MAX_TRUSTED) if key in table else ()
        if len(set(peers)) < len(peers) or not all(PEER_ID.fullmatch(peer) for peer in peers):
            raise table.wrong(key, "must list peer ids, each once")
        return tuple(map(PeerId, peers))

    def _policy(self) -> Policy:
        if "policy" not in self._top:
            return Policy()
        table, default = self._top.table("policy"), Policy()
        quotas = [quota.name for quota in fields(Quotas)]
        table.check_keys({"certificate_lifetime", "revocation_refresh", *quotas})
        return Policy(
            table.duration_s(
                "certificate_lifetime", default.certificate_lifetime_s, MIN_LIFETIME_S, MAX_LIFETIME_S
            ),
            table.duration_s("revocation_refresh", default.revocation_refresh_s, 1, _MAX_REFRESH_S),
            Quotas(**{name: table.integer(name, 1, _MAX_QUOTA) for name in quotas if name in table}),
        )


class _Table:
    """One table of the document. Each method returns the value of ``key`` as one type, or raises
    ``ConfigError`` with its line."""

    def __init__(self, values: Mapping[str, Any], name: str, index: int, text: str, source: str) -> None:
        self._values = values
        self._name = name
        self._index = index
        self._text = text
        self._source = source

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def table(self, name: str) -> "_Table":
        return _Table(self._take(name, dict), name, 0, self._text, self._source)

    def tables(self, name: str, most: int) -> list["_Table"]:
        """Return the tables of an array of tables; none if it is missing."""
        if name not in self:
            return []
        entries = self._take(name, list)
        if len(entries) > most or not all(isinstance(each, dict) for each in entries):
            raise self.wrong(name, f"must be {most} tables at most")
        return [_Table(each, name, index, self._text, self._source) for index, each in enumerate(entries)]

    def text(self, key: str) -> str:
        value: str = self._take(key, str)
        return value

    def matching(self, key: str, pattern: str, must: str) -> str:
        value = self.text(key)
        if not re.fullmatch(pattern, value):
            raise self.wrong(key, must)
        return value

    def integer(self, key: str, least: int, most: int) -> int:
        value: int = self._take(key, int)
        if not least <= value <= most:
            raise self.wrong(key, "must be a positive number" if value < least else f"must be {most} at most")
        return value

    def boolean(self, key: str) -> bool:
        value: bool = self._take(key, bool)
        return value

    def hex_bytes(self, key: str, prefix: str, size: int) -> bytes:
        """Return ``size`` bytes, written as ``prefix`` and hexadecimal digits."""
        must = f"must be {prefix or 'text with'} {2 * size} hexadecimal digits"
        return bytes.fromhex(self.matching(key, f"{prefix}[0-9a-f]{{{2 * size}}}", must).removeprefix(prefix))

    def time(self, key: str) -> datetime:
        """Return a time, converted to UTC."""
        value: datetime = self._take(key, datetime)
        try:
            if value.tzinfo is not None:
                return value.astimezone(UTC)
        except OverflowError:
            pass
        raise self.wrong(key, "must be a date and time with a time zone")

    def choice(self, key: str, kind: type[_E]) -> _E:
        value = self.text(key)
        if value not in list(kind):
            raise self.wrong(key, f"must be one of {', '.join(kind)}")
        return kind(value)

    def strings(self, key: str, most: int) -> tuple[str, ...]:
        values = self._take(key, list)
        if len(values) > most:
            raise self.wrong(key, f"may have {most} entries at most")
        if not all(isinstance(value, str) for value in values):
            raise self.wrong(key, "must be a list of strings")
        return tuple(values)

    def roles(self, key: str) -> frozenset[Role]:
        names = self.strings(key, len(Role))
        if not names or len(set(names)) < len(names) or not set(names) <= set(Role):
            raise self.wrong(key, f"must list some of {', '.join(Role)}, each once")
        return frozenset(map(Role, names))

    def keys(self, key: str, *, optional: bool = False) -> tuple[bytes, ...]:
        """Return the public keys under ``key`` without duplicates: at least one, unless
        ``optional``."""
        if optional and key not in self:
            return ()
        keys = self.strings(key, MAX_KEYS)
        if (not optional and not keys) or len(set(keys)) < len(keys):
            raise self.wrong(key, "must list public keys, each once")
        if not all(re.fullmatch(KEY, each) for each in keys):
            raise self.wrong(key, 'must list public keys: "ed25519:" and 64 hexadecimal digits')
        return tuple(bytes.fromhex(each.removeprefix("ed25519:")) for each in keys)

    def duration_s(self, key: str, default_s: int, least_s: int, most_s: int) -> int:
        try:
            duration_s = parse_duration_s(self.text(key)) if key in self else default_s
        except ValueError as error:
            raise self.wrong(key, f"is wrong: {error}") from error
        if not least_s <= duration_s <= most_s:
            raise self.wrong(key, f"must be between {least_s} s and {most_s} s")
        return duration_s

    def check_keys(self, known: set[str]) -> None:
        """Raise ``ConfigError`` for the first key that is not ``known``."""
        for key in self._values:
            if key not in known:
                where = f" in [{self._name}]" if self._name else ""
                raise ConfigError(
                    f"{self._source}:{self._line(key)}: unknown key {key!r}{where}",
                    hint=f"remove it; known are {', '.join(sorted(known))}",
                )

    def wrong(self, key: str, must: str) -> ConfigError:
        """Return the error for a wrong value of ``key``; ``must`` completes the sentence that
        begins with the key."""
        return ConfigError(f"{self._source}:{self._line(key)}: {key!r} {must}", hint=_CORRECT_IT)

    def _take(self, key: str, kind: type) -> Any:
        if key not in self._values:
            where = f" in [{self._name}]" if self._name else ""
            raise ConfigError(
                f"{self._source}:{self._line('')}: the key {key!r}{where} is missing", hint=_CORRECT_IT
            )
        value = self._values[key]
        if type(value) is not kind:  # isinstance would accept a bool as an int
            raise self.wrong(key, f"must be {_TYPE_NAMES[kind]}")
        return value

    def _line(self, key: str) -> int:
        return line_of(self._text, self._name, key, self._index)
