"""Bytes that a job with the template of ``zo`` sends."""

import pytest

from swarmnet_node.training.trainer import Trainer
from swarmnet_protocols.training.job_templates import template
from swarmnet_protocols.training.jobs import parse_job
from tests.support.training.round_bytes import bytes_of_a_round

GOAL_BYTES = 100
"""Upper bound for each step: all messages of all workers."""


@pytest.fixture(autouse=True)
def loss_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cheap loss. The bytes sent do not depend on it: a slope is one byte."""
    monkeypatch.setattr(Trainer, "loss", lambda self, *_: float(self.storage()[:64].sum()))


@pytest.mark.parametrize(("workers", "delay_s"), [(2, 0.02), (8, 0.1)])
def test_workers_send_less_than_a_hundred_bytes_a_step(workers: int, delay_s: float) -> None:
    steps = parse_job(template("zo").encode()).job.make_method().steps_per_round
    assert bytes_of_a_round(workers, steps, delay_s=delay_s) / steps <= GOAL_BYTES
