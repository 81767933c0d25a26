"""Models on this machine: finding them by name, their identity, and loading parts of them with
transformers."""

from swarmnet_protocols.fetching.pieces import ModelFile, Progress
from swarmnet_protocols.models.local_model import LocalModel
from swarmnet_protocols.models.manifest import Manifest
from swarmnet_protocols.models.resolver import DEFAULT_MODEL, EXPERTS_MODEL, resolve

__all__ = ["DEFAULT_MODEL", "EXPERTS_MODEL", "LocalModel", "Manifest", "ModelFile", "Progress", "resolve"]
