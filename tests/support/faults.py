"""What can happen to a node, and how to do it to the node that serves, in the middle of an answer."""

import signal
from collections.abc import Callable
from typing import Any

import torch

from tests.support.processes import NodeProcess, Swarm


class At:
    """A transformers streamer that does something when the answer has ``count`` tokens, for each (count, action)."""

    def __init__(self, *actions: tuple[int, Callable[[], None]]) -> None:
        self._actions = dict(actions)
        self._tokens = -1  # the prompt is put first

    def put(self, _: torch.Tensor) -> None:
        self._tokens += 1
        if action := self._actions.get(self._tokens):
            action()

    def end(self) -> None:
        pass


def serving(lab: Swarm, model: Any, block: int = 10) -> tuple[str, NodeProcess]:
    """The node, by name, that serves ``block`` to ``model`` now."""
    peer = next(peer for peer, start, end in model.last_run.route if start <= block < end)
    return next((name, node) for name, node in lab.nodes.items() if node.ready["peer_id"] == peer)


def kill(node: NodeProcess) -> None:
    node.send_signal(signal.SIGKILL)


def kill_p2pd(node: NodeProcess) -> None:
    node.send_signal(signal.SIGKILL, python=False)


def kill_python(node: NodeProcess) -> None:
    node.send_signal(signal.SIGKILL, p2pd=False)


def stop(node: NodeProcess) -> None:
    node.send_signal(signal.SIGSTOP)


def stop_python(node: NodeProcess) -> None:
    node.send_signal(signal.SIGSTOP, p2pd=False)


def resume(node: NodeProcess) -> None:
    """Undo a stop."""
    node.send_signal(signal.SIGCONT)
