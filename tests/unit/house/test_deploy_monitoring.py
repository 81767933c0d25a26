"""Every metric in the Grafana dashboard and the alert rules is exported by nodes or by the
gateway."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from swarmnet.dashboard.metrics import SwarmCollector
from swarmnet.dashboard.state import derive
from swarmnet.gateway.metrics import GatewayMetrics
from swarmnet_client.batching.continuous_batching import Batcher
from swarmnet_protocols.wire.control_pb2 import NodeStatus
from swarmnet_protocols.wire.report_pb2 import WorkerReport
from tests.support.dashboard.recorded_swarm import RecordedSwarm
from tests.support.house.deployment import DEPLOY, compose
from tests.support.swarm.fake_node import FakeNode
from tests.support.swarm.swarm_lab import Lab, load_reference, simulate

RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
PANELS = json.loads((DEPLOY / "grafana" / "dashboards" / "swarmnet.json").read_text())["panels"]
FROM_PROMETHEUS = {"up"}
WORDS = frozenset(
    [
        "and",
        "avg",
        "by",
        "clamp_min",
        "count",
        "ignoring",
        "group_left",
        "histogram_quantile",
        "increase",
        "label_values",
        "max",
        "min",
        "on",
        "or",
        "predict_linear",
        "rate",
        "sum",
        "unless",
        "without",
        "le",
        "instance",
        "resource",
        "finished_reason",
        "code",
    ]
)


def queries() -> Iterator[tuple[str, str]]:
    for panel in PANELS:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for group in RULES:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


def metrics_in(query: str) -> set[str]:
    """The names of metrics in a query: words that are neither labels, functions, strings nor
    durations."""
    bare = re.sub(r"\{[^}]*\}|\"[^\"]*\"|\[[^\]]*\]|\$\w+|\bby \([^)]*\)", " ", query)
    return set(re.findall(r"(?<![\w.])[a-z_][a-z0-9_:]*", bare)) - WORDS


def labels_in(query: str) -> set[tuple[str, str]]:
    """(metric, label) for every label that a query selects by, besides those that Prometheus
    adds."""
    selectors = re.findall(r"([a-z_][a-z0-9_:]*)\{([^}]*)\}", query)
    found = {(metric, label) for metric, inner in selectors for label in re.findall(r"(\w+)\s*[=!]~?", inner)}
    return {(metric, label) for metric, label in found if label not in {"job", "instance"}}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The samples that a whole node and the gateway give, and the labels of each."""
    from prometheus_client import generate_latest

    from swarmnet_node.metrics import registry_of

    directory: Path = tmp_path_factory.mktemp("tiny")
    reference = load_reference(directory / "model", directory / "cache")

    async def scenario(lab: Lab) -> str:
        node = await lab.start("a", lab.hosting((0, reference.local.manifest.blocks)))
        return generate_latest(registry_of(node)).decode()

    worker = NodeStatus(worker=WorkerReport(loss=2.5, val_loss=2.5))
    metrics = GatewayMetrics()
    metrics.opened("tiny", cast(Batcher, _NoAnswers())).count_success("stop")
    metrics.count_error("tiny", "wrong_host")
    samples: dict[str, set[str]] = {}
    with_swarm = registry_of(_Running(worker))
    with_swarm.register(SwarmCollector(lambda: derive(RecordedSwarm("full", lambda: 1.8e9).snapshot()).body))
    running = generate_latest(with_swarm).decode()
    for text in (simulate(reference, scenario), running, metrics.render().decode()):
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


class _Running(FakeNode):
    """A command that runs for long."""

    def __init__(self, status: NodeStatus) -> None:
        super().__init__()
        self.shown = status


class _NoAnswers:
    failovers = 0
    wrong_hosts = 0

    class load:  # noqa: N801 - stands in for an attribute
        active = 0
        waiting = 0


@pytest.mark.parametrize(("title", "query"), list(queries()))
def test_every_metric_and_label_exists(title: str, query: str, given: dict[str, set[str]]) -> None:
    wanted = metrics_in(query)
    assert wanted, "a query that asks for nothing"
    assert wanted <= {*given, *FROM_PROMETHEUS}
    for metric, label in labels_in(query):
        assert label in given[metric]


def test_names_are_found_in_queries() -> None:
    query = (
        'histogram_quantile(0.95, sum by (le, a) (rate(x_bucket{job="n",s=~"a|b"}[5m]))) > 2 * y:z or up == 0'
    )
    assert metrics_in(query) == {"x_bucket", "y:z", "up"}
    assert labels_in(query) == {("x_bucket", "s")}


def test_names_follow_prometheus_conventions(given: dict[str, set[str]]) -> None:
    """Base units at the end of names, and labels with few values: no peer, no session, no
    address."""
    ours = {name: labels for name, labels in given.items() if name.startswith("swarmnet_")}
    ours = {name: labels for name, labels in ours.items() if not name.startswith("swarmnet_gateway_")}
    assert ours
    for name, labels in ours.items():
        assert not re.search(r"_(ms|millis|kb|mb|mib|percent|minutes)(_|$)", name)
        assert labels <= {
            "le",
            "state",
            "resource",
            "reason",
            "version",
            "swarm",
            "model",
            "manifest",
            "blocks",
            "kind",
            "command",
            "name",
            "method",
        }


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    for group in RULES:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert rule["annotations"]["summary"]
            assert rule["annotations"]["action"]
            assert re.fullmatch(r"[0-9]+[mh]", rule["for"])


def test_panels_do_not_overlap_and_say_their_unit() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


def test_prometheus_and_grafana_find_each_other_and_the_swarm() -> None:
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    services = compose()["services"]
    for job in config["scrape_configs"]:
        for target in job["static_configs"][0]["targets"]:
            host, port = target.split(":")
            command = " ".join(services[host]["command"])
            assert f"--metrics=0.0.0.0:{port}" in command or (
                f"--port={port}" in command and f"--allow-host={host}" in command
            )
    assert config["rule_files"] == ["rules.yml"]
    provisioning = DEPLOY / "grafana" / "provisioning"
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"][0]
    used = {panel["datasource"]["uid"] for panel in PANELS if "datasource" in panel}
    assert used == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    path = yaml.safe_load((provisioning / "dashboards" / "swarmnet.yml").read_text())["providers"][0][
        "options"
    ]["path"]
    assert f"./grafana/dashboards:{path}:ro" in services["grafana"]["volumes"]
