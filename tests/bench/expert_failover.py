"""How long an answer stands still when a peer that computes routed experts for it is killed, hangs,
is slow, or is cut off.

    python -m tests.bench.expert_failover [--runs 5] [--faults kill stop slow cut lost] [--tokens 96] [--seed 0]

A host of all blocks has no routed experts: two peers have one half of them each, and two more peers
the same halves. Each run faults, at a seeded random token, the peer that has computed the most rows
of the answer. ``slow`` stops it for four fifths of each 0.1 s; ``lost`` kills a peer whose experts
no other one has, so that the host loads them. Cuts happen on emulated links of 1 ms round trip,
where each peer is a machine, and need root. A stall is the longest wait for one token after the
first; ``undisturbed_s`` are those of answers without a fault. Prints one line of JSON for each
fault.
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnet_protocols.directory.node_reports import rows_of as rows_by_expert
from tests.bench.experts import experts_swarm, save_model, start_peer
from tests.support.processes.commands import LOOPBACK, TIMEOUT_S, Place
from tests.support.processes.faults import kill, resume, stop
from tests.support.processes.nodes import NodeProcess, RunProcess, Swarm
from tests.support.processes.wan import Uplink, WanHost, wan

HALVES = ("0-15", "16-31")
LINK = Uplink(0.0005, bytes_per_s=125_000_000)
GOALS_S = {"kill": 0.5, "slow": 0.5, "stop": 3.0, "cut": 3.0, "lost": None}
SLOW_PERIOD_S, SLOW_SHARE = 0.1, 0.8
PROMPT = "w11 w12 w13 w14 w15 w16 w17 w18"
Undo = Callable[[], object]


@dataclass(frozen=True)
class Peer:
    """A peer with experts, which a fault may end and ``again`` starts once more."""

    lab: Swarm
    name: str
    experts: str
    place: Place = LOOPBACK

    @property
    def node(self) -> NodeProcess:
        return self.lab.nodes[self.name]

    def again(self) -> None:
        self.node.kill()
        start_peer(self.lab, self.name, self.experts, self.place)


Begin = Callable[[Peer], Undo]
"""Begins a fault of a peer."""


@contextmanager
def halves_swarm(
    folder: Path, model: Path, replicas: int, places: Sequence[Place]
) -> Iterator[tuple[Swarm, list[Peer]]]:
    """``replicas`` peers with each half of the experts, at the first of ``places``, and the host at
    the one after these."""
    shares = HALVES * replicas
    with experts_swarm(folder, model, shares, places[: len(shares) + 1]) as lab:
        peers = [
            Peer(lab, f"peer{number}", experts, place)
            for number, (experts, place) in enumerate(zip(shares, places, strict=False))
        ]
        yield lab, peers


class Slowness:
    """Stops a process for ``SLOW_SHARE`` of each ``SLOW_PERIOD_S`` until ``end``."""

    def __init__(self, node: NodeProcess) -> None:
        self._node = node
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.is_set():
            stop(self._node)
            self._ending.wait(SLOW_PERIOD_S * SLOW_SHARE)
            resume(self._node)
            self._ending.wait(SLOW_PERIOD_S * (1 - SLOW_SHARE))

    def end(self) -> None:
        self._ending.set()
        self._thread.join()


def answer(
    lab: Swarm, place: Place, tokens: int, at: int = 0, strike: Callable[[], object] = lambda: None
) -> tuple[float, list[int]]:
    """The longest stall of an answer, asked for at ``place``, and its tokens. ``strike`` is called
    after ``at`` tokens."""
    with RunProcess(lab, PROMPT, tokens, place, "--no-speculate") as run:
        while sum(event["event"] == "token" for event in list(run.events)) < at:
            run.wait_for_more(timeout_s=TIMEOUT_S)
        strike()
        code, told = run.finish()
    if code or len(told["token_ids"]) < tokens:
        raise RuntimeError(f"exit code {code}: {told}")
    return told["longest_stall_s"], told["token_ids"]


def report(fault: str, runs: list[tuple[float, list[int]]], calm: list[tuple[float, list[int]]]) -> None:
    stalls = [stall_s for stall_s, _ in runs]
    found: dict[str, Any] = {
        "bench": "expert_failover",
        "fault": fault,
        "runs": len(runs),
        "equal_tokens": all(ids == calm[0][1] for _, ids in [*calm, *runs]),
        "stall_s_median": round(statistics.median(stalls), 3),
        "stall_s_max": round(max(stalls), 3),
        "goal_s": GOALS_S[fault],
        "stalls_s": [round(stall_s, 3) for stall_s in stalls],
        "undisturbed_s": [round(stall_s, 3) for stall_s, _ in calm],
    }
    print(json.dumps(found), flush=True)


def killed(peer: Peer) -> Undo:
    kill(peer.node)
    return peer.again


def stopped(peer: Peer) -> Undo:
    stop(peer.node)
    return lambda: resume(peer.node)


def slowed(peer: Peer) -> Undo:
    return Slowness(peer.node).end


def cut_by(hosts: dict[str, WanHost]) -> Begin:
    def cut(peer: Peer) -> Undo:
        hosts[peer.name].cut()
        return hosts[peer.name].heal

    return cut


def rows_of(peers: Collection[Peer]) -> dict[str, int]:
    """The rows that each peer has computed."""
    return {peer.name: sum(rows_by_expert(peer.node.status.host.experts).values()) for peer in peers}


def measure(
    faults: dict[str, Begin], lab: Swarm, peers: Collection[Peer], place: Place, arguments: argparse.Namespace
) -> None:
    """``faults`` return what undoes them. Clients are at ``place``."""
    rng = random.Random(arguments.seed)
    tokens, undo = arguments.tokens, []
    calm = [answer(lab, place, tokens) for _ in range(arguments.runs)]
    for fault, begin in faults.items():
        if fault not in arguments.faults:
            continue
        runs = []
        for _ in range(arguments.runs):
            before = rows_of(peers)

            def strike(begin: Begin = begin, before: dict[str, int] = before) -> None:
                more = {name: rows - before[name] for name, rows in rows_of(peers).items()}
                used = max(more, key=more.__getitem__)
                undo.append(begin(next(each for each in peers if each.name == used)))

            runs.append(answer(lab, place, tokens, rng.randrange(1, tokens // 2), strike))
            undo.pop()()
        report(fault, runs, calm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--faults", nargs="+", choices=list(GOALS_S), default=list(GOALS_S))
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        model = save_model(folder / "model")
        here = [LOOPBACK] * (2 * len(HALVES) + 1)
        if {"kill", "stop", "slow"} & set(arguments.faults):
            with halves_swarm(folder / "loopback", model, 2, here) as (lab, peers):
                measure({"kill": killed, "stop": stopped, "slow": slowed}, lab, peers, LOOPBACK, arguments)
        if "lost" in arguments.faults:
            with halves_swarm(folder / "lost", model, 1, here) as (lab, peers):
                measure({"lost": killed}, lab, peers, LOOPBACK, arguments)
        if "cut" in arguments.faults:
            hosts = stack.enter_context(wan(*[LINK] * len(here)))
            with halves_swarm(folder / "cut", model, 2, [host.place for host in hosts]) as (lab, peers):
                by_name = {peer.name: host for peer, host in zip(peers, hosts[:-1], strict=True)}
                measure({"cut": cut_by(by_name)}, lab, peers, hosts[-1].place, arguments)


if __name__ == "__main__":
    main()
