"""Which announced model is the newest revision of a training job."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmnet_protocols.directory import revisions
from swarmnet_protocols.directory.catalog import CatalogModel
from swarmnet_protocols.directory.revisions import (
    CHANGE_S,
    LOOK_S,
    announced_revision,
    newer_revision,
    revision_name,
    rounds_of,
)
from swarmnet_protocols.directory.revisions import (
    revisions as of_job,
)
from swarmnet_protocols.errors import ConfigError, Unreachable
from tests.defences import defence, replacing
from tests.support.network.virtual_time import run

ONE, OTHER = "ab" * 32, "ac" * 32


def announced(*names: str) -> list[CatalogModel]:
    return [CatalogModel(bytes([number]) * 32, name, 4) for number, name in enumerate(names)]


Spans = list[tuple[int, int]]


def swarm(monkeypatch: pytest.MonkeyPatch, *looks: dict[str, Spans] | None) -> list[Any]:
    """Have the directory name revisions with the spans of their hosts: one ``looks`` after another,
    then always the last one. None: no peer answers. Returns the looks that are left."""
    left = list(looks)
    present: dict[bytes, Spans] = {}

    async def catalog(_: object) -> Any:
        look = left.pop(0) if len(left) > 1 else left[0]
        if look is None:
            raise Unreachable("no peer answers")
        models = announced(*look)
        present.update({model.manifest: look[model.name] for model in models})
        return SimpleNamespace(models=models)

    async def hosts(_: object, manifest: bytes) -> Any:
        return [SimpleNamespace(start=start, end=end) for start, end in present[manifest]]

    monkeypatch.setattr(revisions, "read_catalog", catalog)
    monkeypatch.setattr(revisions, "read_hosts", hosts)
    return left


@pytest.mark.parametrize("job", ["tiny", ONE, ONE[:4], ONE[:20]])
def test_a_job_names_its_newest_revision(job: str) -> None:
    names = [revision_name("tiny", ONE, rounds) for rounds in (9, 10, 8)]
    found = of_job(announced("tiny", *names, revision_name("tiny-2", OTHER, 99)), job)
    assert [rounds_of(each.name) for each in found] == [10, 9, 8]


def test_other_models_are_no_revisions() -> None:
    assert not of_job(announced("tiny", "tiny-r7", revision_name("tall", OTHER, 7)), "tiny")
    assert rounds_of("tiny-r7") == -1


def test_a_name_of_two_jobs_asks_for_an_id() -> None:
    models = announced(revision_name("tiny", ONE, 7), revision_name("tiny", OTHER, 8))
    with pytest.raises(ConfigError, match=f"{ONE[:12]}, {OTHER[:12]}"):
        of_job(models, "tiny")
    assert of_job(models, OTHER[:4]) == [models[1]]


R7, R8, R9 = (revision_name("tiny", ONE, rounds) for rounds in (7, 8, 9))
WHOLE: Spans = [(2, 4), (0, 2)]


@defence(
    "clients take no revision whose hosts have gone",
    off=replacing(revisions, "uncovered", lambda *_: []),
)
def test_a_client_takes_the_newest_revision_with_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm(monkeypatch, {R7: WHOLE, R8: WHOLE, R9: [(0, 2)]})
    found = run(announced_revision(cast(Any, None), "tiny"))
    assert found is not None
    assert found.name == R8


def test_a_client_waits_while_hosts_change_their_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    left = swarm(monkeypatch, *[{R7: Spans()}] * 20, {R7: Spans(), R8: WHOLE})
    found = run(announced_revision(cast(Any, None), "tiny"))
    assert (found and found.name, len(left)) == (R8, 1)


def test_a_client_waits_in_vain_for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> float:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(Unreachable, match="no machine serves all blocks"):
            await announced_revision(cast(Any, None), "tiny")
        return asyncio.get_running_loop().time() - began_s

    swarm(monkeypatch, {R7: [(0, 2)]})
    assert run(fail()) == CHANGE_S
    swarm(monkeypatch, {"tiny": WHOLE})
    assert run(announced_revision(cast(Any, None), "tiny")) is None


def test_a_newer_revision_ends_the_wait_and_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(name: str) -> str:
        async with asyncio.timeout(10 * LOOK_S):
            return (await newer_revision(cast(Any, None), name)).name

    other = revision_name("tiny", OTHER, 9)
    left = swarm(monkeypatch, {R7: WHOLE}, {other: WHOLE}, None, {R7: WHOLE, R8: [(0, 2)]}, {R8: WHOLE})
    assert run(wait(R7)) == R8
    assert len(left) == 1
    with pytest.raises(TimeoutError):
        run(wait("smollm2-135m-instruct"))
