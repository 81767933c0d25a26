"""Identities: keys, peer ids, signatures, and the file that keeps a key."""

import stat
from pathlib import Path

import pytest

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity, peer_id_of, public_key_of, verify

ALICE = Identity.from_seed(b"alice").peer_id


def test_a_peer_id_is_derived_as_libp2p_derives_it() -> None:
    # The Ed25519 test vector of libp2p's peer id specification.
    encoded = bytes.fromhex("080112201ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
    assert peer_id_of(encoded[4:]) == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"


def test_a_peer_id_contains_the_public_key() -> None:
    for number in range(50):
        identity = Identity.from_seed(b"%d" % number)
        assert public_key_of(identity.peer_id) == identity.public_key


@pytest.mark.parametrize(
    "text", ["", "12D3KooW", "l0OI", "é" * 52, f"{ALICE} ", f"1{ALICE}", ALICE[:-1], 2 * ALICE]
)
def test_text_that_names_no_key_has_no_public_key(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the library and this project have a message each
        public_key_of(PeerId(text))


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_of_another_size_has_no_peer_id(size: int) -> None:
    with pytest.raises(ValueError, match="32"):
        peer_id_of(bytes(size))


def test_a_seed_always_gives_the_same_identity() -> None:
    assert Identity.from_seed(b"x").peer_id == Identity.from_seed(b"x").peer_id
    assert Identity.from_seed(b"x").peer_id != Identity.from_seed(b"y").peer_id


def test_a_signature_is_valid_for_its_key_and_data_only() -> None:
    identity, other = Identity.from_seed(b"x"), Identity.from_seed(b"y")
    signature = identity.sign(b"data")
    assert verify(identity.public_key, signature, b"data")
    assert not verify(identity.public_key, signature, b"date")
    assert not verify(other.public_key, signature, b"data")
    assert not verify(identity.public_key, signature[:-1], b"data")
    assert not verify(identity.public_key[:-1], signature, b"data")
    assert not verify(identity.public_key, bytes(64), b"data")


def test_the_identity_file_is_created_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity"
    identity = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == identity.peer_id
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["identity"]


def test_a_file_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    Identity.load_or_create(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError) as info:
        Identity.load_or_create(path)
    assert info.value.hint == f"chmod 600 {path}"


@pytest.mark.parametrize("damage", ["empty", "cut", "longer", "another type", "another public key"])
def test_a_corrupt_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "identity"
    Identity.load_or_create(path)
    data = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "cut": data[:-1],
            "longer": data + b"\0",
            "another type": b"\x08\x00" + data[2:],
            "another public key": data[:-1] + bytes([data[-1] ^ 1]),
        }[damage]
    )
    with pytest.raises(ConfigError, match="not an Ed25519 key") as info:
        Identity.load_or_create(path)
    assert info.value.hint


def test_an_identity_file_that_cannot_be_written_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError) as info:
        Identity.load_or_create(tmp_path / "file" / "identity")
    assert info.value.hint


def test_the_file_is_what_libp2p_reads(tmp_path: Path) -> None:
    path = tmp_path / "identity"
    identity = Identity.load_or_create(path)
    data = path.read_bytes()
    assert data[:4] == bytes.fromhex("08011240")  # {Type: Ed25519, Data: 64 bytes}
    assert data[-32:] == identity.public_key
