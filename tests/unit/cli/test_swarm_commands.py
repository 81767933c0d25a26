"""The commands of a swarm's owner (`swarmnet swarm …`), without a network."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from swarmnet import cli, swarm_file
from swarmnet.swarm_file.household import own_household
from swarmnet.swarm_file.keys import load_key
from swarmnet.swarm_file.stored import swarm_dir
from swarmnet_protocols.fetching.hub_files import HEAD_BYTES
from swarmnet_protocols.machine.clock import wall_clock
from swarmnet_protocols.membership.invites import read_invite, redemption
from swarmnet_protocols.membership.issuer import IssuedCertificates, Issuer
from swarmnet_protocols.membership.membership import Membership
from swarmnet_protocols.membership.revocations import KEPT_S, Revocations, open_list
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.identity import Identity
from tests.support.models.model_hub import NAME, model_hub
from tests.support.models.tiny_models import save_tiny

ALICE = Identity.from_seed(b"alice").peer_id
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{ALICE}"


class Owner:
    """The owner of a swarm at a terminal, in the directory of the swarm file."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.directory = directory
        self._capsys = capsys

    def run(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        assert cli.execute([*arguments, "--json"]) == code
        fields: dict[str, Any] = json.loads(self._capsys.readouterr().out)
        return fields

    def swarm(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        return self.run("swarm", *arguments, code=code)

    def edit(self, old: str, new: str) -> None:
        path = self.directory / "swarm.toml"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
        self.swarm("sign")

    def admit(self, invite: str, peer: PeerId, data_dir: Path) -> None:
        """Redeem ``invite`` for ``peer``, as an issuer does."""
        file, now = swarm_file.load(self.directory), wall_clock()
        folder = swarm_dir(data_dir, file.swarm_id)
        folder.mkdir(parents=True, exist_ok=True)
        with IssuedCertificates.open(folder) as ledger:
            issuer = Issuer(load_key(self.directory / "authority.key"), file.rules(), ledger, now=now)
            issuer.redeem(redemption(read_invite(invite, now=now), peer), peer, Revocations(), now)


@pytest.fixture
def owner(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Owner:
    owner = Owner(tmp_path / "lab", capsys)
    owner.swarm("create", "lab", "--out", str(owner.directory), "--bootstrap", ADDRESS)
    monkeypatch.chdir(owner.directory)
    return owner


def test_an_invite_has_the_requested_roles_and_limits(owner: Owner) -> None:
    printed = owner.swarm("invite", "--role", "host", "--role", "client", "--expires", "12h", "--uses", "5")
    invite = read_invite(printed["invite"], now=wall_clock())
    assert (sorted(invite.grant.terms.roles), invite.grant.terms.uses) == (["client", "host"], 5)
    assert invite.grant.terms.not_after - wall_clock() == pytest.approx(12 * 3600, abs=60)
    assert invite.bootstrap == (ADDRESS,)
    assert invite.grant.id.hex() == printed["id"]


def test_stdout_holds_only_the_invite(owner: Owner, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.execute(["swarm", "invite"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("swn1")
    assert len(shown.out.split()) == 1
    assert "1 peer as client" in shown.err


def test_a_listed_issuer_can_invite(owner: Owner, tmp_path: Path) -> None:
    key = str(tmp_path / "issuer.key")
    public = owner.swarm("new-key", key)["public_key"]
    assert owner.swarm("invite", "--key", key, code=3)["error"] == "config"
    owner.edit("issuers = []", f'issuers = ["{public}"]')
    assert owner.swarm("invite", "--key", key)["invite"].startswith("swn1")


def test_an_approved_peer_gets_an_invite_for_itself_only(owner: Owner) -> None:
    printed = owner.swarm("approve", ALICE, "--role", "trainer")
    terms = read_invite(printed["invite"], now=wall_clock()).grant.terms
    assert (terms.peer, terms.uses, terms.roles) == (ALICE, 1, {"trainer"})


def test_approve_adds_to_an_allow_list(owner: Owner) -> None:
    owner.edit('admission = "certificate"', 'admission = "allow-list"')
    assert owner.swarm("invite", code=3)["hint"].endswith("approve PEER --role ROLE")
    assert owner.swarm("approve", ALICE, "--role", "host", "--role", "client")["roles"] == ["client", "host"]
    assert owner.swarm("show", ".")["members"] == {ALICE: ["client", "host"]}
    assert owner.swarm("members")["members"] == [
        {"peer_id": ALICE, "roles": ["client", "host"], "state": "member", "until": None, "invite": None}
        | {"label": "", "name": "", "client": None, "last_seen": None}
    ]


def test_members_are_those_that_the_issuer_admitted(owner: Owner, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    assert owner.swarm("members", "--data-dir", data, code=3)["error"] == "config"
    printed = owner.swarm("invite", "--role", "host")
    owner.admit(printed["invite"], ALICE, tmp_path / "data")
    (member,) = owner.swarm("members", "--data-dir", data)["members"]
    assert (member["peer_id"], member["state"], member["invite"]) == (ALICE, "member", printed["id"])
    assert member["roles"] == ["host"]


@pytest.fixture
def sent_lists(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The revocation lists that were sent to the swarm."""
    lists: list[bytes] = []

    async def push_revocations(sealed: bytes, addresses: list[str], **_: object) -> list[str]:
        assert addresses == [ADDRESS]
        lists.append(sealed)
        return [ALICE]

    monkeypatch.setattr("swarmnet_protocols.joining.errands.push_revocations", push_revocations)
    return lists


def test_members_and_open_invites_are_listed_with_their_labels(owner: Owner, tmp_path: Path) -> None:
    printed = owner.swarm("invite", "--label", "Anna's laptop")
    assert printed["label"] == "Anna's laptop"
    other = owner.swarm("invite", "--label", "the lab", "--uses", "2", "--role", "host")
    gone = owner.swarm("invite")
    owner.swarm("revoke", gone["id"], code=5)
    owner.admit(printed["invite"], ALICE, tmp_path / "data")
    listed = owner.swarm("members", "--data-dir", str(tmp_path / "data"))
    ((member,), (left,)) = listed["members"], listed["invites"]
    assert (left["id"], left["label"], left["roles"]) == (other["id"], "the lab", ["host"])
    assert (left["used"], left["uses"]) == (0, 2)
    assert other["invite"] not in (owner.directory / "invites").read_text()
    assert (member["label"], member["client"], member["last_seen"]) == ("Anna's laptop", None, None)
    owner.swarm("invite", "--label", "x" * 65, code=2)


def test_revoke_adds_to_the_list_and_sends_it_to_the_swarm(
    owner: Owner, sent_lists: list[bytes], tmp_path: Path
) -> None:
    printed = owner.swarm("invite", "--role", "host")
    owner.admit(printed["invite"], ALICE, tmp_path / "data")
    bob = Identity.from_seed(b"bob").peer_id
    assert owner.swarm("revoke", ALICE)["told"] == [ALICE]
    owner.swarm("revoke", bob)
    owner.swarm("revoke", printed["invite"])
    owner.swarm("revoke", "ab" * 16)

    file = swarm_file.load(owner.directory)
    lists = [open_list(sealed, rules=file.rules(), now=wall_clock()) for sealed in sent_lists]
    assert [each.serial for each in lists] == sorted({each.serial for each in lists})
    assert lists[-1].revoked.peers == {ALICE, bob}
    assert lists[-1].revoked.invites == {bytes.fromhex(printed["id"]), b"\xab" * 16}
    (member,) = owner.swarm("members", "--data-dir", str(tmp_path / "data"))["members"]
    assert member["state"] == "revoked"

    owner.swarm("approve", ALICE)
    assert open_list(sent_lists[-1], rules=file.rules(), now=wall_clock()).revoked.peers == {bob}


def test_old_revocations_leave_the_list_at_the_next_one(
    owner: Owner, sent_lists: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    bob = Identity.from_seed(b"bob").peer_id
    owner.swarm("revoke", ALICE)
    owner.swarm("revoke", "ab" * 16)
    monkeypatch.setattr("swarmnet.cli.commands.swarm.members.wall_clock", lambda: wall_clock() + KEPT_S)
    owner.swarm("revoke", bob)
    owner.swarm("revoke", ALICE)
    file = swarm_file.load(owner.directory)
    named = [open_list(sealed, rules=file.rules(), now=wall_clock()).revoked for sealed in sent_lists]
    assert [len(each.in_order()) for each in named] == [1, 2, 1, 2]
    assert named[-1].peers == {ALICE, bob}


def test_revoke_removes_a_peer_from_an_allow_list(owner: Owner, sent_lists: list[bytes]) -> None:
    owner.edit('admission = "certificate"', 'admission = "allow-list"')
    owner.swarm("approve", ALICE, "--role", "host")
    owner.swarm("revoke", ALICE)
    assert swarm_file.load(owner.directory).allow == {}
    assert len(sent_lists) == 1


def test_revocations_survive_a_key_rotation(owner: Owner, sent_lists: list[bytes]) -> None:
    owner.swarm("revoke", ALICE)
    first = owner.swarm("show", ".")
    rotated = owner.swarm("rotate-key", "--overlap", "now")
    assert rotated["swarm_id"] == first["swarm_id"]
    assert rotated["authority"] != first["authority"]
    file = swarm_file.load(owner.directory)
    kept = open_list((owner.directory / "revocations").read_bytes(), rules=file.rules(), now=wall_clock())
    assert kept.revoked.peers == {ALICE}
    owner.swarm("revoke", Identity.from_seed(b"bob").peer_id)
    assert len(open_list(sent_lists[-1], rules=file.rules(), now=wall_clock()).revoked.peers) == 2


def test_a_revocation_that_reaches_no_peer_is_an_error(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    async def push_revocations(*_: object, **__: object) -> list[str]:
        return []

    monkeypatch.setattr("swarmnet_protocols.joining.errands.push_revocations", push_revocations)
    failed = owner.swarm("revoke", ALICE, code=5)
    assert "no peer of the swarm received" in failed["message"]
    assert (owner.directory / "revocations").exists()


def test_a_revoked_peer_is_approved_even_if_no_peer_is_reached(
    owner: Owner, sent_lists: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner.swarm("revoke", ALICE)

    async def push_revocations(*_: object, **__: object) -> list[str]:
        return []

    monkeypatch.setattr("swarmnet_protocols.joining.errands.push_revocations", push_revocations)
    assert owner.swarm("approve", ALICE)["peer_id"] == ALICE
    rules, sealed = swarm_file.load(owner.directory).rules(), (owner.directory / "revocations").read_bytes()
    assert open_list(sealed, rules=rules, now=wall_clock()).revoked.peers == set()


@pytest.mark.parametrize("command", ["invite", "revoke", "approve"])
def test_an_open_swarm_has_no_authority_for_these_commands(
    command: str, owner: Owner, tmp_path: Path
) -> None:
    owner.swarm("create", "all", "--open", "--out", str(tmp_path / "all"))
    who = [] if command == "invite" else [ALICE]
    failed = owner.swarm(command, *who, str(tmp_path / "all"), code=3)
    assert "no authority" in failed["message"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["invite", "--expires", "soon"], "--expires"),
        (["invite", "--expires", "9999999w"], "--expires"),
        (["invite", "--expires", "91d"], "--expires"),
        (["invite", "--uses", "0"], "--uses"),
        (["invite", "--role", "king"], "--role"),
        (["revoke", "alice"], "PEER"),
        (["approve", "alice"], "PEER"),
        (["rotate-key", "--overlap", "never"], "--overlap"),
        (["create", "x", "--out", "x", "--open", "--like", "y"], "--like"),
    ],
)
def test_invalid_arguments_are_named_and_change_nothing(
    arguments: list[str], words: str, owner: Owner
) -> None:
    before = {path.name: path.read_bytes() for path in owner.directory.iterdir()}
    assert words in owner.swarm(*arguments, code=2)["message"]
    assert {path.name: path.read_bytes() for path in owner.directory.iterdir()} == before


def test_a_file_older_than_the_one_used_before_is_refused(owner: Owner, tmp_path: Path) -> None:
    old = (owner.directory / "swarm.toml").read_bytes()
    owner.swarm("sign")
    data = ("--data-dir", str(tmp_path / "data"))
    # In a folder without the key, with which the peer would certify itself.
    new = str(shutil.copy("swarm.toml", tmp_path / "new.toml"))
    # The command is refused for lack of a certificate, after it has stored the file.
    assert owner.run("train", "status", "0" * 64, "--swarm", new, *data, code=4)["error"] == "not_authorised"
    (tmp_path / "old.toml").write_bytes(old)
    arguments = ("train", "status", "0" * 64, "--swarm", str(tmp_path / "old.toml"), *data)
    assert "serial 1 after 2" in owner.run(*arguments, code=7)["message"]
    assert (
        owner.run("train", "status", "0" * 64, "--swarm", "lab", *data, code=4)["error"] == "not_authorised"
    )


def test_a_damaged_invite_is_refused(owner: Owner, tmp_path: Path) -> None:
    invite = owner.swarm("invite")["invite"]
    data = ("--data-dir", str(tmp_path / "data"))
    damaged = owner.run("run", "m", "hi", "--swarm", invite[:-3], *data, code=3)
    assert "damaged" in damaged["message"]
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("is_open", [True, False])
def test_a_swarm_is_created_for_a_model(
    is_open: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = Owner(tmp_path / "lab", capsys)
    model = save_tiny("llama-tied", tmp_path / "tiny")
    how = ["--open"] if is_open else []
    where = ["--out", str(owner.directory), "--cache-dir", str(tmp_path / "cache")]
    made = owner.swarm("create", "lab", "--model", str(model), *how, *where)
    shown = owner.run("model", "show", str(model), "--cache-dir", str(tmp_path / "cache"))
    assert made["models"] == {"tiny": f"sha256:{shown['manifest']}"}
    assert made["pieces"] == {"tiny": f"sha256:{shown['pieces']}"}
    file = swarm_file.load_valid(owner.directory, wall_clock())
    assert file.rules().names == {"tiny": bytes.fromhex(shown["manifest"])}


def test_a_model_that_is_partly_here_is_listed_without_its_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = Owner(tmp_path / "lab", capsys)
    model = save_tiny("llama-tied", tmp_path / "tiny")
    where = ["--out", str(owner.directory), "--cache-dir", str(tmp_path / "cache")]
    with model_hub(model, tmp_path / "hf") as hub:
        made = owner.swarm("create", "lab", "--model", NAME, *where)
        assert made["models"].keys() == {NAME}
        assert made["pieces"] == {}
        assert hub.sent["model.safetensors"] <= 2 * HEAD_BYTES
        owner.run("model", "pull", NAME, "--cache-dir", str(tmp_path / "cache"))
        again = owner.swarm("create", "lab", "--model", NAME, "--force", *where)
        assert again["models"] == made["models"]
        assert again["pieces"].keys() == {NAME}


@pytest.mark.parametrize("is_open", [False, True])
def test_a_model_is_published_by_whoever_has_the_key(
    is_open: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    owner = Owner(tmp_path / "lab", capsys)
    cache = ("--cache-dir", str(tmp_path / "cache"))
    models = [save_tiny(kind, tmp_path / kind / "talk") for kind in ("llama-tied", "llama-untied")]
    owner.swarm("create", "lab", "--out", str(owner.directory), *(["--open"] if is_open else []))
    where = ("--swarm", str(owner.directory), *cache)
    for number, model in enumerate(models):
        made = owner.run("model", "publish", str(model), *where)
        assert (made["name"], made["listed"]) == ("talk", not is_open)
        assert made["host"] == f"swarmnet join {owner.directory} --model {model}"
        assert made["run"] == f"swarmnet run talk --swarm {owner.directory}"
        file = swarm_file.load_valid(owner.directory, wall_clock())
        assert file.serial == made["serial"] == (1 if is_open else 2 + number)
        listed = {name: f"sha256:{manifest.hex()}" for name, manifest in file.rules().names.items()}
        assert listed == ({} if is_open else {"talk": made["manifest"]}), "one model has the name"
    if is_open:
        refused = owner.run("model", "publish", str(models[0]), "--name", "chat", *where, code=3)
        assert "the name of its folder: talk" in refused["message"]
    else:
        owner.run("model", "publish", str(models[0]), "--name", "chat", *where)
        assert swarm_file.load(owner.directory).rules().names.keys() == {"talk", "chat"}
        assert swarm_file.load(owner.directory).rules().pieces_hashes


def test_a_lost_list_of_revocations_is_restored_from_a_member(
    owner: Owner, sent_lists: list[bytes], tmp_path: Path
) -> None:
    """As docs/guides/upgrading.md says. Without that, the next list lacks the earlier entries."""
    bob = Identity.from_seed(b"bob").peer_id
    owner.swarm("revoke", ALICE)
    file, kept = swarm_file.load(owner.directory), owner.directory / "revocations"
    member = Membership(file.rules(), bob, wall_clock, folder=tmp_path)
    member.add_revocations(sent_lists)
    ((name, restored),) = [(each.name, each.read_bytes()) for each in (tmp_path / "revocations").iterdir()]
    assert bytes.fromhex(name) == load_key(owner.directory / "authority.key").public_key
    assert restored == kept.read_bytes()

    kept.unlink()
    owner.swarm("revoke", bob)
    assert open_list(sent_lists[-1], rules=file.rules(), now=wall_clock()).revoked.peers == {bob}
    kept.write_bytes(restored)
    owner.swarm("revoke", bob)
    assert open_list(sent_lists[-1], rules=file.rules(), now=wall_clock()).revoked.peers == {ALICE, bob}


def test_the_swarm_of_start_is_managed_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own_household(tmp_path, "home")
    (tmp_path / "elsewhere" / "home").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    where = ("--data-dir", str(tmp_path))
    assert cli.execute(["swarm", "invite", "home", "--role", "host", *where]) == 0
    assert capsys.readouterr().out.startswith("swn1")
    assert cli.execute(["swarm", "invite", "office", *where]) == 3
    assert "cannot read the swarm file office" in capsys.readouterr().err
