"""The swarm file: accepted and refused contents, and the error messages."""

import re
import stat
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnet import swarm_file
from swarmnet.swarm_file import writer as swarm_writer
from swarmnet.swarm_file.content import SwarmFile
from swarmnet.swarm_file.reader import MAX_BOOTSTRAPS, MAX_FILE_BYTES
from swarmnet.swarm_file.writer import NewSwarm
from swarmnet_protocols.errors import ConfigError, IntegrityError
from tests.defences import defence, replacing, yes

NOW = 1_800_000_000.0
PEER = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p"


def _create(directory: Path, *, is_open: bool = False) -> SwarmFile:
    return swarm_writer.create(directory, NewSwarm("lab", bootstrap=(PEER,), is_open=is_open), now=NOW)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_created_file_is_read_back(tmp_path: Path, is_open: bool) -> None:
    created = _create(tmp_path, is_open=is_open)

    assert swarm_file.load(tmp_path / "swarm.toml") == created
    assert swarm_file.load(tmp_path) == created
    assert created.bootstrap == (PEER,)
    assert len(created.swarm_id) == 32
    assert created.is_open is is_open


def test_only_a_private_swarm_has_a_key_with_mode_600(tmp_path: Path) -> None:
    _create(tmp_path / "private")
    _create(tmp_path / "open", is_open=True)

    assert stat.S_IMODE((tmp_path / "private" / "authority.key").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "open").iterdir()] == ["swarm.toml"]


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    _create(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    with pytest.raises(ConfigError, match="already exists"):
        _create(tmp_path)

    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_overwriting_renews_the_file_of_the_same_swarm(tmp_path: Path) -> None:
    first = _create(tmp_path)
    key = (tmp_path / "authority.key").read_bytes()

    second = swarm_writer.create(tmp_path, NewSwarm("lab"), now=NOW + 60, overwrite=True)

    assert second.swarm_id == first.swarm_id
    assert second.serial == first.serial + 1
    assert (tmp_path / "authority.key").read_bytes() == key


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:50],
        lambda text: text.replace("serial = 1", "serial = 99"),
        lambda text: text.replace("format = 2", "format = 3"),
        lambda _: "\0",
    ],
    ids=["truncated", "changed", "of another format", "not a swarm file"],
)
def test_overwriting_replaces_a_damaged_file_of_the_same_swarm(
    tmp_path: Path, damage: Callable[[str], str]
) -> None:
    first = _create(tmp_path)
    path = tmp_path / "swarm.toml"
    path.write_text(damage(path.read_text()))

    second = swarm_writer.create(tmp_path, NewSwarm("lab"), now=NOW, overwrite=True)

    assert swarm_file.load(path) == second
    assert second.swarm_id == first.swarm_id
    assert second.serial > 99, "higher than that of any published file"


def test_swarms_with_one_name_have_different_ids(tmp_path: Path) -> None:
    ids = {_create(tmp_path / str(n), is_open=n < 2).swarm_id for n in range(4)}
    assert len(ids) == 4


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", 'quo"te', "line\nbreak", "x" * 65, "ünï"])
def test_an_invalid_name_is_refused_before_files_are_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a swarm"):
        swarm_writer.create(tmp_path / "out", NewSwarm(name), now=NOW)
    assert not (tmp_path / "out").exists()


CHANGES: dict[str, Callable[[str], str]] = {
    "name": lambda text: text.replace('name = "lab"', 'name = "lob"'),
    "serial": lambda text: text.replace("serial = 1", "serial = 2"),
    "created": lambda text: text.replace("created = 2027", "created = 2026"),
    "bootstrap": lambda text: text.replace("203.0.113.7", "203.0.113.8"),
    "more bootstraps": lambda text: text.replace(
        f'"{PEER}"', f'"{PEER}", "{PEER.replace("31337", "31338")}"'
    ),
    "not_after": lambda text: text.replace("[network]", "not_after = 2040-01-01T00:00:00Z\n[network]"),
}


@defence(
    "a swarm file is signed", off=replacing(SwarmFile, "is_signed_by_authority", yes), change="bootstrap"
)
@pytest.mark.parametrize("change", ["name", "serial", "created", "bootstrap", "more bootstraps", "not_after"])
def test_a_changed_private_file_is_refused(tmp_path: Path, change: str) -> None:
    _create(tmp_path)
    path = tmp_path / "swarm.toml"
    path.write_text(CHANGES[change](path.read_text()))

    with pytest.raises(IntegrityError, match="was changed"):
        swarm_file.load(path)


@pytest.mark.parametrize("change", ["name", "serial", "created", "not_after"])
def test_only_the_bootstrap_list_of_an_open_file_may_change(tmp_path: Path, change: str) -> None:
    created = _create(tmp_path, is_open=True)
    path = tmp_path / "swarm.toml"
    text = path.read_text()

    path.write_text(CHANGES["bootstrap"](text))
    assert swarm_file.load(path).swarm_id == created.swarm_id

    path.write_text(CHANGES[change](text))
    with pytest.raises(IntegrityError, match="was changed"):
        swarm_file.load(path)


@defence(
    "a swarm file is signed by its own authority", off=replacing(SwarmFile, "is_signed_by_authority", yes)
)
def test_another_key_cannot_sign_for_the_swarm(tmp_path: Path) -> None:
    file = _create(tmp_path)
    path = tmp_path / "swarm.toml"
    forged = replace(file, bootstrap=())
    signature = Ed25519PrivateKey.generate().sign(forged.signed_bytes()).hex()
    lines = path.read_text().replace(f'    "{PEER}",\n', "").splitlines()
    path.write_text("\n".join([*lines[:-1], f'ed25519 = "{signature}"']))

    with pytest.raises(IntegrityError):
        swarm_file.load(path)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("serial = 1", "serial = 1\ncolour = 1", 7, "unknown key 'colour'"),
        ("[network]", "[network]\nport = 1", 12, r"unknown key 'port' in \[network\]"),
        ("[authority]", "[extra]\n[authority]", 18, "unknown key 'extra'"),
        ("serial = 1\n", "", 1, "'serial' is missing"),
        ("[network]\nbootstrap", "[network]\nbootstraps", 12, "unknown key 'bootstraps'"),
        ("serial = 1", "serial = true", 6, "'serial' must be an integer"),
        ("serial = 1", "serial = 0", 6, "'serial' must be a positive number"),
        ("format = 2", "format = 1", 3, "'format' must be 2"),
        ('name = "lab"', 'name = "a b"', 4, "'name' must be"),
        ("created = ", "created = 2027-01-15 # ", 7, "'created' must be"),
        ("/tcp/31337", "/tcp/99999", 12, "'bootstrap' is wrong"),
        ("mdns = true", "mdns = 1", 16, "'mdns' must be true or false"),
        ('"ed25519:', '"rsa:', 20, "'keys' must list public keys"),
        ("issuers = []", 'issuers = "all"', 24, "'issuers' must be a list"),
        ('admission = "certificate"', 'admission = "friends"', 9, "must be one of open, certificate"),
        ("[policy]", '[roles]\nanyone = ["host"]\n[policy]', 27, "'anyone' needs admission"),
        ('lifetime = "7d"', 'lifetime = "7"', 28, "write a duration as"),
        ('lifetime = "7d"', 'lifetime = "1m"', 28, "must be between 3600 s"),
        ('refresh = "30s"', 'refresh = "1h"', 30, "must be between 1 s and 60 s"),
        ("[signature]", "sessions = 0\n[signature]", 32, "'sessions' must be a positive"),
        ("[signature]", f'[[allow]]\npeer = "{PEER[-52:]}"\nroles = ["host"]\n[signature]', 33, "allow-list"),
        ("[signature]", '[[models]]\nname = "m"\nmanifest = "x"\n[signature]', 34, "'manifest' must be"),
        (
            "[signature]",
            f'[[models]]\nname = "m"\nmanifest = "sha256:{"0" * 64}"\n[[models]]\nname = ""\n[signature]',
            36,
            "'name' must be 1 to",
        ),
        ("[signature]", "[[rotation]]\nkeys = []\n[signature]", 33, "'keys' must list public keys"),
    ],
)
def test_errors_name_line_and_key(tmp_path: Path, old: str, new: str, line: int, words: str) -> None:
    _create(tmp_path)
    path = tmp_path / "swarm.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))

    with pytest.raises(ConfigError, match=rf"swarm\.toml:{line}: .*{words}") as caught:
        swarm_file.load(path)
    assert caught.value.hint


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xfe", b"[" * 5000, b"a = " + b"[" * 5000, b"a = " + b"9" * 10_000],
    ids=["empty", "not text", "headers", "nesting", "long number"],
)
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(ConfigError):
        swarm_file.parse(data)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    _create(tmp_path)
    text = (tmp_path / "swarm.toml").read_text()
    fits = text + "#" * (MAX_FILE_BYTES - len(text))
    swarm_file.parse(fits.encode())
    with pytest.raises(ConfigError, match="larger than"):
        swarm_file.parse(fits.encode() + b"#")


def test_a_bootstrap_list_that_is_too_long_is_refused(tmp_path: Path) -> None:
    peers = (PEER,) * (MAX_BOOTSTRAPS + 1)
    with pytest.raises(ConfigError, match="too many"):
        swarm_writer.create(tmp_path / "new", NewSwarm("lab", bootstrap=peers), now=NOW)
    _create(tmp_path, is_open=True)
    path = tmp_path / "swarm.toml"
    path.write_text(path.read_text().replace(f'"{PEER}",', f'"{PEER}",' * len(peers)))
    with pytest.raises(ConfigError, match="64"):
        swarm_file.load(path)


@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_with_the_id_of_another_swarm_is_refused(tmp_path: Path, is_open: bool) -> None:
    _create(tmp_path / "a", is_open=is_open)
    other = _create(tmp_path / "b", is_open=is_open)
    path = tmp_path / "a" / "swarm.toml"
    path.write_text(re.sub("sha256:[0-9a-f]+", f"sha256:{other.swarm_id.hex()}", path.read_text()))
    with pytest.raises(IntegrityError, match="was changed"):
        swarm_file.load(path)


def test_the_error_for_a_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read") as caught:
        swarm_file.load(tmp_path / "swarm.toml")
    assert "swarm create" in caught.value.hint


def test_an_expired_file_is_loaded_but_not_valid(tmp_path: Path) -> None:
    end = datetime.fromtimestamp(NOW + 60, UTC)
    swarm_writer.create(tmp_path, NewSwarm("lab", not_after=end), now=NOW)

    assert swarm_file.load_valid(tmp_path, NOW + 59).not_after == end
    with pytest.raises(ConfigError, match="expired"):
        swarm_file.load_valid(tmp_path, NOW + 60)
    assert swarm_file.load(tmp_path).not_after == end


def test_trusted_hosts_are_signed_with_the_file(tmp_path: Path) -> None:
    made = _create(tmp_path)
    path, peer = tmp_path / "swarm.toml", "1" * 40
    trust = f'[trust]\nhosts = ["{peer}"]\n\n[signature]'
    path.write_text(path.read_text().replace("[signature]", trust))
    with pytest.raises(IntegrityError):
        swarm_file.load(tmp_path)
    assert swarm_writer.sign(tmp_path, now=1.8e9).hosts == (peer,)
    assert swarm_file.load(tmp_path).swarm_id == made.swarm_id


def test_the_pieces_of_a_model_are_signed_with_the_file(tmp_path: Path) -> None:
    _create(tmp_path)
    path = tmp_path / "swarm.toml"
    model = f'[[models]]\nname = "org/model"\nmanifest = "sha256:{"0" * 64}"\n'
    path.write_text(path.read_text().replace("[signature]", f"{model}\n[signature]"))
    assert swarm_writer.sign(tmp_path, now=1.8e9).rules().pieces_hashes == {}
    path.write_text(path.read_text().replace(model, f'{model}pieces = "sha256:{"1" * 64}"\n'))
    with pytest.raises(IntegrityError):
        swarm_file.load(tmp_path)
    rules = swarm_writer.sign(tmp_path, now=1.8e9).rules()
    assert rules.pieces_hashes == {bytes(32): b"\x11" * 32}
    assert rules.names == {"org/model": bytes(32)}


@pytest.mark.parametrize(
    ("is_open", "chosen", "expected"),
    [(False, None, True), (True, None, False), (False, False, False), (True, True, True)],
)
def test_peers_of_a_swarm_with_an_authority_use_mdns_unless_it_is_off(
    tmp_path: Path, is_open: bool, chosen: bool | None, expected: bool
) -> None:
    created = swarm_writer.create(tmp_path, NewSwarm("lab", is_open=is_open, mdns=chosen), now=NOW)
    assert created.mdns is expected
    assert swarm_file.load(tmp_path).mdns is expected


def test_a_file_without_mdns_keeps_its_id_and_switches_it_off(tmp_path: Path) -> None:
    created = _create(tmp_path, is_open=True)
    path = tmp_path / "swarm.toml"
    assert "mdns" not in path.read_text()
    path.write_text(path.read_text().replace("[network]\n", "[network]\nmdns = false\n"))
    assert swarm_file.load(path).swarm_id == created.swarm_id
    path.write_text(path.read_text().replace("mdns = false", "mdns = true"))
    with pytest.raises(IntegrityError):
        swarm_file.load(path)
