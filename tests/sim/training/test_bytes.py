"""Bytes that a job with the template of ``zo`` sends."""

import itertools

import pytest

from swarmnet_node.training.steps.trainer import Trainer
from swarmnet_protocols.training.job_templates import template
from swarmnet_protocols.training.jobs import parse_job
from tests.support.training.round_bytes import bytes_of_a_round

GOAL_BYTES = 17
"""Upper bound for each step of a worker: all its messages."""


@pytest.fixture(autouse=True)
def loss_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cheap loss. The bytes sent do not depend on it, unless a slope is zero."""
    numbers = itertools.count(1)
    monkeypatch.setattr(Trainer, "loss", lambda *_: 1 / next(numbers))


@pytest.mark.parametrize(("workers", "delay_s"), [(2, 0.02), (8, 0.1)])
def test_a_worker_sends_less_than_seventeen_bytes_a_step(workers: int, delay_s: float) -> None:
    steps = parse_job(template("zo").encode()).job.make_method().steps_per_round
    assert bytes_of_a_round(workers, steps, delay_s=delay_s) / steps / workers <= GOAL_BYTES
