"""A private swarm of real processes: who is invited is in, who is revoked is out, everybody else never was."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet import AutoSwarmModelForCausalLM
from swarmnet_client.model import SwarmModel
from swarmnet_protocols.errors import NotAuthorised
from tests.support.commands import call, run
from tests.support.processes import NodeProcess
from tests.support.tiny_swarm import load_tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

PROMPT = torch.tensor([[5, 6, 7, 8, 9]])
TOKENS = 6
REVOKED_S = 120.0


class PrivateSwarm:
    """Its directory, two hosts of which one lets others in, and whoever is invited."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self.reference = load_tiny(directory / "tiny")
        self._stack = stack
        self.swarm = str(directory / "lab")
        call("swarm", "create", "lab", "--out", self.swarm)
        key = str(directory / "lab" / "authority.key")
        self.issuer = self._node("issuer", self.swarm, "--issuer", key, "--blocks", "0:3")
        self.address = self.issuer.ready["addresses"][0]
        self.host = self._node("host", self.invite("host"), "--blocks", "3:6")
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

    def revoke(self, peer_id: str) -> None:
        told = call("swarm", "revoke", peer_id, self.swarm, "--bootstrap", self.address)["told"]
        assert told == [self.issuer.ready["peer_id"]]

    def _node(self, name: str, *arguments: str) -> NodeProcess:
        options = ("--model", self.model, "--cache-dir", str(self.directory / "cache"))
        return self._stack.enter_context(NodeProcess((*arguments, *options), self.directory / name))


@pytest.fixture
def private(tmp_path: Path) -> Iterator[PrivateSwarm]:
    with ExitStack() as stack:
        yield PrivateSwarm(tmp_path, stack)


def test_who_is_invited_is_in_and_who_is_revoked_is_out(private: PrivateSwarm) -> None:
    wanted = private.reference.greedy(PROMPT[0].tolist(), TOKENS)

    def answer(model: Any) -> list[int]:
        tokens: list[int] = model.generate(PROMPT, max_new_tokens=TOKENS, do_sample=False)[0, 5:].tolist()
        return tokens

    invite = private.invite("client")
    model = private.connect(invite, "alice")
    # What is left of the session at its end is nobody's any more.
    with contextlib.suppress(NotAuthorised), model.session(max_length=64):
        assert answer(model) == wanted
        assert [node.status.sessions for node in (private.issuer, private.host)] == [1, 1]
        members = call("swarm", "members", private.swarm, "--data-dir", str(private.issuer.data_dir))
        (member,) = (row for row in members["members"] if row["roles"] == ["client"])
        started = time.monotonic()
        private.revoke(member["peer_id"])
        with pytest.raises(NotAuthorised, match="revoked"):
            model._runtime._over.result(REVOKED_S)
        print(f"metric=revoked_s value={time.monotonic() - started:.1f} goal={REVOKED_S:g}")
    assert [node.status.sessions for node in (private.issuer, private.host)] == [0, 0]
    with pytest.raises(NotAuthorised, match="revoked"):
        private.connect(invite, "alice")

    # Those who were not revoked go on; a revoked host stops by itself.
    other = private.connect(private.invite("client"), "bob")
    assert answer(other) == wanted
    private.revoke(private.host.ready["peer_id"])
    assert private.host.wait_for_end(timeout_s=REVOKED_S) == 4
    assert private.host.events[-1]["error"] == "not_authorised"


def test_strangers_are_told_that_they_are_none_of_us(private: PrivateSwarm) -> None:
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
    stranger = run(*arguments, *where)
    assert stranger.returncode == 4
    assert "members only" in stranger.stdout
    # A client's certificate does not make a host.
    mere_client = run(
        "join",
        private.invite("client"),
        "--model",
        private.model,
        "--data-dir",
        str(private.directory / "client"),
        "--listen",
        "/ip4/127.0.0.1/tcp/0",
        "--json",
    )
    assert mere_client.returncode == 4
    assert "host" in mere_client.stdout
