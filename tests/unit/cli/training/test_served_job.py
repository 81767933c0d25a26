"""``swarmnet join --job``: when a host of a revision ends, with a node that does nothing."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmnet.cli.training.served_job import IDLE_WAIT_S, ServedJob
from swarmnet_protocols.directory.catalog import CatalogModel
from swarmnet_protocols.directory.revisions import revision_name
from tests.support.network.virtual_time import run

JOB = "ab" * 32
REFRESH_S, GRACE_S = 60.0, 5.0


class IdleNode:
    """A node that ends without its sessions, or ``grace_s`` after it was told to finish."""

    def __init__(self) -> None:
        self.dependencies = SimpleNamespace(directory=None)
        self.host = SimpleNamespace(sessions={1})
        self.grace_s: float | None = None

    def finish(self, grace_s: float) -> None:
        self.grace_s = grace_s

    async def finished(self) -> None:
        while self.grace_s is None or (self.host.sessions and self.grace_s == math.inf):  # noqa: ASYNC110
            await asyncio.sleep(1.0)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ServedJob:
    """A job with a newer revision at other hosts."""

    async def catalog(_: object) -> Any:
        return SimpleNamespace(models=[CatalogModel(bytes(32), revision_name("tiny", JOB, 7), 4)])

    async def hosts(*_: object) -> Any:
        return [SimpleNamespace(start=0, end=2)]

    monkeypatch.setattr("swarmnet_protocols.directory.revisions.read_catalog", catalog)
    monkeypatch.setattr("swarmnet_protocols.directory.revisions.read_hosts", hosts)
    entry = SimpleNamespace(addresses=(), network=lambda _: None)
    return ServedJob(cast(Any, entry), JOB, tmp_path, tmp_path, REFRESH_S)


@pytest.mark.parametrize("session_s", [REFRESH_S, REFRESH_S + 2 * IDLE_WAIT_S])
def test_an_outdated_host_ends_after_its_last_session(session_s: float, served: ServedJob) -> None:
    async def use() -> None:
        node = IdleNode()
        ending = asyncio.create_task(served.end_when_outdated(cast(Any, node)))
        await asyncio.sleep(session_s - 1.0)
        assert not ending.done()
        node.host.sessions.clear()
        await asyncio.wait_for(ending, 10.0)
        assert node.grace_s == math.inf

    run(use())
    assert served.is_outdated


@pytest.mark.parametrize("stopped_s", [REFRESH_S + 10.0, REFRESH_S + 2 * IDLE_WAIT_S])
def test_an_outdated_host_that_its_owner_stops_stays_away(stopped_s: float, served: ServedJob) -> None:
    async def use() -> None:
        node = IdleNode()
        ending = asyncio.create_task(served.end_when_outdated(cast(Any, node)))
        await asyncio.sleep(stopped_s)
        node.finish(GRACE_S)
        await asyncio.wait_for(ending, IDLE_WAIT_S + 10.0)

    run(use())
    assert not served.is_outdated
