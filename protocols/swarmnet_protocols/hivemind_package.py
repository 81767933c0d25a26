"""hivemind without its trainers: only the submodules that are asked for are imported.

``hivemind/__init__.py`` imports all of hivemind, and with it scipy: 45 MB and half a second that a node has no use for.
"""

import importlib.util
import sys
import types
from typing import Any

from swarmnet_protocols.errors import ConfigError


class _Package(types.ModuleType):
    """The package as its submodules need it; whoever asks it for more gets all of it."""

    def __getattr__(self, name: str) -> Any:
        importing = f"hivemind.{name}" in sys.modules  # it becomes an attribute when its import is done
        if importing or name.startswith("__path") or self.__spec__ is None or self.__spec__.loader is None:
            raise AttributeError(name)
        self.__class__ = types.ModuleType  # type: ignore[assignment]  # from here on an ordinary module
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def prepare() -> None:
    """Make ``import hivemind.x.y`` import just that. Call it before the first such import; idempotent."""
    if "hivemind" in sys.modules:
        return
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.submodule_search_locations is None:
        raise ConfigError("hivemind is not installed", hint="pip install hivemind")
    package = _Package("hivemind")
    package.__path__ = list(spec.submodule_search_locations)
    package.__file__ = spec.origin
    package.__spec__ = spec
    sys.modules["hivemind"] = package
