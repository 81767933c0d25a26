"""Nodes of a running swarm fail as real processes and links do, in the middle of an answer: the
answer does not change.

Every fault at every hop and in every phase, and the error when no replica is left, is tested in
virtual time: ``sim/failover/test_failover.py`` and ``sim/failover/test_resilience.py``.
"""

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnet_client.chain.supervisor import ChainSupervisor
from swarmnet_node.owner import control
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.models import LocalModel, resolve
from tests.support.processes.commands import TIMEOUT_S
from tests.support.processes.faults import (
    At,
    Strike,
    kill,
    kill_own_p2pd,
    kill_p2pd,
    kill_python,
    node_of,
    resume,
    stop,
    stop_python,
)
from tests.support.processes.nodes import NodeProcess, RunProcess, Swarm, await_idle, swarm
from tests.support.processes.wan import Uplink, wan_swarm, why_not
from tests.support.swarm.generation import greedy

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m-instruct"
SPANS = ((10, 20), (0, 10), (10, 20), (20, 30))
"""The first node is the bootstrap peer of all, and one of two that host the middle blocks."""
TOKENS = 24
SHORT = list(range(100, 132))
PROMPT = "Once upon a time"
STORY_TOKENS = 60
LONG = [100 + number % 3000 for number in range(600)]  # three chunks

KILL_GOAL_S = 0.5
HANG_GOAL_S = 3.0
"""From the fault to the next token, replay not counted: kept in virtual time
(``sim/failover/test_failover.py``), printed here."""


@pytest.fixture(scope="module")
def local(cache_dir: Path) -> LocalModel:
    return resolve(MODEL, cache_dir=cache_dir)


@pytest.fixture(scope="module")
def whole(local: LocalModel) -> Any:
    return local.load_whole(dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def expected(whole: Any) -> Callable[[list[int]], list[int]]:
    """The tokens that transformers generates in one process, for a prompt."""
    answers = {len(ids): generate(whole, ids) for ids in (SHORT, LONG)}
    return lambda ids: answers[len(ids)]


@pytest.fixture(scope="module")
def story(local: LocalModel, whole: Any) -> list[int]:
    """The tokens that transformers generates after ``PROMPT`` in one process."""
    ids = local.tokenizer()(PROMPT).input_ids
    return greedy(whole, [ids], STORY_TOKENS)[0]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Swarm]:
    with swarm(tmp_path_factory.mktemp("failover") / "lab", cache_dir, *SPANS) as started:
        yield started


@pytest.fixture
def lab(running: Swarm) -> Swarm:
    """The swarm with all nodes serving: those that the last test ended are started again."""
    for name, node in list(running.nodes.items()):
        if node.process.poll() is not None:
            running.relaunch(name)
    for node in running.nodes.values():
        _ = node.ready
    return running


def generate(model: Any, ids: list[int], streamer: Any = None) -> list[int]:
    return greedy(model, [ids], TOKENS, streamer)[0]


def show(fault: str, model: Any, goal_s: float) -> None:
    print(f"{fault}: longest_stall_s={model.last_run.longest_stall_s:.2f} goal={goal_s} s and the replay")


@pytest.mark.parametrize("fault", [kill_p2pd, kill_python])
def test_an_answer_continues_when_one_process_of_a_node_is_killed(
    lab: Swarm, expected: Callable[[list[int]], list[int]], fault: Callable[[NodeProcess], None]
) -> None:
    with lab.connect() as model:
        strike = Strike(lab, model, fault)
        assert generate(model, SHORT, At((10, strike))) == expected(SHORT)
        assert model.last_run.failovers >= 1
        show(fault.__name__, model, KILL_GOAL_S)
    assert strike.hit[0].process.wait(TIMEOUT_S) != 0  # without its other process a node ends


def test_an_answer_continues_when_a_node_hangs_whose_p2pd_does_not(
    lab: Swarm, expected: Callable[[list[int]], list[int]]
) -> None:
    with lab.connect() as model:
        strike = Strike(lab, model, stop_python)
        try:
            assert generate(model, SHORT, At((10, strike))) == expected(SHORT)
        finally:
            resume(strike.hit[0])
        assert model.last_run.failovers >= 1
        show("stop_python", model, HANG_GOAL_S)
    await_idle(*lab.nodes.values())  # the resumed node notices that its client has moved


@pytest.mark.thorough
def test_an_answer_continues_when_a_node_hangs_during_a_long_prompt(
    lab: Swarm, expected: Callable[[list[int]], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In virtual time: the phase ``prefill`` of ``sim/failover/test_failover.py``."""
    hit: list[NodeProcess] = []
    complete = ChainSupervisor._complete_step

    def complete_and_stop(supervisor: ChainSupervisor, *arguments: Any) -> None:
        """Stop both processes of a node when the first chunk of the prompt has returned and others
        are in flight."""
        complete(supervisor, *arguments)
        if not hit:
            peer = next(peer for peer, start, _ in supervisor._report.route if start == 10)
            hit.append(node_of(lab, peer))
            stop(hit[0])

    monkeypatch.setattr(ChainSupervisor, "_complete_step", complete_and_stop)
    with lab.connect() as model:
        try:
            assert generate(model, LONG) == expected(LONG)
        finally:
            resume(hit[0])
        assert model.last_run.failovers >= 1
        show("stop during prefill", model, HANG_GOAL_S)
    await_idle(*lab.nodes.values())


def test_the_client_waits_for_the_only_host_of_its_first_blocks(
    lab: Swarm, expected: Callable[[list[int]], list[int]]
) -> None:
    with lab.connect() as model:
        client = model._runtime.opened
        # A process starts when a busy machine lets it; how long a client waits is shown in virtual
        # time.
        client.timing = replace(client.timing, recover_s=60.0)
        restart = Strike(lab, model, lambda node: lab.relaunch(node.name), block=0)
        assert generate(model, SHORT, At((10, restart))) == expected(SHORT)
        assert model.last_run.failovers >= 1


@pytest.mark.thorough
def test_an_answer_survives_a_killed_node_and_a_killed_replacement(
    lab: Swarm, expected: Callable[[list[int]], list[int]]
) -> None:
    """In virtual time: ``sim/failover/test_failover.py``. Its replacements fail in every phase."""
    with lab.connect() as model:
        first = Strike(lab, model, lambda node: lab.relaunch(node.name).ready)
        second = Strike(lab, model, kill)
        assert generate(model, SHORT, At((6, first), (18, second))) == expected(SHORT)
        assert model.last_run.failovers >= 2
    assert first.hit[0].name != second.hit[0].name


@pytest.mark.thorough
def test_an_answer_continues_when_its_host_finishes(
    lab: Swarm, expected: Callable[[list[int]], list[int]]
) -> None:
    """In virtual time: ``sim/failover/test_handover.py``. In ``test_guides.py`` a process
    finishes."""

    def finish_and_wait(node: NodeProcess) -> None:
        """Wait for the hand-over between two tokens: the rest of the answer may take less time than
        it does."""
        control.finish(node.data_dir, grace_s=30.0)
        deadline = time.monotonic() + TIMEOUT_S
        while not model.last_run.failovers:
            assert time.monotonic() < deadline, "the session was not handed over"
            time.sleep(0.01)

    with lab.connect() as model:
        finish = Strike(lab, model, finish_and_wait)
        assert generate(model, SHORT, At((6, finish))) == expected(SHORT)
        show("finish", model, KILL_GOAL_S)
        assert finish.hit[0].process.wait(TIMEOUT_S) == 0


def test_a_client_goes_on_when_every_bootstrap_peer_is_gone(
    lab: Swarm, expected: Callable[[list[int]], list[int]]
) -> None:
    bootstrap, other = lab.nodes[next(iter(lab.nodes))], list(lab.nodes.values())[-1]
    with lab.connect(bootstrap=bootstrap.ready["addresses"]) as model:
        assert generate(model, SHORT) == expected(SHORT)
        kill(bootstrap)
        assert generate(model, SHORT) == expected(SHORT)
    with lab.connect(bootstrap=other.ready["addresses"]) as model:
        assert generate(model, SHORT) == expected(SHORT)


def test_a_client_whose_own_p2pd_dies_says_what_to_do(
    lab: Swarm, expected: Callable[[list[int]], list[int]]
) -> None:
    with lab.connect() as model:
        with pytest.raises(SwarmnetError, match="network process stopped") as caught:
            generate(model, SHORT, At((6, kill_own_p2pd)))
        assert "again" in caught.value.hint
        with pytest.raises(SwarmnetError, match="network process stopped"):
            generate(model, SHORT)
    await_idle(*lab.nodes.values())
    with lab.connect() as model:
        assert generate(model, SHORT) == expected(SHORT)


# ---- `swarmnet run` ----------------------------------------------------------------------------


def middle(lab: Swarm) -> list[str]:
    return [name for name in lab.nodes if name.startswith("10-20")]


def test_the_sessions_of_a_killed_client_are_freed(lab: Swarm) -> None:
    with RunProcess(lab, PROMPT, 4000) as run:  # it runs when a busy machine lets this test look
        run.wait("token")
        assert any(node.status.host.record.sessions for node in lab.nodes.values())
        run.process.send_signal(signal.SIGKILL)
    await_idle(*lab.nodes.values())
    with lab.connect() as model, model.session():
        generate(model, SHORT)
        assert sum(node.status.host.cache_bytes for node in lab.nodes.values()) > 0
    await_idle(*lab.nodes.values())


@pytest.mark.thorough
def test_the_command_goes_on_when_a_replica_comes_back_in_time(lab: Swarm, story: list[int]) -> None:
    """In virtual time: ``sim/failover/test_resilience.py``. Above, a client waits for a real
    process."""
    gone, back = (lab.nodes[name] for name in middle(lab))
    stop(back)  # on a busy machine a process takes longer to start than the command waits
    try:
        with RunProcess(lab, PROMPT, STORY_TOKENS) as run:
            run.wait("token")
            kill(gone)
            resume(back)
            code, answer = run.finish()
    finally:
        resume(back)
    assert code == 0, answer
    assert answer["token_ids"] == story
    assert answer["failovers"] >= 1


# ---- real links --------------------------------------------------------------------------------


@pytest.mark.net
@pytest.mark.thorough
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_a_host_whose_link_is_cut_is_replaced(tmp_path: Path, cache_dir: Path, story: list[int]) -> None:
    """A cut is silent: no connection ends, packets do not arrive. In virtual time: the isolated
    hosts of ``sim/failover/test_failover.py``."""
    with (
        wan_swarm(tmp_path / "lab", cache_dir, Uplink(delay_s=0.005), *SPANS) as lab,
        RunProcess(lab.swarm, PROMPT, STORY_TOKENS, lab.client) as run,
    ):
        run.wait("token")
        used = next(name for name in middle(lab.swarm) if lab.swarm.nodes[name].status.host.record.sessions)
        lab.hosts[used].cut()
        code, answer = run.finish()
    assert code == 0, answer
    assert answer["token_ids"] == story
    assert answer["failovers"] >= 1
    print(f"cut: longest_stall_s={answer['longest_stall_s']:.2f} goal={HANG_GOAL_S} s and the replay")
