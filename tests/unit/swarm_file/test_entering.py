"""Entering a swarm with a swarm file, a key or an invite."""

import shutil
from pathlib import Path

import pytest

from swarmnet import swarm_file
from swarmnet.swarm_file import FILE_NAME
from swarmnet.swarm_file.entry import Entry, enter
from swarmnet.swarm_file.keys import KEY_NAME, create_key
from swarmnet.swarm_file.writer import NewSwarm, create
from swarmnet_protocols.errors import ConfigError, NotAuthorised
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.membership.membership import Membership
from swarmnet_protocols.net.identity import Identity


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    create(tmp_path / "lab", NewSwarm("lab"), now=wall_clock())
    return tmp_path / "lab"


def check_in(entry: Entry) -> None:
    """Check the membership as a node does when it starts."""
    peer = Identity.load_or_create(entry.peer.identity_path).peer_id
    Membership(entry.file.rules(), peer, wall_clock, folder=entry.folder).check()


def test_the_owner_of_the_authority_key_needs_no_invite(lab: Path, tmp_path: Path) -> None:
    check_in(enter(str(lab), tmp_path / "data"))
    check_in(enter(str(lab / FILE_NAME), tmp_path / "other"))


def test_the_file_alone_admits_no_peer(lab: Path, tmp_path: Path) -> None:
    shutil.copy(lab / FILE_NAME, tmp_path)
    with pytest.raises(NotAuthorised, match="certificate"):
        check_in(enter(str(tmp_path / FILE_NAME), tmp_path / "data"))


def test_another_key_beside_the_file_admits_no_peer(lab: Path, tmp_path: Path) -> None:
    (lab / KEY_NAME).unlink()
    create_key(lab / KEY_NAME)
    with pytest.raises(NotAuthorised, match="certificate"):
        check_in(enter(str(lab), tmp_path / "data"))


def test_a_key_that_other_users_can_read_is_not_used(lab: Path, tmp_path: Path) -> None:
    (lab / KEY_NAME).chmod(0o644)
    with pytest.raises(ConfigError, match="read by others"):
        enter(str(lab), tmp_path / "data")


def test_an_invite_is_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "invite").write_text("swn1AAAA\n")
    with pytest.raises(ConfigError, match="the invite is damaged"):
        enter(str(tmp_path / "invite"), tmp_path / "data")


def test_an_open_swarm_needs_no_membership_folder(tmp_path: Path) -> None:
    create(tmp_path / "lab", NewSwarm("lab", is_open=True), now=wall_clock())
    assert swarm_file.load(tmp_path / "lab").authority is None
    assert enter(str(tmp_path / "lab"), tmp_path / "data").folder is None


def test_a_folder_with_the_name_of_a_swarm_does_not_hide_it(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(str(lab), tmp_path / "data")
    (tmp_path / "elsewhere" / "lab").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert enter("lab", tmp_path / "data").file.name == "lab"
