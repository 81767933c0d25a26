"""Real processes behind real Linux routers. ``tests/bench/nat.py`` measures all pairs of routers;
these are the cases that must never break."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from swarmnet.paths import default_cache_dir
from swarmnet_protocols.net import ReachKind
from swarmnet_protocols.net.protocol_ids import LINK, SESSION
from tests.bench.nat import kill_relay
from tests.support.processes.commands import Place, RunningCommand
from tests.support.processes.nat_lab import forget_mappings, nat_lab, why_not
from tests.support.processes.nat_swarm import NatSwarm, nat_swarm
from tests.support.processes.worker_processes import WorkerProcess, create_job
from tests.support.training.stages import staged_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.net,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
TOKENS = 60
JOB_ROUNDS = 8
LISTED_S = 3.0
"""Seconds until the directory has the job of its first worker."""
FORWARDED_S = 60.0
"""Time in which a forwarded port must be found. p2pd looks for the router for about 10 s."""
SEEN_S = 6.0
"""Time within which the directory has the new addresses of a host; the host announces them within a
second."""


def start_hosts(swarm: NatSwarm, places: Sequence[Place]) -> None:
    for number, (place, blocks) in enumerate(zip(places, ("0:15", "15:30"), strict=True)):
        swarm.start_host(f"host{number}", place, blocks)
    for number in range(len(places)):
        swarm.processes[f"host{number}"].wait("ready")


def test_peers_behind_cone_and_tcp_only_routers_connect_directly(tmp_path: Path) -> None:
    with nat_swarm(tmp_path / "lab", default_cache_dir(), ["cone", "tcponly", "cone"]) as swarm:
        *hosts, client = swarm.places[1:]
        start_hosts(swarm, hosts)
        answer, _ = swarm.answer("run", client, TOKENS)
        assert len(answer["token_ids"]) == TOKENS
        assert answer["failovers"] == 0
        assert not swarm.relayed("host0", LINK.id)
        assert not swarm.relayed("run", SESSION.id)
        assert swarm.status("host0").reach.kind == "relayed"


@pytest.mark.skipif(shutil.which("miniupnpd") is None, reason="not installed: miniupnpd")
def test_ports_that_a_router_forwards_are_found_and_used(tmp_path: Path) -> None:
    """By UPnP and by NAT-PMP. Behind a symmetric router, a client could not punch a hole to these
    hosts."""
    with nat_swarm(tmp_path / "lab", default_cache_dir(), ["upnp", "natpmp", "symmetric"]) as swarm:
        *hosts, client = swarm.places[1:]
        start_hosts(swarm, hosts)
        deadline = time.monotonic() + FORWARDED_S
        while {swarm.status(f"host{number}").reach.kind for number in range(2)} != {ReachKind.FORWARDED}:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        time.sleep(SEEN_S)
        answer, _ = swarm.answer("run", client, TOKENS)
        assert len(answer["token_ids"]) == TOKENS
        assert not swarm.relayed("run", SESSION.id)
        assert not swarm.relayed("host0", LINK.id)


def test_an_answer_survives_a_killed_relay_and_restarted_routers(
    tmp_path: Path,
) -> None:
    with nat_swarm(tmp_path / "lab", default_cache_dir(), ["symmetric"] * 3, public=3) as swarm:
        *hosts, client = swarm.places[3:]
        start_hosts(swarm, hosts)
        expected, _ = swarm.answer("before", client, TOKENS)
        assert swarm.relayed("before", SESSION.id)
        during = kill_relay(swarm, client)
        assert during["token_ids"] == expected["token_ids"]
        assert during["failovers"] >= 1
        for number in 4, 5:
            forget_mappings(number)
        after, _ = swarm.answer("after", client, TOKENS)
        assert after["token_ids"] == expected["token_ids"]


@pytest.mark.timeout(400)
def test_stages_behind_routers_train_through_relays(tmp_path: Path) -> None:
    """A cone and a symmetric router cannot punch a hole to each other, so a relay carries the
    microbatches between stages 1 and 2."""
    job = create_job(tmp_path, staged_job(tmp_path, rounds=JOB_ROUNDS, stages=3))
    running: list[RunningCommand] = []
    with nat_lab(["open", "open", "cone", "symmetric"]) as (public, *places):
        try:
            address = f"/ip4/{public.ip}/tcp/4001"
            data = ("--data-dir", str(tmp_path / "public"), "--listen", address)
            arguments = ("bootstrap", str(tmp_path / "swarm.toml"), *data)
            running.append(RunningCommand(arguments, tmp_path / "public.log", public))
            bootstrap = running[0].wait("ready")["addresses"][:1]
            for stage, (name, place) in enumerate(zip(("anna", "boris", "clara"), places, strict=True)):
                options = ("--stage", str(stage), "--listen", f"/ip4/{place.ip}/udp/0/quic-v1")
                running.append(WorkerProcess(tmp_path, name, job, bootstrap, place, options))
                if not stage:
                    running[-1].wait("ready")
                    time.sleep(LISTED_S)
            for worker in running[1:]:
                last = worker.wait("round", round=JOB_ROUNDS - 1, timeout_s=180.0)
                assert last["committed"]
                assert last["tokens"] > 0
        finally:
            for each in running:
                each.kill()
