"""``swarmnet dashboard``: who sees the members of a swarm on its page."""

from pathlib import Path

from swarmnet.cli.commands import dashboard
from swarmnet.cli.commands.dashboard import owners_lists
from swarmnet.cli.commands.swarm import status
from swarmnet.dashboard.server import INVITE_PLACEHOLDER, swarm_info
from swarmnet.swarm_file.entry import enter
from swarmnet.swarm_file.household import own_household, remember_household
from swarmnet.swarm_file.keys import KEY_NAME
from swarmnet.swarm_file.writer import NewSwarm, create
from swarmnet.web.middleware import AccessPolicy, ApiKeys
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.net import PeerId
from tests.defences import defence, no, replacing
from tests.support.dashboard.recorded_swarm import RecordedSwarm
from tests.support.processes.commands import call

KEY = ApiKeys({"dashboard": "a-key-of-the-owner"})


@defence(
    "a page that may be public shows no members",
    off=replacing(dashboard, "may_be_public", no),
)
def test_members_are_shown_to_the_owner_and_not_in_public(tmp_path: Path) -> None:
    create(tmp_path / "lab", NewSwarm("lab"), now=wall_clock())
    call("swarm", "invite", str(tmp_path / "lab"), "--label", "Anna")
    entry = enter(str(tmp_path / "lab"), tmp_path / "data", as_client=True)
    for access in (AccessPolicy(), AccessPolicy(KEY), AccessPolicy(KEY, ["swarm.example.org"])):
        lists = owners_lists(entry, tmp_path / "data", access)
        assert lists is not None
        assert [each["label"] for each in lists()["invites"]] == ["Anna"]  # type: ignore[attr-defined]
    assert owners_lists(entry, tmp_path / "data", AccessPolicy(host_names=["swarm.example.org"])) is None
    (tmp_path / "lab" / KEY_NAME).unlink()
    assert owners_lists(entry, tmp_path / "data", AccessPolicy()) is None


def test_the_first_computer_of_a_household_sees_its_members(tmp_path: Path) -> None:
    folder = own_household(tmp_path, "home")
    enter(str(folder), tmp_path)
    lists = owners_lists(enter("home", tmp_path, as_client=True), tmp_path, AccessPolicy())
    assert lists is not None
    assert lists() == {"members": [], "invites": []}
    other = tmp_path / "other"
    create(other / "file", NewSwarm("home"), now=wall_clock())
    enter(str(other / "file"), tmp_path / "member")
    own_household(tmp_path / "member", "home")
    entry = enter("home", tmp_path / "member", as_client=True)
    assert owners_lists(entry, tmp_path / "member", AccessPolicy()) is None, "another swarm of that name"


def test_the_page_of_a_household_asks_for_no_invite(tmp_path: Path) -> None:
    def shown(swarm: str, data_dir: Path) -> tuple[str, ...]:
        return swarm_info(enter(swarm, data_dir, as_client=True), PeerId("observer")).join

    first, member = tmp_path / "first", tmp_path / "member"
    folder = own_household(first, "home")
    enter(str(folder), first)
    assert shown("home", first) == ()
    assert shown(str(folder), member) == (INVITE_PLACEHOLDER,)
    remember_household(member, enter(str(folder), member).file.swarm_id)
    assert shown("home", member) == ()


def test_a_swarms_status_counts_peers_by_what_they_do() -> None:
    swarm = RecordedSwarm("broken", lambda: 1_800_000_000.0)
    peers = status.swarm_state(swarm.snapshot(), [])["peers"]
    assert status._who(peers) == "11 hosts (9 online), 1 worker"
