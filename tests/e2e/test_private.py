"""A private swarm of real processes: invited peers are admitted, revoked peers and outsiders are
refused."""

import base64
import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from swarmnet import AutoSwarmModelForCausalLM
from swarmnet.cli import execute
from swarmnet_client.model.model import SwarmModel
from swarmnet_protocols.errors import NotAuthorised
from swarmnet_protocols.membership.invites import read_invite
from tests.support.processes.commands import RunningCommand, call
from tests.support.processes.nodes import NodeProcess, await_idle
from tests.support.swarm.tiny_swarm import load_tiny

pytestmark = pytest.mark.slow

PROMPT = torch.tensor([[5, 6, 7, 8, 9]])
TOKENS = 6
REVOKED_S = 120.0
NOT_AUTHORISED = 4
"""The exit code in docs/exit-codes.md."""


class PrivateSwarm:
    """A private swarm: its directory, two hosts of which one is an issuer, and the invited
    peers."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.reference = load_tiny(directory / "tiny")
        self._stack = stack
        self.swarm = str(directory / "lab")
        call("swarm", "create", "lab", "--out", self.swarm)
        self.authority_key = directory / "lab" / "authority.key"
        self.issuer = self._node("issuer", self.swarm, "--issuer", str(self.authority_key), "--blocks", "0:3")
        self.address = self.issuer.ready["addresses"][0]
        self.invites = directory / "host.invite"
        self.invites.write_text(self.invite("host"))
        self.host = self._node("host", str(self.invites), "--blocks", "3:6")
        _ = self.host.ready

    @property
    def model(self) -> str:
        return str(self.directory / "tiny" / "model")

    def invite(self, role: str) -> str:
        made = call("swarm", "invite", self.swarm, "--role", role, "--bootstrap", self.address)
        return str(made["invite"])

    def connect(self, swarm: str, data_dir: str) -> SwarmModel:
        model = AutoSwarmModelForCausalLM.from_pretrained(
            self.model,
            swarm=swarm,
            bootstrap=[self.address],
            cache_dir=self.directory / "cache",
            data_dir=self.directory / data_dir,
        )
        return self._stack.enter_context(model)

    def clients(self) -> set[str]:
        """The members with the role of a client only."""
        members = call("swarm", "members", self.swarm, "--data-dir", str(self.issuer.data_dir))["members"]
        return {row["peer_id"] for row in members if row["roles"] == ["client"]}

    def revoke(self, peer_id: str) -> None:
        told = call("swarm", "revoke", peer_id, self.swarm, "--bootstrap", self.address)["told"]
        assert told == [self.issuer.ready["peer_id"]]

    def _node(self, name: str, *arguments: str) -> NodeProcess:
        options = ("--model", self.model, "--cache-dir", str(self.directory / "cache"))
        return self._stack.enter_context(NodeProcess((*arguments, *options), self.directory / name))


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateSwarm]:
    """A private swarm with debug logs. The last test that uses it revokes its host."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWARMNET_LOG_LEVEL", "debug")
        yield PrivateSwarm(tmp_path_factory.mktemp("private"), stack)


def test_the_command_of_a_client_that_is_revoked_ends_as_documented(
    private: PrivateSwarm, capsys: pytest.CaptureFixture[str]
) -> None:
    where = (
        "--cache-dir",
        str(private.directory / "cache"),
        "--data-dir",
        str(private.directory / "carol"),
    )
    before = private.clients()
    run_it = ("run", private.model, "-n", "2", "--bootstrap", private.address, *where, "--swarm")
    with RunningCommand(
        (*run_it, private.invite("client"), "--chat"),
        private.directory / "carol.log",
        stdin=subprocess.PIPE,
    ) as chat:
        assert chat.process.stdin is not None
        chat.process.stdin.write("w20\n")
        chat.process.stdin.flush()
        while not chat.events:
            chat.wait_for_more(timeout_s=REVOKED_S)
            assert chat.process.poll() is None, chat.log.read_text()
        assert len(chat.events[0]["token_ids"]) == 2
        (carol,) = private.clients() - before
        private.revoke(carol)
        chat.process.stdin.write("w21\n")
        chat.process.stdin.flush()
        assert chat.wait_for_end() == NOT_AUTHORISED
    assert chat.events[-1]["error"] == "not_authorised"
    capsys.readouterr()
    assert execute([*run_it, "lab", "w22"]) == NOT_AUTHORISED
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-2:] == [
        "error: this peer was revoked",
        "hint: ask the owner of the swarm",
    ]


_URLSAFE = bytes.maketrans(b"+/", b"-_")
CANARY = [17, 93, 41, 88, 29, 64, 93, 17]
"""Token ids of a prompt that occurs nowhere else."""


def encodings(secret: bytes) -> list[bytes]:
    """The encodings in which a file might hold a secret. For base64, this is the part that does not
    depend on the offset of the secret."""
    shifted = [base64.b64encode(bytes(n) + secret)[(0, 2, 3)[n] : -4] for n in range(3)]
    return [secret, secret.hex().encode(), *shifted, *(each.translate(_URLSAFE) for each in shifted)]


def sequences(ids: Sequence[int]) -> list[bytes]:
    """Token ids as text, or as integers of any size."""
    texts = [" ".join(f"w{each}" for each in ids), *(glue.join(map(str, ids)) for glue in (",", ", ", " "))]
    packed = [np.array(ids, kind).tobytes() for kind in ("<u2", "<u4", "<u8", ">u2", ">u4", ">u8")]
    return [text.encode() for text in texts] + packed


def test_no_file_log_or_command_line_has_a_prompt_or_a_secret(private: PrivateSwarm) -> None:
    """Prompts and answers stay in memory, keys in their files, and invites in the file that the
    user wrote."""
    invite = private.invite("client")
    asker = private.connect(invite, "asker")
    answer = asker.generate(torch.tensor([CANARY]), max_new_tokens=8, do_sample=False)[
        0, len(CANARY) :
    ].tolist()
    nodes = (private.issuer, private.host)
    command_lines = [b" ".join(map(str.encode, each.cmdline())) for node in nodes for each in node.family]
    events = [json.dumps(event).encode() for node in nodes for event in node.events]
    for node in nodes:
        assert "DEBUG" in node.log.read_text().upper(), "the logs are on"

    assert len(set(answer)) > 3, "else it is found anywhere"
    key = load_pem_private_key(private.authority_key.read_bytes(), password=None)
    invites = (invite, private.invites.read_text())
    secrets = [key.private_bytes_raw(), *(read_invite(text, now=0.0).seed for text in invites)]  # type: ignore[union-attr]
    canaries = [
        *sequences(CANARY),
        *sequences(answer),
        *(form for each in secrets for form in encodings(each)),
    ]
    files = [path for path in private.directory.rglob("*") if path.is_file()]
    at_home = {private.authority_key, private.invites}
    places = {str(path): path.read_bytes() for path in files if path not in at_home}
    places |= {"command lines": b"\n".join(command_lines), "stdout": b"\n".join(events)}
    hits = [(place, canary) for place, content in places.items() for canary in canaries if canary in content]
    print(f"metric=canary hits in {len(places)} places value={len(hits)} goal=0")
    assert hits == []
    for place in at_home:
        assert any(canary in place.read_bytes() for canary in canaries), "what is looked for is found"


def test_a_newcomer_sees_the_swarm_by_its_invite_then_by_its_name(private: PrivateSwarm) -> None:
    where = ("--data-dir", str(private.directory / "visitor"))
    hosts = {private.issuer.ready["peer_id"], private.host.ready["peer_id"]}
    for swarm in (private.invite("client"), "lab"):
        seen = call("swarm", "status", swarm, "--bootstrap", private.address, *where)
        assert {peer for peer, each in seen["peers"].items() if each["state"] == "online"} == hosts
        (model,) = seen["models"].values()
        assert (model["missing_blocks"], model["healthy"]) == ([], True)
        assert seen["swarm"]["join"] == "lab", "an invite is a secret"


def test_strangers_are_told_that_they_are_no_members(
    private: PrivateSwarm, capsys: pytest.CaptureFixture[str]
) -> None:
    published = shutil.copy(Path(private.swarm, "swarm.toml"), private.directory / "published.toml")
    arguments = (
        "run",
        private.model,
        "w5 w6",
        "--raw",
        "--swarm",
        str(published),
        "--bootstrap",
        private.address,
    )
    where = ("--data-dir", str(private.directory / "stranger"), "--json")
    assert execute([*arguments, *where]) == NOT_AUTHORISED
    assert "members only" in capsys.readouterr().out
    # A client's certificate does not make a host.
    join = ("join", private.invite("client"), "--model", private.model, "--json")
    where = ("--data-dir", str(private.directory / "client"), "--listen", "/ip4/127.0.0.1/tcp/0")
    assert execute([*join, *where]) == NOT_AUTHORISED
    assert "host" in capsys.readouterr().out


def test_invited_peers_are_admitted_and_revoked_peers_are_not(private: PrivateSwarm) -> None:
    wanted = private.reference.greedy(PROMPT[0].tolist(), TOKENS)

    def answer(model: Any) -> list[int]:
        tokens: list[int] = model.generate(PROMPT, max_new_tokens=TOKENS, do_sample=False)[0, 5:].tolist()
        return tokens

    before = private.clients()
    invite = private.invite("client")
    model = private.connect(invite, "alice")
    # The end of the session raises, because its client is revoked by then.
    with contextlib.suppress(NotAuthorised), model.session(max_length=64):
        assert answer(model) == wanted
        assert [node.status.host.record.sessions for node in (private.issuer, private.host)] == [1, 1]
        (alice,) = private.clients() - before
        started = time.monotonic()
        private.revoke(alice)
        with pytest.raises(NotAuthorised, match="revoked"):
            model._runtime._over.result(REVOKED_S)
        print(f"metric=revoked_s value={time.monotonic() - started:.1f} goal={REVOKED_S:g}")
    await_idle(private.issuer, private.host)
    with pytest.raises(NotAuthorised, match="revoked"):
        private.connect(invite, "alice")

    # Members that were not revoked continue; a revoked host stops by itself.
    other = private.connect(private.invite("client"), "bob")
    assert answer(other) == wanted
    private.revoke(private.host.ready["peer_id"])
    assert private.host.wait_for_end(timeout_s=REVOKED_S) == NOT_AUTHORISED
    assert private.host.events[-1]["error"] == "not_authorised"
