"""Changes of a swarm file: signing, key rotation, members; and the swarm files that a data
directory stores."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnet import swarm_file
from swarmnet.swarm_file import stored
from swarmnet.swarm_file import writer as swarm_writer
from swarmnet.swarm_file.content import Authority, SwarmFile
from swarmnet.swarm_file.keys import create_key, load_key
from swarmnet.swarm_file.reader import Reader
from swarmnet.swarm_file.stored import find_swarm, store_file, stored_names, swarm_dir
from swarmnet.swarm_file.writer import NewSwarm
from swarmnet_protocols.errors import ConfigError, IntegrityError
from swarmnet_protocols.membership.rules import Admission
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.wire.roles import Role
from tests.defences import defence, nothing, replacing, yes

NOW = 1_800_000_000.0
PEER = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p"
OTHER_PEER = PEER.replace("31337", "31338")
ALICE = Identity.from_seed(b"alice").peer_id


def create(directory: Path, **how: object) -> SwarmFile:
    return swarm_writer.create(directory, NewSwarm("lab", (PEER,), **how), now=NOW)  # type: ignore[arg-type]


def edit(directory: Path, old: str, new: str) -> None:
    path = directory / "swarm.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_an_edited_file_is_refused_until_it_is_signed(tmp_path: Path) -> None:
    first = create(tmp_path)
    edit(tmp_path, 'lifetime = "7d"', 'lifetime = "1d" # a day is enough')
    with pytest.raises(IntegrityError, match="was changed"):
        swarm_file.load(tmp_path)

    signed = swarm_writer.sign(tmp_path, now=NOW + 60)

    assert swarm_file.load(tmp_path) == signed
    assert (signed.swarm_id, signed.serial) == (first.swarm_id, 2)
    assert signed.rules().certificate_lifetime_s == 24 * 3600
    assert "# a day is enough" in (tmp_path / "swarm.toml").read_text()


def test_signing_adds_an_address_once(tmp_path: Path) -> None:
    create(tmp_path)
    for _ in range(2):
        file = swarm_writer.sign(tmp_path, now=NOW, bootstrap=[OTHER_PEER])
    assert file.bootstrap == (PEER, OTHER_PEER)


def test_an_open_swarm_gets_an_address_without_a_key(tmp_path: Path) -> None:
    first = create(tmp_path, is_open=True)
    file = swarm_writer.sign(tmp_path, now=NOW + 60, bootstrap=[OTHER_PEER])
    assert (file.swarm_id, file.bootstrap) == (first.swarm_id, (PEER, OTHER_PEER))
    edit(tmp_path, 'name = "lab"', 'name = "lob"')
    with pytest.raises(ConfigError, match="another swarm"):
        swarm_writer.sign(tmp_path, now=NOW)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('name = "lab"', 'name = "lob"', "another swarm"),
        ("issuers = []", 'issuers = ["x"]', "toml:24: 'issuers' must list public keys"),
        ("[policy]", "[polizei]", "toml:26: unknown key 'polizei'"),
    ],
)
def test_an_invalid_edit_is_not_signed(tmp_path: Path, old: str, new: str, why: str) -> None:
    create(tmp_path)
    edit(tmp_path, old, new)
    before = (tmp_path / "swarm.toml").read_bytes()
    with pytest.raises(ConfigError, match=why):
        swarm_writer.sign(tmp_path, now=NOW)
    assert (tmp_path / "swarm.toml").read_bytes() == before


def test_the_key_of_another_swarm_cannot_sign(tmp_path: Path) -> None:
    create(tmp_path / "a")
    create(tmp_path / "b")
    with pytest.raises(ConfigError, match="does not belong to the authority"):
        swarm_writer.sign(tmp_path / "a", now=NOW, key_path=tmp_path / "b" / "authority.key")


def test_any_of_several_keys_signs(tmp_path: Path) -> None:
    backup = create_key(tmp_path / "backup.key")
    create(tmp_path / "a", backup_keys=(backup.public_key,))
    assert swarm_writer.sign(tmp_path / "a", now=NOW, key_path=tmp_path / "backup.key").serial == 2


def test_a_key_file_that_other_users_can_read_is_refused(tmp_path: Path) -> None:
    create(tmp_path)
    (tmp_path / "authority.key").chmod(0o640)
    with pytest.raises(ConfigError, match="read by others") as caught:
        swarm_writer.sign(tmp_path, now=NOW)
    assert caught.value.hint.startswith("chmod 600")


def test_a_file_without_an_ed25519_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.key").write_text("no key")
    with pytest.raises(ConfigError, match="not a key"):
        load_key(tmp_path / "a.key")
    with pytest.raises(ConfigError, match="cannot read"):
        load_key(tmp_path / "b.key")
    with pytest.raises(ConfigError, match="already exists"):
        create_key(tmp_path / "a.key")


def test_the_swarm_id_survives_rotations(tmp_path: Path) -> None:
    first = create(tmp_path)
    old = load_key(tmp_path / "authority.key").public_key

    second, key = swarm_writer.rotate_key(tmp_path, now=NOW, overlap_s=3600)
    third, _ = swarm_writer.rotate_key(tmp_path, now=NOW + 60, overlap_s=0)
    signed = swarm_writer.sign(tmp_path, now=NOW + 90)

    assert {file.swarm_id for file in (second, third, signed)} == {first.swarm_id}
    assert [file.serial for file in (second, third, signed)] == [2, 3, 4]
    trusted = signed.rules().keys
    assert trusted[old] == NOW + 3600
    assert trusted[key.public_key] == 0, "a rotation without overlap: the key was never valid"
    assert trusted[load_key(tmp_path / "authority.key").public_key] == math.inf
    assert {path.name for path in tmp_path.iterdir()} == {
        "swarm.toml",
        "authority.key",
        "authority.0.old",
        "authority.1.old",
    }


def test_an_interrupted_rotation_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(swarm_writer, "_replace_key_file", die)
        with pytest.raises(KeyboardInterrupt):
            swarm_writer.rotate_key(tmp_path, now=NOW, overlap_s=0)
    file, key = swarm_writer.rotate_key(tmp_path, now=NOW, overlap_s=0)
    assert file.serial == 2
    assert load_key(tmp_path / "authority.key").public_key == key.public_key
    assert swarm_writer.sign(tmp_path, now=NOW).serial == 3


def test_a_changed_rotation_is_refused(tmp_path: Path) -> None:
    create(tmp_path)
    swarm_writer.rotate_key(tmp_path, now=NOW, overlap_s=0)
    edit(tmp_path, "previous_until = 1970", "previous_until = 2037")
    with pytest.raises(IntegrityError, match="was changed"):
        swarm_file.load(tmp_path)


@defence(
    "new keys of a swarm file are signed by its old ones",
    off=replacing(Authority, "has_signed_rotations", yes),
)
def test_a_rotation_that_no_earlier_key_signed_is_refused(tmp_path: Path) -> None:
    create(tmp_path)
    thief = Identity.from_seed(b"thief")
    path = tmp_path / "swarm.toml"
    text = path.read_text() + (
        f'[[rotation]]\nkeys = ["ed25519:{thief.public_key.hex()}"]\n'
        f'previous_until = 2027-01-01T00:00:00Z\nsignature = "{"00" * 64}"\n'
    )
    signature = thief.sign(Reader(text, "").content().signed_bytes())
    path.write_text(re.sub('ed25519 = "[0-9a-f]+"', f'ed25519 = "{signature.hex()}"', text))
    with pytest.raises(IntegrityError, match="was changed"):
        swarm_file.load(path)


def test_a_swarm_with_rotations_cannot_be_created_anew(tmp_path: Path) -> None:
    create(tmp_path)
    swarm_writer.rotate_key(tmp_path, now=NOW, overlap_s=0)
    with pytest.raises(ConfigError, match="other keys"):
        swarm_writer.create(tmp_path, NewSwarm("lab"), now=NOW, overwrite=True)


def test_members_are_added_to_and_removed_from_an_allow_list(tmp_path: Path) -> None:
    create(tmp_path)
    with pytest.raises(ConfigError, match="no list of members"):
        swarm_writer.allow(tmp_path, ALICE, [Role.HOST], now=NOW)
    edit(tmp_path, 'admission = "certificate"', 'admission = "allow-list"')
    swarm_writer.sign(tmp_path, now=NOW)
    bob = Identity.from_seed(b"bob").peer_id
    for peer, roles in ((ALICE, [Role.HOST]), (bob, [Role.CLIENT]), (ALICE, [Role.HOST, Role.CLIENT])):
        file = swarm_writer.allow(tmp_path, peer, roles, now=NOW)
    assert file.rules().allow == {ALICE: {Role.CLIENT, Role.HOST}, bob: {Role.CLIENT}}
    file = swarm_writer.disallow(tmp_path, bob, now=NOW)
    assert file == swarm_file.load(tmp_path)
    assert set(file.allow) == {ALICE}
    assert set(swarm_writer.disallow(tmp_path, ALICE, now=NOW).allow) == set()


@defence("a swarm file older than a known one is refused", off=replacing(stored, "check_update", nothing))
def test_an_older_file_is_refused_once_a_newer_one_was_used(tmp_path: Path) -> None:
    create(tmp_path / "lab")
    old = swarm_file.read(tmp_path / "lab")
    swarm_writer.sign(tmp_path / "lab", now=NOW)
    new = swarm_file.read(tmp_path / "lab")
    data_dir = tmp_path / "data"

    assert store_file(data_dir, old).serial == 1
    assert store_file(data_dir, new).serial == 2
    assert store_file(data_dir, new).serial == 2
    with pytest.raises(IntegrityError, match="serial 1 after 2"):
        store_file(data_dir, old)
    known = find_swarm(data_dir, "lab")
    assert known is not None
    assert known.serial == 2
    assert data_dir.stat().st_mode & 0o777 == 0o700
    assert store_file(tmp_path / "another", old).serial == 1


@defence("another swarm file of the same serial is refused", off=replacing(stored, "check_update", nothing))
def test_another_file_with_the_same_serial_is_refused(tmp_path: Path) -> None:
    """Neither of two files that were signed independently is known to be newer."""
    create(tmp_path / "lab")
    first = swarm_file.read(tmp_path / "lab")
    swarm_writer.sign(tmp_path / "lab", now=NOW)
    known = swarm_file.read(tmp_path / "lab")
    (tmp_path / "lab" / "swarm.toml").write_bytes(first)
    swarm_writer.sign(tmp_path / "lab", now=NOW, bootstrap=[OTHER_PEER])
    store_file(tmp_path / "data", known)
    with pytest.raises(IntegrityError, match="same serial 2"):
        store_file(tmp_path / "data", swarm_file.read(tmp_path / "lab"))
    assert store_file(tmp_path / "data", known + b"# a note\n") == swarm_file.parse(known)


def test_a_damaged_file_hides_no_other_swarm(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    for name in ("a", "b"):
        swarm_writer.create(tmp_path / name, NewSwarm(name), now=NOW)
        file = store_file(data_dir, swarm_file.read(tmp_path / name))
    (swarm_dir(data_dir, file.swarm_id) / "swarm.toml").write_text("damaged")
    found = find_swarm(data_dir, "a")
    assert found is not None
    assert found.name == "a"
    with pytest.raises(ConfigError, match="not valid TOML"):
        find_swarm(data_dir, "b")
    assert stored_names(data_dir) == ["a"]


@defence("a swarm file continues the known keys", off=replacing(Authority, "continues", yes))
def test_keys_that_do_not_follow_from_the_known_ones_are_refused(tmp_path: Path) -> None:
    """A thief of the first key cannot undo a rotation for peers that know of it, with any
    serial."""
    create(tmp_path / "lab")
    (tmp_path / "thief").mkdir()
    for name in ("swarm.toml", "authority.key"):
        (tmp_path / "thief" / name).write_bytes((tmp_path / "lab" / name).read_bytes())
        (tmp_path / "thief" / name).chmod(0o600)
    swarm_writer.rotate_key(tmp_path / "lab", now=NOW, overlap_s=0)
    store_file(tmp_path / "data", swarm_file.read(tmp_path / "lab"))

    for _ in range(3):
        swarm_writer.sign(tmp_path / "thief", now=NOW)
    with pytest.raises(IntegrityError, match="does not continue"):
        store_file(tmp_path / "data", swarm_file.read(tmp_path / "thief"))
    swarm_writer.rotate_key(tmp_path / "thief", now=NOW, overlap_s=0)
    with pytest.raises(IntegrityError, match="does not continue"):
        store_file(tmp_path / "data", swarm_file.read(tmp_path / "thief"))


def test_a_swarm_is_found_by_its_name_or_id(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    assert find_swarm(data_dir, "lab") is None
    files = []
    for name in ("a", "b"):
        files.append(create(tmp_path / name))
        store_file(data_dir, swarm_file.read(tmp_path / name))
    with pytest.raises(ConfigError, match="several swarms"):
        find_swarm(data_dir, "lab")
    assert find_swarm(data_dir, files[1].swarm_id.hex()) == files[1]
    assert swarm_dir(data_dir, files[1].swarm_id).is_dir()


def test_rules_come_from_the_file(tmp_path: Path) -> None:
    file = create(tmp_path)
    rules = file.rules()
    assert (rules.swarm, rules.admission, rules.anyone) == (file.swarm_id, Admission.CERTIFICATE, frozenset())
    public = replace(file, admission=Admission.OPEN, anyone=frozenset({Role.CLIENT})).rules()
    assert public.anyone == {Role.CLIENT}
