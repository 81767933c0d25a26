"""Models on this machine: finding them by name, their identity, and loading parts of them with
transformers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from swarmnet_protocols.models.public_names import DEFAULT_MODEL, EXPERTS_MODEL

if TYPE_CHECKING:
    from swarmnet_protocols.fetching.pieces import ModelFile, Progress
    from swarmnet_protocols.models.local_model import LocalModel
    from swarmnet_protocols.models.manifest import Manifest
    from swarmnet_protocols.models.resolver import resolve

__all__ = ["DEFAULT_MODEL", "EXPERTS_MODEL", "LocalModel", "Manifest", "ModelFile", "Progress", "resolve"]
_MODULES = {
    "LocalModel": "swarmnet_protocols.models.local_model",
    "Manifest": "swarmnet_protocols.models.manifest",
    "ModelFile": "swarmnet_protocols.fetching.pieces",
    "Progress": "swarmnet_protocols.fetching.pieces",
    "resolve": "swarmnet_protocols.models.resolver",
}


def __getattr__(name: str) -> Any:
    """Import the module of a name when the name is used. Otherwise every command would import all
    modules, which takes two tenths of a second."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
