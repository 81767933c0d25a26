"""Fixtures of the tests with real processes, and of training through a swarm."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from swarmnet.paths import default_cache_dir
from tests.support.models.tiny import CALM
from tests.support.swarm.swarm_lab import Reference
from tests.support.swarm.tiny_swarm import TinySwarm, load_tiny, tiny_swarm

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """The user's cache directory, as for every command: files derived from the real model are made
    once for all tests."""
    return default_cache_dir()


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    from tests.support.dashboard.site import chromium

    with chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def pictures(request: pytest.FixtureRequest) -> Path:
    """The folder for pictures of pages, which reviewers look at: ``.pytest_cache/d/pictures``."""
    return request.config.cache.mkdir("pictures")


@pytest.fixture(scope="module")
def calm_reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The model for tests of gradients. With the lively model, even transformers' gradients in
    float32 are more than 1e-5 away from those in float64."""
    return load_tiny(tmp_path_factory.mktemp("calm"), spread=CALM)


@pytest.fixture(scope="module")
def calm(calm_reference: Reference) -> Iterator[TinySwarm]:
    with tiny_swarm(calm_reference) as running:
        yield running
