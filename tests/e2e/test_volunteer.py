"""A real volunteer hosts what the swarm lacks, then trains its job, and pauses for its owner."""

from pathlib import Path

import psutil
import pytest

from tests.support.processes.commands import call
from tests.support.processes.nodes import NodeProcess, Swarm
from tests.support.swarm.tiny_swarm import load_tiny
from tests.support.training.workers import write_job

RESTING_BYTES = 160 << 20
"""More than a process without torch takes, and less than one with torch."""


@pytest.mark.slow
def test_a_volunteer_hosts_until_a_job_needs_it_more(tmp_path: Path, cache_dir: Path) -> None:
    load_tiny(tmp_path)
    lab = Swarm(tmp_path / "lab", cache_dir, model=str(tmp_path / "model"))
    toml = write_job(tmp_path, "diloco", "sync_every = 20", rounds=100_000)
    toml = toml.replace(f'"{tmp_path}/data"', '"python-stdlib"\nmax_documents = 40')
    (tmp_path / "job.toml").write_text(toml)
    own = ("--data-dir", str(lab.directory / "anna"))
    try:
        anna = lab.launch("anna", "--yes", "--look-every", "0.5", command="volunteer")
        assert anna.wait("volunteer")["reason"] == "the swarm asks for nothing else"
        assert anna.ready["blocks"] == [0, 6]
        assert "the swarm asks for nothing else" in call("status", *own)["volunteers"]
        _ = lab.launch("boris").ready
        made = ("--swarm", str(lab.file), *lab.bootstrap_options, "--data-dir", str(tmp_path / "owner"))
        job = call("train", "create", str(tmp_path / "job.toml"), *made)["job"]

        assert anna.wait("switching")["reason"] == "tiny: nobody trains it"
        assert anna.wait("volunteer", role="train")["name"] == job
        anna.wait("round", round=0)
        status = call("status", *own)
        assert (status["command"], status["volunteers"]) == ("train join", "tiny: nobody trains it")

        call("pause", *own)
        assert anna.wait("paused")["reason"] == "its owner paused it"
        assert psutil.Process(anna.pid).memory_info().rss < RESTING_BYTES
        done = max(event["round"] for event in list(anna.events) if event["event"] == "round")
        assert call("status", *own)["state"] == "paused"
        call("resume", *own)
        anna.wait("round", round=done + 1)
        assert call("stats", *own)["samples"] > 0
        call("finish", *own)
        assert anna.process.wait(60) == 0
    finally:
        lab.close()
    assert "Traceback" not in anna.log.read_text()


@pytest.mark.slow
def test_an_invited_volunteer_trains_the_job_of_a_private_swarm(tmp_path: Path, cache_dir: Path) -> None:
    load_tiny(tmp_path)
    swarm, model = str(tmp_path / "lab"), ("--model", str(tmp_path / "model"), "--cache-dir", str(cache_dir))
    call("swarm", "create", "lab", "--out", swarm)
    issuer = NodeProcess((swarm, "--issuer", f"{swarm}/authority.key", *model), tmp_path / "issuer")
    with issuer:
        where = ("--bootstrap", issuer.ready["addresses"][0])
        toml = write_job(tmp_path, "diloco", "sync_every = 20", rounds=100_000)
        toml = toml.replace(f'"{tmp_path}/data"', '"python-stdlib"\nmax_documents = 40')
        (tmp_path / "job.toml").write_text(toml)
        job = call("train", "create", str(tmp_path / "job.toml"), "--swarm", swarm, *where)["job"]
        invite = call("swarm", "invite", swarm, "--role", "host", "--role", "trainer", *where)["invite"]
        options = (invite, *model, "--yes", "--look-every", "0.5")
        with NodeProcess(options, tmp_path / "anna", command="volunteer") as anna:
            assert anna.wait("volunteer", role="train")["name"] == job
            anna.wait("round", round=0)
            call("finish", "--data-dir", str(anna.data_dir))
            assert anna.process.wait(60) == 0
    assert "Traceback" not in anna.log.read_text()
