"""Defences of workers that train a job of another peer."""

from functools import partial
from pathlib import Path

import pytest

from swarmnet_protocols.models import partial_model
from swarmnet_protocols.models.checkpoints import safetensors_file
from swarmnet_protocols.training.jobs import Job
from tests.defences import Defence, nothing, replacing, yes
from tests.unit.training import test_training_jobs
from tests.unit.workers import test_published_models, test_training_data, test_training_start


def opens_nothing(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_training_start.test_no_file_named_by_another_peers_job_is_opened(folder, patch)


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
        "data beyond the size in the job is not read",
        replacing(test_training_data.data_module, "_with_progress", lambda source, *_: source),
        test_training_data.test_data_beyond_the_jobs_size_is_not_read,
    ),
    Defence(
        "a compressed file is not trained on",
        replacing(test_training_data.documents, "_KINDS", {}),
        partial(
            test_training_data.test_a_file_that_is_no_text_in_utf8_is_refused_with_the_place,
            content=test_training_data.NO_TEXT["UTF-32"][0],
            what=test_training_data.NO_TEXT["UTF-32"][1],
        ),
    ),
    *(
        Defence(
            f"a published tokenizer opens no file by {case}",
            replacing(safetensors_file, "_is_no_path", yes),
            partial(test_published_models.test_a_tokenizer_names_no_file_of_this_machine, case),
        )
        for case in test_published_models.NAMING
    ),
    Defence(
        "a job does not choose which code computes its model",
        replacing(partial_model, "_check_implementations", nothing),
        partial(
            test_published_models.test_neither_a_job_nor_a_checkpoint_chooses_code,
            *test_published_models.FOREIGN[0],
        ),
    ),
)
