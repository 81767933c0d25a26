"""Which announced model is the newest revision of a training job."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmnet_protocols.directory import revisions
from swarmnet_protocols.directory.catalog import CatalogModel
from swarmnet_protocols.directory.revisions import (
    LOOK_S,
    newer_revision,
    newest_revision,
    revision_name,
    rounds_of,
)
from swarmnet_protocols.errors import ConfigError, Unreachable
from tests.support.network.virtual_time import run

ONE, OTHER = "ab" * 32, "ac" * 32


def announced(*names: str) -> list[CatalogModel]:
    return [CatalogModel(bytes([number]) * 32, name, 4) for number, name in enumerate(names)]


@pytest.mark.parametrize("job", ["tiny", ONE, ONE[:4], ONE[:20]])
def test_a_job_names_its_newest_revision(job: str) -> None:
    names = [revision_name("tiny", ONE, rounds) for rounds in (9, 10, 8)]
    found = newest_revision(announced("tiny", *names, revision_name("tiny-2", OTHER, 99)), job)
    assert found is not None
    assert rounds_of(found.name) == 10


def test_other_models_are_no_revisions() -> None:
    assert newest_revision(announced("tiny", "tiny-r7", revision_name("tall", OTHER, 7)), "tiny") is None
    assert rounds_of("tiny-r7") == -1


def test_a_name_of_two_jobs_asks_for_an_id() -> None:
    models = announced(revision_name("tiny", ONE, 7), revision_name("tiny", OTHER, 8))
    with pytest.raises(ConfigError, match=f"{ONE[:12]}, {OTHER[:12]}"):
        newest_revision(models, "tiny")
    assert newest_revision(models, OTHER[:4]) == models[1]


def test_a_newer_revision_ends_the_wait_and_no_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = [*(revision_name("tiny", id, rounds) for id, rounds in ((ONE, 7), (OTHER, 9))), ""]
    newer = revision_name("tiny", ONE, 8)

    async def catalog(_: object) -> Any:
        name = looks.pop(0) if looks else newer
        if not name:
            raise Unreachable("no peer answers")
        return SimpleNamespace(models=announced(name))

    async def wait(name: str) -> str:
        async with asyncio.timeout(10 * LOOK_S):
            return (await newer_revision(cast(Any, None), name)).name

    monkeypatch.setattr(revisions, "read_catalog", catalog)
    assert run(wait(revision_name("tiny", ONE, 7))) == newer
    assert not looks
    with pytest.raises(TimeoutError):
        run(wait("smollm2-135m-instruct"))
