"""The memory of a round, for a model of hundreds of millions of parameters."""

import json
import subprocess
import sys

import pytest

MAX_VECTORS = 9.0
"""Limit on a worker's memory, in vectors of the parameters' size; 8.2 were measured. 5 are held at
all times: parameters, AdamW's two moments, agreed weights, momentum."""


@pytest.mark.slow
def test_rounds_take_nine_vectors_at_most() -> None:
    # A process of its own: the peak of a process is that of all it has ever done.
    command = [sys.executable, "-m", "tests.support.training.round_memory"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["vectors"] <= MAX_VECTORS
