"""How much memory a round takes: what a model of hundreds of millions of parameters can be trained in."""

import json
import subprocess
import sys

import pytest

MAX_VECTORS = 10.0
"""As large as the parameters, a worker: 9.1 were measured. In each lie 5 at all times: parameters, AdamW's moments, agreed weights, momentum."""


@pytest.mark.slow
def test_rounds_take_ten_vectors_at_most() -> None:
    # A process of its own: the peak of a process is that of all it has ever done.
    command = [sys.executable, "-m", "tests.support.round_memory"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout)["vectors"] <= MAX_VECTORS
