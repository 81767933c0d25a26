"""A node's monitoring endpoints: probes while it starts, serves and stops, and the values of its
metrics."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from swarmnet.addresses import parse_endpoint
from swarmnet.web.monitoring import Monitor
from swarmnet_node.engine.counters import cumulative_counts, node_histogram, total
from swarmnet_node.metrics import registry_of
from swarmnet_protocols.errors import ConfigError, Unreachable
from swarmnet_protocols.wire.control_pb2 import NodeStatus
from tests.support.swarm.fake_node import STATUS, TRUNK_STATUS, FakeNode
from tests.support.swarm.swarm_lab import Lab, load_reference, simulate

PROMPT = [3, 1, 4, 1, 5]
TOKENS = 6


class _Node(FakeNode):
    def __init__(self, state: str) -> None:
        super().__init__()
        self.state = state

    def status(self) -> NodeStatus:
        status = NodeStatus.FromString(STATUS.SerializeToString())
        status.state = self.state
        return status


def monitored(use: Callable[[Monitor, httpx.AsyncClient], Any], host: str = "127.0.0.1") -> Any:
    async def main() -> Any:
        monitor = Monitor()
        async with monitor.serve(host, 0) as url, httpx.AsyncClient(base_url=url) as client:
            return await use(monitor, client)

    return asyncio.run(main())


def values(node: FakeNode) -> dict[str, float]:
    """All samples of a scrape by name and labels."""
    families = text_string_to_metric_families(generate_latest(registry_of(node)).decode())
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sample.labels.items()): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_node_is_alive_before_it_is_ready_and_ready_while_online() -> None:
    async def ask(monitor: Monitor, client: httpx.AsyncClient) -> list[tuple[int, int]]:
        answers = []
        for state in (None, "joining", "online", "paused", "leaving"):
            if state is not None:
                monitor.watch(_Node(state))
            alive, ready = await client.get("/livez"), await client.get("/readyz")
            assert ready.json() == {"ready": state == "online", "state": state or "starting"}
            answers.append((alive.status_code, ready.status_code))
        return answers

    assert monitored(ask) == [(200, 503), (200, 503), (200, 200), (200, 503), (200, 503)]


def test_metrics_are_text_for_prometheus() -> None:
    async def ask(monitor: Monitor, client: httpx.AsyncClient) -> httpx.Response:
        monitor.watch(_Node("online"))
        return await client.get("/metrics")

    answer = monitored(ask)
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'swarmnet_node_state{state="online"} 1.0' in answer.text
    assert "process_resident_memory_bytes" in answer.text


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 421), ("0.0.0.0", 200)])
def test_host_names_are_checked_on_loopback_only(host: str, status: int) -> None:
    """DNS rebinding reaches loopback addresses; on others Prometheus uses names such as that of a
    container."""

    async def ask(_monitor: Monitor, client: httpx.AsyncClient) -> int:
        return (await client.get("/livez", headers={"host": "node-1:9400"})).status_code

    assert monitored(ask, host) == status


def test_metrics_count_the_work_of_a_node(tmp_path: Path) -> None:
    """Two nodes in virtual time: the first hop computes the prompt, then each token except the
    last."""
    reference = load_reference(tmp_path / "model", tmp_path / "cache")

    async def scenario(lab: Lab) -> tuple[dict[str, float], dict[str, float]]:
        for name, blocks in (("a", (0, 2)), ("b", (2, 6))):
            await lab.start(name, lab.hosting(blocks))
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            await lab.generate(chain, PROMPT, TOKENS)
            return values(lab.nodes["a"]), values(lab.nodes["b"])

    first, last = simulate(reference, scenario)
    assert (first["swarmnet_node_answered_tokens_total"], first["swarmnet_node_token_seconds_count"]) == (
        0,
        4,
    )
    assert (last["swarmnet_node_answered_tokens_total"], last["swarmnet_node_token_seconds_count"]) == (
        6,
        0,
    )
    for seen in (first, last):
        assert seen["swarmnet_node_positions_total"] == len(PROMPT) + TOKENS - 1
        assert seen["swarmnet_node_forwards_total"] == TOKENS
        assert seen["swarmnet_node_forward_seconds_count"] == TOKENS
        assert seen["swarmnet_node_forward_positions_sum"] == len(PROMPT) + TOKENS - 1
        assert seen["swarmnet_node_forward_positions_bucket le=1.0"] == TOKENS - 1
        assert seen["swarmnet_node_wait_seconds_count"] == TOKENS
        assert seen["swarmnet_node_sessions"] == seen["swarmnet_peer_resource_used resource=sessions"] == 1
        assert seen["swarmnet_peer_resource_used resource=cache_bytes"] == seen["swarmnet_node_cache_bytes"]
        assert seen["swarmnet_peer_resource_refusals_total resource=sessions"] == 0
        assert seen["swarmnet_node_refusals_total reason=leaving"] == 0
        assert seen["swarmnet_peer_frames_total"] >= TOKENS
        assert seen["swarmnet_peer_received_bytes_total"] > 0
        assert seen["swarmnet_peer_sent_bytes_total"] > 0
        assert 0 < seen["swarmnet_node_cache_bytes"] <= seen["swarmnet_node_cache_limit_bytes"]


def test_refusals_are_counted_by_reason_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A client opens a session on a host that is about to stop."""
    reference = load_reference(tmp_path / "model", tmp_path / "cache")

    async def scenario(lab: Lab) -> dict[str, float]:
        node = await lab.start("a", lab.hosting((0, 6)))
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            await lab.generate(chain, PROMPT, 1)
            assert node.host is not None
            node.host.leaving = True
            with pytest.raises(Unreachable):
                async with lab.chain(swarm) as late:
                    await lab.generate(late, PROMPT, 1)
            return values(node)

    with caplog.at_level("INFO"):
        seen = simulate(reference, scenario)
    assert seen["swarmnet_node_refusals_total reason=leaving"] >= 1
    assert [record.__dict__["blocks"] for record in caplog.records if record.msg == "online"] == ["0:6"]
    refused = [record.__dict__ for record in caplog.records if record.msg == "a request is refused"]
    assert {(each["reason"], each["levelname"]) for each in refused} == {("leaving", "INFO")}


def test_metrics_count_rows_and_missing_experts() -> None:
    node = FakeNode()
    assert "swarmnet_node_missing_experts" not in values(node), "the node has all experts of its blocks"
    node.shown = TRUNK_STATUS
    seen = values(node)
    assert {name: seen[f"swarmnet_node_{name}"] for name in EXPERT_METRICS} == EXPERT_METRICS


EXPERT_METRICS = {
    "expert_rows_total": 1 << 40,
    "expert_streams": 2,
    "missing_experts": 1,
    "expert_peers": 2,
    "expert_round_trip_seconds": 0.002,
    "asked_expert_rows_total": 1 << 40,
    "failed_expert_requests_total": 3,
    "hedged_expert_requests_total": 4,
    "loaded_experts_total": 5,
}


def test_a_histogram_counts_cumulatively() -> None:
    seen = node_histogram("tests", "For a test.", [1, 2, 4])
    for value in (0.5, 1, 3, 4, 9):
        seen.observe(value)
    assert cumulative_counts(seen) == [2, 2, 4, 5]
    assert total(seen) == 17.5


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:80", ("::1", 80)),
        ("localhost:1", ("localhost", 1)),
    ],
)
def test_endpoints_are_parsed(text: str, endpoint: tuple[str, int]) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize("text", ["", "x", "host:", "1:99999", "a b:1", "http://h:1", "-1"])
def test_other_endpoints_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST"):
        parse_endpoint(text)
