"""The defences of those who train a job that another peer wrote."""

from pathlib import Path

import pytest

from swarmnet_protocols.training.jobs import Job
from tests.defences import Defence, nothing, replacing
from tests.unit import test_training_data, test_training_jobs, test_training_start


def opens_nothing(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_training_start.test_a_worker_opens_nothing_that_a_job_of_another_peer_names(folder, patch)


def refused(section: str, key: str, value: object) -> Defence:
    return Defence(
        f"a job of another peer has no {key} {value}",
        replacing(Job, "check_published", nothing),
        lambda _: test_training_jobs.test_a_job_of_another_peer_names_no_file_of_this_machine(
            section, key, value
        ),
    )


JOBS = (
    Defence("no path of a job is opened", replacing(Job, "check_published", nothing), opens_nothing),
    refused("data", "digest", None),
    refused("model", "checkpoint", "/models/mine"),
    refused("data", "tokenizer", "~/model"),
    Defence(
        "no more is read than the job is about",
        replacing(test_training_data.data_module, "_counted", lambda source, *_: source),
        test_training_data.test_no_more_is_read_than_the_job_is_about,
    ),
)
