"""A defence: how it is switched off, and the test that then fails. ``test_defences.py`` checks that it does."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Defence:
    """A check against hostile input, bad peers or damage.

    ``name`` is the promise that it keeps. ``fails`` runs the test with its parameters; it gets a folder to write into.
    """

    name: str
    switch_off: Callable[[Patch], None]
    fails: Callable[[Path], object]


def unshrunk(test: Any) -> Callable[..., object]:
    """The function under a hypothesis test, for one example: finding and shrinking one takes seconds."""
    inner: Callable[..., object] = test.hypothesis.inner_test
    return inner


def nothing(*_: Any, **__: Any) -> None:
    pass


def yes(*_: Any, **__: Any) -> bool:
    return True


def no(*_: Any, **__: Any) -> bool:
    return False


def replacing(where: object, name: str, value: object) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(where, name, value)
