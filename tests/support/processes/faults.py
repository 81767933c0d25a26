"""Faults of a node, and how to inflict them on the node that serves, in the middle of an answer."""

import signal
from collections.abc import Callable
from typing import Any

import psutil
import torch

from tests.support.processes.nodes import NodeProcess, Swarm


class At:
    """A transformers streamer that runs each action when the answer has ``count`` tokens, for each
    (count, action)."""

    def __init__(self, *actions: tuple[int, Callable[[], object]]) -> None:
        self._actions = dict(actions)
        self._tokens = -1  # the first call has the prompt

    def put(self, _: torch.Tensor) -> None:
        self._tokens += 1
        if action := self._actions.get(self._tokens):
            action()

    def end(self) -> None:
        pass


class Strike:
    """A function that inflicts ``fault`` on the node that serves ``block`` to ``model``. ``hit``
    lists the nodes that it hit."""

    def __init__(
        self, lab: Swarm, model: Any, fault: Callable[[NodeProcess], object], block: int = 10
    ) -> None:
        self.hit: list[NodeProcess] = []
        self._lab = lab
        self._model = model
        self._fault = fault
        self._block = block

    def __call__(self) -> None:
        route = self._model.last_run.route
        peer = next(peer for peer, start, end in route if start <= self._block < end)
        self.hit.append(node_of(self._lab, peer))
        self._fault(self.hit[-1])


def node_of(lab: Swarm, peer: str) -> NodeProcess:
    """The node with this peer id."""
    return next(node for node in lab.nodes.values() if node.ready["peer_id"] == peer)


def kill(node: NodeProcess) -> None:
    node.send_signal(signal.SIGKILL)


def kill_p2pd(node: NodeProcess) -> None:
    node.send_signal(signal.SIGKILL, python=False)


def kill_python(node: NodeProcess) -> None:
    node.send_signal(signal.SIGKILL, children=False)


def kill_own_p2pd() -> None:
    """Kill the p2pd of the clients in this process."""
    for child in psutil.Process().children():
        if child.name() == "p2pd":
            child.kill()


def stop(node: NodeProcess) -> None:
    node.send_signal(signal.SIGSTOP)


def stop_python(node: NodeProcess) -> None:
    node.send_signal(signal.SIGSTOP, children=False)


def resume(node: NodeProcess) -> None:
    """Undo ``stop``."""
    node.send_signal(signal.SIGCONT)
