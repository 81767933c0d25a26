"""Dashboards of real nodes: one in its own process, one in the process of a node."""

import signal
from pathlib import Path

import pytest

from tests.support.dashboard.dashboards import DashboardProcess, State, states, watch
from tests.support.processes.commands import call
from tests.support.processes.nodes import RunProcess, Swarm

pytestmark = pytest.mark.slow


def test_two_dashboards_show_the_same_swarm(tmp_path: Path, cache_dir: Path) -> None:
    lab = Swarm(tmp_path / "lab", cache_dir)
    try:
        first = lab.launch("first", "--blocks", "0:15", "--dashboard", "0", "--name", "the first")
        one, within = first.ready["peer_id"], first.wait("dashboard")["url"]
        second = lab.launch("second", "--blocks", "15:30")
        with DashboardProcess(lab, tmp_path / "watcher") as outside:
            two = second.ready["peer_id"]
            for url in (outside.url, within):
                state = watch(url, lambda state: states(state) == {one: "online", two: "online"})
                (model,) = state["models"].values()
                assert model["replicas"] == [1] * 30
                assert state["peers"][one]["name"] == "the first"

            with RunProcess(lab, "Once upon a time", tokens=400):
                state = watch(outside.url, lambda state: len(state["flows"]) == 3)
                assert set(state["flows"]) == {f"client>{one}", f"{one}>{two}", f"{two}>client"}

            second.send_signal(signal.SIGKILL)
            for url in (outside.url, within):
                state = watch(url, lambda state: states(state)[two] == "gone")
                assert has_lost(state, two)
                (model,) = state["models"].values()
                assert model["advice"]["blocks"] == [15, 30]
            seen = call("swarm", "status", str(lab.file), *lab.bootstrap_options, "--data-dir", str(tmp_path))
            silent = {peer: entry["silent"] for peer, entry in seen["peers"].items()}
            assert silent == {one: False, two: True}, "its record is still in the directory"
            (model,) = seen["models"].values()
            assert model["missing_blocks"] == [[15, 30]]
            url = outside.url
            running = call("status", "--data-dir", str(tmp_path / "watcher"))
            assert (running["command"], running["url"]) == ("dashboard", url)
            call("finish", "--data-dir", str(tmp_path / "watcher"))
            assert outside.wait_for_end() == 0
            assert outside.events[-1] == {"event": "stopped"}
        with DashboardProcess(lab, tmp_path / "watcher") as again:
            assert again.url != url
            assert has_lost(watch(again.url, lambda state: states(state).get(one) == "online"), two)
        assert "Traceback" not in again.log.read_text()
    finally:
        lab.close()


def has_lost(state: State, peer: str) -> bool:
    return any((event["kind"], event["peer_id"]) == ("lost", peer) for event in state["events"])
