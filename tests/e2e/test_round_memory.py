"""The memory of a round, for a model of hundreds of millions of parameters."""

import json
import subprocess
import sys

import pytest

MAX_VECTORS = 6.7
"""Limit on a worker's memory, in vectors of the parameters' size. 6 are needed: parameters, AdamW's
two moments, agreed weights, momentum, and the average. 6.5 were measured; malloc keeps the rest,
which does not grow with the model."""


@pytest.mark.slow
def test_a_round_takes_six_vectors() -> None:
    # A process of its own: the peak of a process is that of all it has ever done.
    command = [sys.executable, "-m", "tests.support.training.round_memory"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["vectors"] <= MAX_VECTORS
