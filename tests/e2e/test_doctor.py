"""The doctor on a real network: a bootstrap peer dials back, and is reported after it has
stopped."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmnet import cli
from swarmnet.doctor import gather
from tests.support.processes.commands import RunningCommand, call

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("doctor")
    call("swarm", "create", "lab", "--out", str(made / "lab"))
    return made


@pytest.fixture(scope="module")
def peer(directory: Path) -> Iterator[RunningCommand]:
    arguments = ("bootstrap", str(directory / "lab"), "--data-dir", str(directory / "peer"))
    command = RunningCommand((*arguments, "--listen", "/ip4/127.0.0.1/tcp/0"), directory / "peer.log")
    with command as running:
        address = running.wait("ready")["addresses"][0]
        assert (directory / "peer" / "addresses").read_text().splitlines() == [address]
        call("swarm", "sign", str(directory / "lab"), "--bootstrap", address)
        yield running


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def examine(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, dict[str, dict[str, Any]]]]:
    """Runs the doctor; its exit code and the findings by check."""
    monkeypatch.setattr(gather, "PEERS_S", 60.0)
    where = ("--swarm", str(directory / "lab"), "--data-dir", str(directory / "mine"))

    def examined(*options: str) -> tuple[int, dict[str, dict[str, Any]]]:
        capsys.readouterr()
        code = cli.execute(["doctor", *where, *options, "--json"])
        output = json.loads(capsys.readouterr().out)
        return code, {each["check"]: each for each in output["findings"]}

    return examined


def test_a_bootstrap_peer_dials_back_and_is_reported_when_gone(
    peer: RunningCommand, examine: Callable[..., tuple[int, dict[str, dict[str, Any]]]]
) -> None:
    port = free_port()
    listen = ("--listen", f"/ip4/127.0.0.1/tcp/{port}")
    code, findings = examine(*listen)
    assert code == 0
    levels = {check: findings[check]["level"] for check in ("listen", "bootstrap", "clock", "reachable")}
    assert set(levels.values()) == {"ok"}, findings
    assert str(port) in findings["reachable"]["text"]
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        code, findings = examine(*listen)
    assert (code, findings["listen"]["level"]) == (1, "fail")
    os.kill(peer.pid, signal.SIGTERM)
    assert peer.wait_for_end() == 0
    code, findings = examine()
    assert (code, findings["bootstrap"]["level"]) == (1, "fail")
    assert "clock" not in findings


def test_a_new_bootstrap_peer_begins_a_swarm_again(peer: RunningCommand, directory: Path) -> None:
    """All addresses of the swarm file are dead."""
    peer.kill()
    where = ("--data-dir", str(directory / "new"), "--listen", "/ip4/127.0.0.1/tcp/0")
    with RunningCommand(("bootstrap", str(directory / "lab"), *where), directory / "new.log") as again:
        assert again.wait("ready")["addresses"]
