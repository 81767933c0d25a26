"""A test of a defence runs a second time with the defence off, and must fail then.

``@defence("promise", off=...)`` at a test says what the defence promises and how to switch it off.
A test may have several. ``make defences`` runs the second runs alone; ``-k`` chooses them by their
promises.
"""

from collections.abc import Callable, Iterator
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


class Defence(NamedTuple):
    promise: str
    off: SwitchOff
    arguments: dict[str, Any]


def defence(promise: str, *, off: SwitchOff, **arguments: Any) -> Callable[[Test], Test]:
    """Run the test again with a defence off.

    ``arguments`` choose parameters of the test: the first that match. A hypothesis test that gets
    all of its arguments runs on this one example, because shrinking takes seconds.
    """

    def decorate(test: Test) -> Test:
        test.defences = [Defence(promise, off, arguments), *getattr(test, "defences", [])]  # type: ignore[attr-defined]
        return test

    return decorate


class WithoutDefence(pytest.Function):
    """The second run of a test: an item with fixtures of its own."""

    defence: Defence

    def runtest(self) -> None:
        self._take_arguments()
        with Patch.context() as patch:
            self.defence.off(patch)
            try:
                super().runtest()
            except pytest.skip.Exception:
                raise
            except BaseException as error:
                errors = list(_leaves(error))
                if all(isinstance(each, FAILURES) for each in errors):
                    return
                raise
        pytest.fail(f"passes without its defence: {self.defence.promise}")

    def _take_arguments(self) -> None:
        arguments = self.defence.arguments
        known = {name: value for name, value in arguments.items() if name in self.funcargs}
        self.funcargs.update(known)
        if example := arguments.keys() - known.keys():
            inner = self.obj.hypothesis.inner_test
            self.obj = partial(inner, **{name: arguments[name] for name in example})


class Defences:
    """The pytest plugin."""

    @pytest.hookimpl(wrapper=True)
    def pytest_pycollect_makeitem(self, obj: object) -> Iterator[None]:
        found = yield
        if not isinstance(found, list):
            return found
        return [*found, *(_without(each, found) for each in getattr(obj, "defences", ()))]

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Run second runs after all first runs of their module: without a defence, a test may leave
        fixtures that others share in any state."""
        files = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
        items.sort(key=lambda item: (files[item.path], isinstance(item, WithoutDefence)))


def _without(defence: Defence, items: list[pytest.Function]) -> pytest.Function:
    item = next((each for each in items if _is_chosen(each, defence.arguments)), items[0])
    name = f"{item.originalname}[without: {defence.promise}]"
    callspec = getattr(item, "callspec", None)
    again = WithoutDefence.from_parent(
        item.parent,
        name=f"{name}[{callspec.id}]" if callspec else name,
        originalname=name,
        callobj=item.obj,
        callspec=callspec,
        fixtureinfo=item._fixtureinfo,
    )
    again.defence = defence
    again.add_marker("defence")
    return again


def _is_chosen(item: pytest.Function, arguments: dict[str, Any]) -> bool:
    """Whether the item has these parameters. Values count as equal when they look the same: NaN
    does."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return all(repr(parameters.get(name, value)) == repr(value) for name, value in arguments.items())


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
