"""A test of a defence runs a second time with the defence off, and must fail then.

``@defence("promise", off=...)`` at a test says what the defence promises and how to switch it off.
A test may have several. ``make defences`` runs the second runs alone; ``-k`` chooses them by their
promises.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import pytest

from swarmnet_protocols.errors import SwarmnetError
from tests.support.network.virtual_time import DeadlockError

Patch = pytest.MonkeyPatch
SwitchOff = Callable[[Patch], object]
Test = TypeVar("Test", bound=Callable[..., object])

FAILURES = (AssertionError, pytest.fail.Exception, SwarmnetError, TimeoutError, DeadlockError)
"""Errors of a test that fails for want of its defence. Any other error is a mistake in ``off``."""
WITHOUT = "without"
"""The parameter that says which defence is off."""
LEAST_PATIENCE_S = 2.0
"""A second run waits at least this long in real time for what its defence would do. Shorter, and a
busy machine passes for a missing defence; longer, and every second run takes longer."""

_patience_s = math.inf


class Defence(NamedTuple):
    promise: str
    off: SwitchOff
    arguments: dict[str, Any]


def defence(
    promise: str, *, off: SwitchOff, cases: Sequence[dict[str, Any]] = ({},), **arguments: Any
) -> Callable[[Test], Test]:
    """Run the test again with a defence off.

    ``arguments`` choose parameters of the test: the first that match. A hypothesis test that gets
    all of its arguments runs on this one example, because shrinking takes seconds. With ``cases``,
    which are further arguments, it runs again for each. The promise names a case with ``{name}``.
    """
    found = [Defence(promise.format(**case), off, arguments | case) for case in cases]

    def decorate(test: Test) -> Test:
        test.defences = [*found, *getattr(test, "defences", [])]  # type: ignore[attr-defined]
        return test

    return decorate


def patience_s(most_s: float) -> float:
    """Return how many real seconds a test waits for an event.

    That is ``most_s`` in a first run. A second run, whose event should never come, waits twice
    as long as the first run took in this process, but at least ``LEAST_PATIENCE_S``.
    """
    return min(most_s, _patience_s)


class Defences:
    """The pytest plugin.

    1. **Collected.** A test gets the parameter ``WITHOUT``: no defence for first runs, each defence
       for a second run, on the first cell of its other parameters that matches.
    2. **Last.** Second runs come after all first runs of their module: without a defence, a test
       may leave fixtures that others share in any state.
    3. **Run.** The defence is switched off when all fixtures are there, and the test must fail.
    """

    def __init__(self) -> None:
        self._took_s: dict[object, float] = {}
        """The longest first run of each test in this process."""

    @pytest.hookimpl(trylast=True)
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if defences := getattr(metafunc.function, "defences", ()):
            metafunc.fixturenames.append(WITHOUT)
            first = pytest.param(None, id=pytest.HIDDEN_PARAM)
            second = [
                pytest.param(each, id=f"without: {each.promise}", marks=pytest.mark.defence)
                for each in defences
            ]
            metafunc.parametrize(WITHOUT, [first, *second])

    @pytest.hookimpl(wrapper=True)
    def pytest_pycollect_makeitem(self, obj: object) -> Iterator[None]:
        found = yield
        if not getattr(obj, "defences", ()) or not isinstance(found, list):
            return found
        seen: set[str] = set()
        return [item for item in found if _is_run(item.callspec.params, seen)]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        files = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
        items.sort(key=lambda item: (files[item.path], item.get_closest_marker("defence") is not None))

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Iterator[None]:
        parameters = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
        defence: Defence | None = parameters.get(WITHOUT)
        test = pyfuncitem.function
        if defence is None:
            began = time.monotonic()
            outcome = yield
            self._took_s[test] = max(self._took_s.get(test, 0.0), time.monotonic() - began)
            return outcome
        _take_arguments(pyfuncitem, defence.arguments)
        with Patch.context() as patch:
            patience_s = max(LEAST_PATIENCE_S, 2 * self._took_s.get(test, math.inf))
            patch.setattr(f"{__name__}._patience_s", patience_s)
            defence.off(patch)
            try:
                yield
            except BaseException as error:
                if all(isinstance(each, FAILURES) for each in _leaves(error)):
                    return True
                raise
        pytest.fail(f"passes without its defence: {defence.promise}")


def _is_run(parameters: dict[str, Any], seen: set[str]) -> bool:
    """Return whether a cell is the first one that matches its defence; every first run is. Values
    match when they look the same, so that NaN does."""
    defence: Defence | None = parameters[WITHOUT]
    if defence is None:
        return True
    wanted = defence.arguments.items()
    is_first = defence.promise not in seen and all(
        repr(parameters.get(name, value)) == repr(value) for name, value in wanted
    )
    seen |= {defence.promise} if is_first else set()
    return is_first


def _take_arguments(item: pytest.Function, arguments: dict[str, Any]) -> None:
    known = {name: value for name, value in arguments.items() if name in item.funcargs}
    item.funcargs.update(known)
    if example := {name: value for name, value in arguments.items() if name not in known}:
        item.obj = partial(item.obj.hypothesis.inner_test, **example)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from _leaves(each)
    else:
        yield error


def nothing(*_: Any, **__: Any) -> None:
    pass


def yes(*_: Any, **__: Any) -> bool:
    return True


def no(*_: Any, **__: Any) -> bool:
    return False


def replacing(where: object, name: str, value: object) -> SwitchOff:
    """Replace an attribute of an object, or of the module that has a name."""
    if isinstance(where, str):
        return lambda patch: patch.setattr(f"{where}.{name}", value)
    return lambda patch: patch.setattr(where, name, value)
