"""Which announced model is the newest revision of a training job."""

import pytest

from swarmnet_protocols.directory.catalog import CatalogModel
from swarmnet_protocols.directory.revisions import newest_revision, revision_name, rounds_of
from swarmnet_protocols.errors import ConfigError

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
