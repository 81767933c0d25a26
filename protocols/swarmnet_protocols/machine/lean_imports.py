"""Imports transformers and hivemind without the parts that swarmnet does not use.

This saves half the start time of a node and 100 MB: the packages would import torch's compiler,
sympy, scipy, trainers and distributed frameworks. Decision record 0011 has the measurements.

Only for processes of swarmnet itself. The libraries behave as usual afterwards, but import the rest
when it is first used.
"""

import gc
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from swarmnet_protocols.errors import ConfigError

_HIDDEN_PACKAGES = ("scipy", "PIL")
"""Optional dependencies of transformers: for losses of object detectors, and for images."""
_DEVICE_PACKAGES = ("accelerate",)
"""Packages that transformers needs to place weights on an accelerator.

Hidden on machines without an accelerator.
"""

_COMPILER = "torch._dynamo"
_state = {"is_used": False}


class _Package(types.ModuleType):
    """A package whose ``__init__`` has not run.

    Accessing a submodule imports it. Accessing any other attribute runs the ``__init__``.
    """

    _importing = threading.RLock()
    """Lets one thread at a time run an ``__init__``, so that no thread sees half a package."""
    _entered = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__spec__ is None or self.__spec__.loader is None:
            raise AttributeError(name)
        submodule = f"{self.__name__}.{name}"
        if submodule in sys.modules:  # the import sets the attribute when it ends
            raise AttributeError(name)
        if importlib.util.find_spec(submodule) is not None:
            return importlib.import_module(submodule)
        with self._importing:
            if not self._entered:
                self._entered = True
                self.__spec__.loader.exec_module(self)
            whole = sys.modules[self.__name__]  # some packages replace themselves in sys.modules
            if whole is not self:
                return getattr(whole, name)
            if name in vars(self):
                return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def prepare_package(name: str, **stand_ins: object) -> None:
    """Let ``import name.x.y`` import that module without the package's ``__init__``.

    ``stand_ins``: attributes of the package that submodules need. Call it before the first import.
    Idempotent. Raises ``ConfigError`` if the package is not installed.
    """
    if name in sys.modules:
        return
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ConfigError(f"{name} is not installed", hint=f"pip install {name.partition('.')[0]}")
    package = _Package(name)
    package.__path__ = list(spec.submodule_search_locations)
    package.__file__ = spec.origin
    package.__spec__ = spec
    vars(package).update(stand_ins)
    sys.modules[name] = package
    above, _, child = name.rpartition(".")
    if isinstance(sys.modules.get(above), _Package):
        setattr(sys.modules[above], child, package)


def use() -> None:
    """Import transformers this way when a model first needs it, in this process.

    Only programs of swarmnet call this: others may use more of the library.
    """
    _state["is_used"] = True


def import_transformers_if_used() -> None:
    """Call ``import_transformers`` if ``use`` was called."""
    if _state["is_used"]:
        import_transformers()


def import_transformers() -> None:
    """Import transformers' model code without torch's compiler and distributed package. Idempotent.

    transformers reads thousands of files twice to make its lazy import tables. Here it makes them
    only when somebody uses an attribute of the package that is not a module. torch's compiler works
    afterwards, but without the exceptions that transformers registers in it.

    All objects that exist at the end are frozen (``gc.freeze``). Collecting them would take a fifth
    of a node's start, and would later delay tokens by 0.15 s now and then.
    """
    if "transformers.modeling_utils" in sys.modules:
        return
    with _frozen():
        import torch

        from swarmnet_protocols.machine.devices import has_accelerator

        torch.distributed.is_available = _no
        unused = _HIDDEN_PACKAGES if has_accelerator() else _HIDDEN_PACKAGES + _DEVICE_PACKAGES
        # transformers remembers which packages it has found, so hiding them later has no effect.
        hidden = () if "transformers" in sys.modules else unused
        prepare_package("transformers", __version__=version("transformers"))
        prepare_package("transformers.models")
        with _without_compiler(), _hidden(hidden):
            with _no_second_package():
                import transformers.processing_utils
            import transformers.modeling_utils  # noqa: F401
            from transformers import masking_utils  # noqa: F401
            from transformers.loss import loss_utils  # noqa: F401


@contextmanager
def _frozen() -> Iterator[None]:
    """Exclude all objects that exist at the end from garbage collection.

    Hardly any of these 300,000 objects ever become garbage.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Replace the decorators of torch's compiler by stubs that do not import the compiler."""
    if _COMPILER in sys.modules:
        yield
        return
    prepare_package(
        _COMPILER, **dict.fromkeys(("allow_in_graph", "assume_constant_result", "disable"), _mark)
    )
    try:
        yield
    finally:
        del sys.modules[_COMPILER]


@contextmanager
def _no_second_package() -> Iterator[None]:
    """Keep transformers from replacing its package in ``sys.modules`` by the whole package."""
    from transformers import utils

    direct_import = utils.direct_transformers_import
    utils.direct_transformers_import = lambda _: sys.modules["transformers"]
    try:
        yield
    finally:
        utils.direct_transformers_import = direct_import


@contextmanager
def _hidden(names: tuple[str, ...]) -> Iterator[None]:
    """Make packages look as if they were not installed, unless they are already imported."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes their import fail
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _mark(function: Any = None, *_: object, **__: object) -> Any:
    """Do nothing, as a decorator with or without arguments."""
    return _mark if function is None else function


def _no() -> bool:
    return False
