"""Real nodes and clients in a swarm whose file names a model: they take its weights from each other
while no hub answers."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from swarmnet_protocols.models.verified_files import SETTLED_NS
from tests.support.models.big_model import save_big
from tests.support.models.tiny_models import write_gguf
from tests.support.processes.commands import RunningCommand, call, run
from tests.support.processes.nodes import NodeProcess

pytestmark = pytest.mark.slow


class Members:
    """The members of a swarm for one model, each with a cache of its own. The first has the model's
    files."""

    def __init__(self, model: Path, folder: Path, *how: str) -> None:
        """``how``: options of `swarm create`, not ``--model``. The model is published later."""
        newest_ns = max(path.stat().st_ctime_ns for path in (model, *model.glob("*")))
        # The hash of a file is remembered once its times are old enough to show a later change.
        time.sleep(max(0, newest_ns + SETTLED_NS - time.time_ns()) / 1e9 + 0.1)
        self.folder, self.name = folder, model.name
        self.nodes: list[NodeProcess] = []
        where = ("--out", str(folder / "lab"), "--cache-dir", str(self.cache("first")))
        created = call("swarm", "create", "lab", "--no-mdns", *(how or ("--model", str(model))), *where)
        if how:
            options = ("--swarm", str(folder / "lab"), "--cache-dir", str(self.cache("first")))
            created = call("model", "publish", str(next(model.glob("*.gguf"))), *options)
            self.name = created["name"]
            return
        assert created["models"].keys() == {model.name}
        assert created["pieces"].keys() == {model.name}
        [self.manifest] = created["models"].values()

    def cache(self, member: str) -> Path:
        return self.folder / f"{member}-cache"

    def options(self, member: str) -> list[str]:
        addresses = [address for node in self.nodes for address in node.ready["addresses"]]
        known = [option for address in addresses for option in ("--bootstrap", address)]
        return ["--cache-dir", str(self.cache(member)), *known]

    def join(self, member: str, span: str, model: str | None = None) -> NodeProcess:
        arguments = (str(self.folder / "lab"), "--model", model or self.name, "--blocks", span)
        self.nodes.append(NodeProcess((*arguments, *self.options(member)), self.folder / member))
        assert self.nodes[-1].ready
        return self.nodes[-1]

    def client(self, member: str) -> list[str]:
        """The options of a client that has nothing of the model."""
        own = ("--swarm", str(self.folder / "lab"), "--data-dir", str(self.folder / member))
        return [*own, *self.options(member)]

    def here(self, member: str) -> int:
        """Bytes of the model that a member has."""
        [stored] = call("model", "ls", "--cache-dir", str(self.cache(member)))["models"][1:]
        assert stored["name"] == self.name
        return int(stored["present_bytes"])


@pytest.fixture(autouse=True)
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))


@pytest.fixture
def members(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Members]:
    running = Members(request.param(tmp_path / "model"), tmp_path)
    try:
        yield running
    finally:
        for node in running.nodes:
            node.kill()


@pytest.mark.thorough
@pytest.mark.parametrize("members", [save_big], indirect=True)
def test_hosts_join_without_a_hub(members: Members, tmp_path: Path) -> None:
    """How much a host fetches from peers is in
    ``unit/protocols/fetching/test_weights_from_peers.py``, too."""
    whole = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    members.join("first", "0:1", str(tmp_path / "model"))
    second = members.join("second", "30:40")
    assert f"sha256:{second.status.host.record.manifest.hex()}" == members.manifest
    assert 0.1 * whole < members.here("second") < 0.25 * whole
    members.nodes.pop(0).kill()
    members.join("third", "30:40")
    assert 0.1 * whole < members.here("third") < 0.25 * whole


def save_gguf(folder: Path) -> Path:
    folder.mkdir()
    return write_gguf(folder / "tiny.gguf", "llama")


@pytest.mark.parametrize("members", [save_gguf], indirect=True)
def test_a_gguf_file_that_no_hub_has_is_hosted_run_and_served(members: Members, tmp_path: Path) -> None:
    members.join("first", "0:2", str(tmp_path / "model" / "tiny.gguf"))
    members.join("second", "2:3")
    # In a process of its own, which reads the address of no hub from the environment when it
    # starts.
    done = run("run", members.name, "!!", "--raw", "-n", "4", "--json", *members.client("third"))
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert len(answer["token_ids"]) == 4
    assert len(answer["route"]) == 2
    assert members.here("third") < (tmp_path / "model" / "tiny.gguf").stat().st_size
    command = ("serve", "--model", members.name, "--port", "0", *members.client("fourth"))
    with RunningCommand(command, tmp_path / "serve.log") as gateway:
        url = gateway.wait("ready")["url"]
        body: dict[str, Any] = {"model": members.name, "prompt": "!!", "max_tokens": 4, "temperature": 0}
        served = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert served["choices"][0]["text"] == answer["text"]
    assert served["precisions"] == answer["precisions"] == ["q8_0"]


@pytest.mark.thorough
def test_a_model_that_hosts_announce_is_hosted_and_run_by_its_name(tmp_path: Path) -> None:
    """The swarm file does not list it, because nobody may sign the file."""
    members = Members(save_gguf(tmp_path / "model").parent, tmp_path, "--open")
    try:
        members.join("first", "0:2", str(tmp_path / "model" / "tiny.gguf"))
        members.join("second", "2:3")
        done = run("run", "tiny.gguf", "!!", "--raw", "-n", "4", "--json", *members.client("third"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(json.loads(done.stdout)["route"]) == 2
        done = run("run", "tinny.gguf", "!!", "--json", *members.client("third"))
        assert (done.returncode, "there is no model" in done.stdout) == (3, True)
    finally:
        for node in members.nodes:
            node.kill()
