"""One thread for every test, and options for longer and shorter sweeps: ``pytest tests/sim --seeds
1000 --first-seed 50``."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings

from swarmnet import logs
from swarmnet_protocols.machine import lean_imports, measured_targets
from tests.defences import Defences
from tests.support.compiled import sharing_libraries
from tests.support.plugins.audit import sitecustomize
from tests.support.plugins.in_parts import Parts
from tests.support.plugins.sample import Sample

HANGS_AFTER_S = 600

# Nodes on CPUs hide these packages from transformers, which remembers that for good. Tests of other
# devices may run later in the same process.
lean_imports._DEVICE_PACKAGES = ()

settings.register_profile("any machine", deadline=None)  # a busy machine is no failure
# --hypothesis-profile thorough
settings.register_profile("thorough", deadline=None, max_examples=100_000)
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models of tests are too small for two threads, and more threads than cores wait for each
    other."""
    if torch := sys.modules.get("torch"):  # a test that has not imported torch does not compute
        torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def watched() -> Iterator[None]:
    """Let a test fail if it unpickles. A process that it starts ends if it unpickles, or makes code
    from data."""
    sitecustomize.install(_refuse, sitecustomize.UNPICKLES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(sitecustomize.__file__).parent), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> Iterator[None]:
    """Copy native code into the cache directories of tests from a folder that all tests share.

    Compiling takes some seconds of a core, and hundreds of tests have a cache directory of their
    own. For the same reason no target is measured.
    """
    with sharing_libraries(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_targets, "measure", lambda *_, **__: {})
        yield


def _refuse(wrong: str) -> NoReturn:
    raise RuntimeError(f"not allowed: {wrong}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """SIGINT interrupts the tests and their processes, even if a shell started the tests in the
    background with SIGINT ignored. Commands of earlier tests in this process log nothing here."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, logs._Stderr)]:
        root.removeHandler(handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without garbage collection.

    A million objects of imports and tests live until the end. Looking for garbage among them takes
    two fifths of the time of this phase, and every process of ``make test`` repeats the phase.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


PLACES = {"alone": {"e2e"}, "slow": {"conformance", "e2e", "net"}, "net": {"e2e", "net"}}
"""Folders where ``make test`` looks for tests with these marks."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests wait for processes as long as a busy machine needs; a test that hangs is ended
    after ``HANGS_AFTER_S``."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()} & PLACES.keys()
        for mark in marks:
            if not PLACES[mark] & set(item.path.parts):
                raise pytest.UsageError(f"{item.nodeid} is marked {mark}: `make test` looks for it elsewhere")
        if marks and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(HANGS_AFTER_S))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("simulation")
    group.addoption("--seeds", type=int, default=15, help="seeds of each randomized simulation")
    group.addoption("--first-seed", type=int, default=0, help="the first seed; a failure names its seed")
    group.addoption(
        "--sample",
        action="store_true",
        help="leave out tests marked `thorough`; of one marked `matrix`, run a few parameters, in which each value of each one occurs",
    )

    parts = parser.getgroup("parts")
    parts.addoption(
        "--in-parts",
        type=Path,
        metavar="FILE",
        help="run the tests that FILE does not name, and add those that pass",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Defences())
    file = config.getoption("in_parts")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Parts(file))
    if config.getoption("sample"):
        config.pluginmanager.register(Sample())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        first, seeds = metafunc.config.getoption("first_seed"), metafunc.config.getoption("seeds")
        metafunc.parametrize("seed", range(first, first + seeds))
