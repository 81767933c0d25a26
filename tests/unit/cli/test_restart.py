"""The restart of a paused node: what one program tells the next."""

import os
import sys

import pytest

from swarmnet.restart import VARIABLE, may_restart, restart, take_resting
from swarmnet_node.resting import Resting

RESTING = Resting("tiny", "00" * 32, 30, 4, 9, "the swarm lacks them", may_move=True)


def test_the_next_program_gets_what_the_node_hosted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "utf8", "-m", "swarmnet", "join", "lab"])
    called: list[tuple[str, list[str]]] = []

    def replaced(program: str, arguments: list[str]) -> None:
        called.append((program, arguments))
        raise SystemExit

    monkeypatch.setattr(os, "execv", replaced)
    assert take_resting() is None
    with pytest.raises(SystemExit):
        restart(RESTING)
    assert called == [(sys.executable, [sys.executable, "-X", "utf8", "-m", "swarmnet", "join", "lab"])]
    assert take_resting() == RESTING
    assert take_resting() is None, "a child process is no paused node"


@pytest.mark.parametrize(("system", "module", "expected"), [("posix", "torch", True), ("nt", "torch", False)])
def test_a_process_restarts_where_that_frees_torch(
    system: str, module: str, monkeypatch: pytest.MonkeyPatch, *, expected: bool
) -> None:
    monkeypatch.setitem(sys.modules, module, sys)
    monkeypatch.setattr("swarmnet.restart.os.name", system)
    assert may_restart() is expected


def test_a_process_without_torch_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not may_restart()
