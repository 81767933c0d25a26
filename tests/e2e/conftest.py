"""What the tests with real processes share."""

from pathlib import Path

import pytest

from swarmnet.paths import default_cache_dir


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """The user's own, as for every command: what is made of the real model once serves all tests, side by side or later."""
    return default_cache_dir()
