"""Models on this machine: finding them by name, their identity, and loading parts of them with
transformers."""

from typing import TYPE_CHECKING, Any

from swarmnet_protocols.models.public_names import DEFAULT_MODEL, EXPERTS_MODEL

if TYPE_CHECKING:
    from swarmnet_protocols.fetching.pieces import ModelFile, Progress
    from swarmnet_protocols.models.local_model import LocalModel
    from swarmnet_protocols.models.manifest import Manifest
    from swarmnet_protocols.models.resolver import resolve

__all__ = ["DEFAULT_MODEL", "EXPERTS_MODEL", "LocalModel", "Manifest", "ModelFile", "Progress", "resolve"]


def __getattr__(name: str) -> Any:
    """Import the names when one of them is used: every command would import all of them otherwise,
    which takes a tenth of a second."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from swarmnet_protocols.fetching.pieces import ModelFile, Progress
    from swarmnet_protocols.models.local_model import LocalModel
    from swarmnet_protocols.models.manifest import Manifest
    from swarmnet_protocols.models.resolver import resolve

    found = {"LocalModel": LocalModel, "Manifest": Manifest, "ModelFile": ModelFile, "Progress": Progress}
    return (found | {"resolve": resolve})[name]
