"""Metrics of the whole swarm, as a dashboard exports them."""

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from swarmnet.dashboard import metrics
from swarmnet.dashboard.metrics import SwarmCollector
from swarmnet.dashboard.state import derive
from swarmnet_protocols.directory.catalog import MAX_MODELS
from tests.defences import defence, replacing
from tests.support.dashboard.recorded_swarm import RecordedSwarm


def scraped(state: Any) -> list[str]:
    registry = CollectorRegistry()
    registry.register(SwarmCollector(lambda: state))
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def state(kind: str) -> Any:
    return derive(RecordedSwarm(kind, lambda: 1.8e9).snapshot()).body


def test_missing_blocks_and_peers_are_metrics_of_the_swarm() -> None:
    broken = state("broken")
    lines = scraped(broken)
    online = sum(peer["state"] == "online" for peer in broken["peers"].values())
    assert f'swarmnet_swarm_peers{{state="online"}} {float(online)}' in lines
    for key, model in broken["models"].items():
        label = f'{{manifest="{key[:16]}",model="{model["name"]}"}}'
        assert f"swarmnet_swarm_missing_blocks{label} {float(model['replicas'].count(0))}" in lines
    assert any("missing_blocks" in line and not line.endswith(" 0.0") for line in lines)


@defence(
    "a peer that hosts many models makes few time series",
    off=replacing(metrics, "MAX_MODELS", 10_000),
)
def test_few_models_have_metrics() -> None:
    seen = dict(state("full"))
    model = next(iter(seen["models"].values()))
    seen["models"] = {f"{number:064x}": model for number in range(2 * MAX_MODELS)}
    assert sum("missing_blocks" in line for line in scraped(seen)) == MAX_MODELS
