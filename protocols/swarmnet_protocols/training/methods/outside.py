"""Methods from outside this package: a Python file, or an installed package.

Both are a module with two names:

- ``SETTINGS``: a subclass of ``Settings``, with the settings that job files may have;
- ``METHOD``: a class that makes a ``Method`` from them, with the ``name`` of the method.

A package declares its module in the entry points of the group ``swarmnet.methods``: ``mine =
"package.module"``, where ``mine`` is the name of the method.

Code comes from this machine only. A job names its method and the SHA-256 of the module's file, so
that all workers run the same code. The user of each worker names the file, or has installed the
package.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.training.methods.base import OWN, Average, Method, Settings

GROUP = "swarmnet.methods"
MAX_FILE_BYTES = 1 << 20
"""Largest file of a method. With more, a wrong path could fill the memory. With less, a long method
would be refused."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HINT = "docs/training.md has an example; swarmnet_protocols/training/methods/base.py describes methods"
_VALUES = 64
"""Number of parameters with which a method is tried."""
_ROUNDS = 4
"""Rounds with which a method is tried: one without an average, then others that use the state of
earlier rounds."""
_PEERS = ("a", "b", "c")


@dataclass(frozen=True)
class OutsideMethod:
    """A method from outside. ``code``: the SHA-256 of its file, in hexadecimal."""

    name: str
    code: str
    make: Callable[[Any], Method]
    settings: type[Settings]


_loaded: dict[str, OutsideMethod] = {}
"""The methods that this process has loaded, by the SHA-256 of their files."""


def checked_source(path: Path, code: str | None = None) -> bytes:
    """Return the source of a method without running it.

    Raises ``ConfigError`` if it cannot be read, or if its SHA-256 is not ``code``.
    """
    try:
        with path.open("rb") as stream:
            source = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", hint="name a Python file") from error
    if len(source) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB", hint="this is not a method")
    if code not in {None, digest := hashlib.sha256(source).hexdigest()}:
        raise ConfigError(
            f"{path} is other code than the job's: its SHA-256 is {digest}, the job names {code}",
            hint="get the file that the job was created with; this one was not run",
        )
    return source


def load_file(path: Path, code: str | None = None) -> OutsideMethod:
    """Load the method in a file that the user of this machine named. Its code may do whatever the
    user may.

    Raises the errors of ``checked_source``, and ``ConfigError`` for a file without a method.
    """
    module, source = load_module(path, code)
    return _take(module, source, str(path))


def load_module(path: Path, code: str | None = None, hint: str = _HINT) -> tuple[ModuleType, bytes]:
    """Run a Python file that the user of this machine named. Returns its module and its source.

    Raises the errors of ``checked_source``, and ``ConfigError`` with ``hint`` if the file fails.
    """
    source = checked_source(path, code)
    module = ModuleType(f"swarmnet_outside_{hashlib.sha256(source).hexdigest()[:16]}")
    with blaming(str(path), hint):
        # The bytes that were hashed are run, not the file again, which may change meanwhile.
        exec(compile(source, str(path), "exec"), vars(module))  # noqa: S102 - the user named the file
    return module, source


def find_outside(name: str, code: str | None = None) -> OutsideMethod | None:
    """Return the method ``name`` that was loaded or is installed, or None. ``code``: the SHA-256
    that its file must have; None allows any.

    Raises ``ConfigError`` if the file of an installed package has no method, or another SHA-256. A
    file with another SHA-256 is not run.
    """
    loaded = [each for each in _loaded.values() if each.name == name]
    installed = (
        () if loaded else (_load_installed(each, code) for each in entry_points(group=GROUP, name=name))
    )
    return next((each for each in (*reversed(loaded), *installed) if code in {None, each.code}), None)


def is_loaded(code: str) -> bool:
    """Return whether this process has loaded the method whose file has this SHA-256."""
    return code in _loaded


def try_method(name: str, create: Callable[[], Method]) -> None:
    """Check a method that ``create`` makes: its properties, and a few rounds with 64 parameters.

    Raises ``ConfigError`` if it breaks the rules of ``Method``: shapes, finite numbers, equal bits
    in two workers, pairs on which both partners agree, and a state from which others continue.
    """
    with blaming(f"method {name}"):
        fault = _fault(create(), create(), create())
    if fault is not None:
        raise ConfigError(f"method {name}: {fault}", hint=_HINT)


def _load_installed(entry: EntryPoint, code: str | None) -> OutsideMethod:
    with blaming(f"{GROUP}: {entry.value}"):
        spec = find_spec(entry.module)
        path = Path((spec and spec.origin) or "")
        if entry.attr or not path.is_file():
            raise ConfigError(f"{GROUP}: {entry.value} is not a module in a file", hint=_HINT)
        source = checked_source(path, code)
        return _take(entry.load(), source, entry.value)


def _take(module: ModuleType, source: bytes, where: str) -> OutsideMethod:
    method, settings = (getattr(module, name, None) for name in ("METHOD", "SETTINGS"))
    if not (isinstance(settings, type) and issubclass(settings, Settings)):
        raise ConfigError(f"{where} has no SETTINGS, a subclass of Settings", hint=_HINT)
    name = getattr(method, "name", None)
    if not callable(method) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where} has no METHOD, a class with a name", hint=_HINT)
    found = OutsideMethod(name, hashlib.sha256(source).hexdigest(), method, settings)
    _loaded[found.code] = found
    return found


@contextmanager
def blaming(where: str, hint: str = _HINT) -> Iterator[None]:
    """Turn whatever code from outside raises into a ``ConfigError`` that names ``where``."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # code from outside may raise anything
        raise ConfigError(f"{where}: {type(error).__name__}: {error}", hint=hint) from error


def _fault(one: Method, two: Method, newcomer: Method) -> str | None:
    """Return the rule that a method breaks, or None.

    ``one`` and ``two`` are in two workers. ``newcomer`` continues from their state.
    """
    if one.kind not in ("parameters", "gradients"):
        return 'kind must be "parameters" or "gradients"'
    if one.steps_per_round < 1 or not 0 <= one.overlap_steps <= one.steps_per_round:
        return "steps_per_round must be 1 or more, and overlap_steps from 0 to steps_per_round"
    if not (isinstance(one.shares_weights, bool) and 0 <= one.feedback_decay <= 1):
        return "shares_weights must be a bool, and feedback_decay from 0 to 1"
    for round in range(_ROUNDS):
        if not _partners_agree(one, round):
            return "partners must be sorted members of the roster, and the same for each of them"
    first = torch.linspace(-1.0, 1.0, _VALUES)
    for method in (one, two):
        method.begin(first.clone())
    results = [_tried(method, first) for method in (one, two)]
    for result in results:
        if isinstance(result, str):
            return result
    if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
        return "two workers with equal values get other bits"
    newcomer.begin(one.agreed())
    newcomer.restore({name: value for name, value in one.state().items() if not name.startswith(OWN)})
    if not torch.equal(newcomer.agreed(), one.agreed()):
        return "restore does not keep the agreed parameters"
    return None


def _partners_agree(method: Method, round: int) -> bool:
    found = {peer: method.partners(round, _PEERS, peer) for peer in _PEERS}
    return all(
        list(with_me) == sorted(set(with_me) & set(_PEERS))
        and me in with_me
        and all(found[peer] == with_me for peer in with_me)
        for me, with_me in found.items()
    )


def _tried(method: Method, parameters: torch.Tensor) -> Sequence[torch.Tensor] | str:
    """Return the results of a few rounds, or the rule that a result breaks."""
    results = []
    for round in range(_ROUNDS):
        start, end = method.range(round)
        if not 0 <= start < end <= _VALUES:
            return f"range({round}) is ({start}, {end}) of {_VALUES} parameters"
        sent = method.contribution(round, parameters * 0.75)
        if not _is_vector(sent, end - start):
            return f"contribution({round}) is not {end - start} finite float32 values"
        average = Average(sent * 0.5, _PEERS) if round else None  # the first round is discarded
        applied = method.apply(round, parameters * 0.75, average)
        if not _is_vector(applied, _VALUES):
            return f"apply({round}) does not return {_VALUES} finite float32 values"
        if method.kind == "parameters":
            parameters = applied.clone()
        else:
            parameters = parameters - 0.01 * applied
            method.begin(parameters)
        results += [sent.clone(), parameters]
    if not _is_vector(method.agreed(), _VALUES):
        return f"agreed() does not return {_VALUES} finite float32 values"
    return results


def _is_vector(values: object, count: int) -> bool:
    return (
        isinstance(values, torch.Tensor)
        and values.shape == (count,)
        and values.dtype == torch.float32
        and bool(values.isfinite().all())
    )
