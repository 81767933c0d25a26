"""Local layers that take and return tensors, for tests that compute the blocks with torch."""

import torch

from swarmnet_client.model.load_options import LoadOptions
from swarmnet_client.model.local_layers import LocalLayers
from swarmnet_protocols.arrays import as_array, as_tensor
from swarmnet_protocols.models import LocalModel


class TensorLayers:
    def __init__(self, local: LocalModel) -> None:
        self._layers = LocalLayers(local, LoadOptions())

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return as_tensor(self._layers.embed(as_array(ids)))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return as_tensor(self._layers.logits(as_array(hidden)))
