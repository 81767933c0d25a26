"""Libraries we stand on, imported without their parts that we have no use for. For processes that are ours alone.

As their packages would have it, a process that runs a model has half of torch's compiler, a computer algebra system and two
frameworks for clusters in memory: 80 MB and 1.5 s of a processor, before it has done anything.
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

_NOT_FOR_US = ("scipy", "accelerate", "PIL")
"""What transformers takes if it is there: for losses of object detectors, for models on several devices, for pictures."""

_COMPILER = "torch._dynamo"


class _Package(types.ModuleType):
    """The package as its submodules need it. Whoever asks it for a submodule gets that; for anything else, all of the package."""

    _importing = threading.RLock()
    """One thread at a time imports a whole package, so that no other sees half of one."""
    _entered = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__spec__ is None or self.__spec__.loader is None:
            raise AttributeError(name)
        submodule = f"{self.__name__}.{name}"
        if submodule in sys.modules:  # an attribute from the end of its import on
            raise AttributeError(name)
        if importlib.util.find_spec(submodule) is not None:
            return importlib.import_module(submodule)
        with self._importing:
            if not self._entered:
                self._entered = True
                self.__spec__.loader.exec_module(self)
            whole = sys.modules[self.__name__]  # some put another module in their place
            if whole is not self:
                return getattr(whole, name)
            if name in vars(self):
                return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def prepare_package(name: str, **stand_ins: object) -> None:
    """Make ``import name.x.y`` import just that, without what the package's ``__init__`` would import.

    ``stand_ins`` are there of what the package has itself. Call it before the first such import; idempotent.
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


def import_transformers() -> None:
    """Import transformers' model code as if torch could not compile nor work in clusters, unless it is imported already.

    What the process has by then is kept: it is looked through for garbage neither meanwhile nor afterwards, which would take
    a fifth of a node's start, and hold up its tokens for 0.15 s now and then.
    Who compiles afterwards gets torch's compiler, but what transformers wants left out of it is not known to it. The lists
    of all that transformers has, for which it reads each of its thousands of files twice, are made when somebody
    asks it, or its ``models``, for something that is not a module of that name.
    """
    if "transformers.modeling_utils" in sys.modules:
        return
    with _kept():
        import torch

        torch.distributed.is_available = _no
        # What transformers has once found installed it takes for granted.
        hidden = () if "transformers" in sys.modules else _NOT_FOR_US
        prepare_package("transformers", __version__=version("transformers"))
        prepare_package("transformers.models")
        with _without_compiler(), _hidden(hidden):
            with _no_second_package():
                import transformers.processing_utils
            import transformers.modeling_utils  # noqa: F401
            from transformers import masking_utils  # noqa: F401
            from transformers.loss import loss_utils  # noqa: F401


@contextmanager
def _kept() -> Iterator[None]:
    """Have the collector pass over all that is there at the end: 300,000 objects, hardly any of which are ever garbage."""
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
    """Have decorators that tell torch's compiler something do nothing, for which it would be imported."""
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
    """Keep transformers from replacing its own package by all of it. The package gives that as well, to whoever asks for it."""
    from transformers import utils

    direct_import = utils.direct_transformers_import
    utils.direct_transformers_import = lambda _: sys.modules["transformers"]
    try:
        yield
    finally:
        utils.direct_transformers_import = direct_import


@contextmanager
def _hidden(names: tuple[str, ...]) -> Iterator[None]:
    """Have ``import`` say of those that are not imported yet that they are not installed."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is Python's way to say so
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _mark(function: Any = None, *_: object, **__: object) -> Any:
    """In place of a decorator, with arguments or without."""
    return _mark if function is None else function


def _no() -> bool:
    return False
