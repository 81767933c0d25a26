"""The local layers of a model: embeddings before the blocks, final norm and lm_head after them."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers.masking_utils import AttentionMaskInterface

from swarmnet_client.model.load_options import LoadOptions
from swarmnet_client.model.native_layers import check_ids
from swarmnet_client.model.placeholders import match_layers, stand_ins
from swarmnet_protocols.arrays import Array, as_array, as_tensor
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.models.partial_model import embed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "swarmnet_remote"
"""Name of an attention implementation without a mask. Hosts know which positions attend to which,
so transformers need not build one."""


def load_local_layers(local: LocalModel, options: LoadOptions) -> "PreTrainedModel":
    """Return an instance of the architecture's class with placeholders for its blocks.

    Its ``forward`` takes ``swarm_call``, a function from embedded inputs [B, n, D] to the outputs
    of the last block.
    """
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
    model = local.load_local_layers(
        lambda layers: stand_ins(layers, options.torch_device),
        dtype=options.torch_dtype,
        device=options.torch_device,
        labels=options.labels,
        packed=options.packed,
    )
    model.config._attn_implementation = IMPLEMENTATION
    match_layers(model)
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_pre_hook(partial(_check_ids, model.config.vocab_size))
    return model


def _check_ids(count: int, _: object, arguments: tuple[torch.Tensor, ...]) -> None:
    check_ids(as_array(arguments[0].cpu()), count)


def _no_mask(*_: Any, **__: Any) -> None:
    return None


@torch.inference_mode()
def logits(model: Any, forward: Callable[..., Any], hidden: torch.Tensor) -> torch.Tensor:
    """Return logits [N, V], float32, of outputs [N, D] of the last block of ``model``.

    ``forward`` is the architecture's own ``forward``, without the swarm. A classifier has a logit
    for each label.
    """
    states = hidden.to(model.device, model.dtype)[:, None]
    output = forward(
        model, inputs_embeds=states, use_cache=False, return_dict=True, swarm_call=lambda _: states
    )
    return cast(torch.Tensor, output.logits).reshape(len(hidden), -1).float()


class LocalLayers:
    """The local layers of a model of any architecture, computed by transformers (``Layers``)."""

    def __init__(self, local: LocalModel, options: LoadOptions) -> None:
        self._model: Any = load_local_layers(local, options)
        self._device = options.torch_device

    @property
    def can_rewind(self) -> bool:
        return not self._model._is_stateful

    @torch.inference_mode()
    def embed(self, ids: Array) -> Array:
        """Return embeddings [P, D] of token ids [P]."""
        return as_array(embed(self._model, as_tensor(ids).to(self._device)).cpu())

    @torch.inference_mode()
    def normed(self, hidden: Array) -> Array:
        """Return outputs [N, D] of the last block after the final norm, float32."""
        states = as_tensor(hidden).to(self._model.device, self._model.dtype)[:, None]
        output = self._model.base_model(inputs_embeds=states, use_cache=False, swarm_call=lambda _: states)
        return as_array(output.last_hidden_state[:, 0].float().cpu())

    @torch.inference_mode()
    def logits(self, hidden: Array) -> Array:
        """Return logits [N, V], float32, of outputs [N, D] of the last block."""
        return as_array(logits(self._model, type(self._model).forward, as_tensor(hidden)).cpu())
