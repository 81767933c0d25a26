"""The local layers of a model: embeddings before the blocks, final norm and lm_head after them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from transformers.masking_utils import AttentionMaskInterface

from swarmnet_client.model.placeholders import match_layers, stand_ins
from swarmnet_client.model.sampling import Draw, Token, choose
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.devices import pick_device, pick_dtype
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.models.partial_model import embed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

IMPLEMENTATION = "swarmnet_remote"
"""Name of an attention implementation without a mask. Hosts know which positions attend to which,
so transformers need not build one."""
_WIRES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


@dataclass(frozen=True)
class LoadOptions:
    """Options for loading a checkpoint.

    - ``labels``: number of classes of a classifier; None for the CausalLM.
    - ``standby``, ``wire``, ``wait_s``: as in ``ChainSpec``.
    - ``draft``: name of a small model that drafts tokens; empty for none.
    - ``packed``: whether quantised embeddings and lm_head stay as the checkpoint stores them.
      Packed weights cannot be trained or adapted.
    """

    dtype: torch.dtype
    device: torch.device
    labels: int | None = None
    packed: bool = False
    standby: bool | None = None
    wire: torch.dtype | None = None
    draft: str = ""
    wait_s: float = 0.0

    @classmethod
    def picked(
        cls,
        dtype: str = "auto",
        device: str = "auto",
        labels: int | None = None,
        *,
        only_generates: bool = False,
        wire: str = "auto",
        **others: Any,
    ) -> "LoadOptions":
        """Return the options that these command-line options mean. ``only_generates``: nothing is
        trained. ``others`` become fields unchanged. Raises ``ConfigError`` for an unknown device or
        precision."""
        if wire not in _WIRES:
            raise ConfigError(f"{wire!r} is not a wire format", hint=f"use one of {', '.join(_WIRES)}")
        place = pick_device(device)
        packed = only_generates and dtype == "auto" and place.type == "cpu"
        return cls(pick_dtype(dtype, place), place, labels, packed, wire=_WIRES[wire], **others)


def memory_notice(local: LocalModel, options: LoadOptions) -> str:
    """Return a sentence on local layers that should stay packed but cannot, and their memory. Empty
    if all stay packed."""
    sizes = local.sizes("local_layers")
    return sizes.notice("the embeddings and the head", options.dtype) if options.packed else ""


def load_local_layers(local: LocalModel, options: LoadOptions) -> "PreTrainedModel":
    """Return an instance of the architecture's class with placeholders for its blocks.

    Its ``forward`` takes ``swarm_call``, a function from embedded inputs [B, n, D] to the outputs
    of the last block.
    """
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
    model = local.load_local_layers(
        lambda layers: stand_ins(layers, options.device),
        dtype=options.dtype,
        device=options.device,
        labels=options.labels,
        packed=options.packed,
    )
    model.config._attn_implementation = IMPLEMENTATION
    match_layers(model)
    embeddings = model.get_input_embeddings()
    embeddings.register_forward_pre_hook(partial(_check_ids, model.config.vocab_size))
    return model


def _check_ids(count: int, _: object, arguments: tuple[torch.Tensor, ...]) -> None:
    """Raise ``ConfigError`` unless all ids are below ``count``.

    Some tokenizers have tokens, say for images, that the language model does not know.
    """
    ids = arguments[0]
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        stray = next(id for id in ids.flatten().tolist() if not 0 <= id < count)
        raise ConfigError(
            f"the model has no token {stray}: its tokens are 0 to {count - 1}",
            hint="use the model's own tokenizer, and leave out its tokens for images and sound",
        )


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
    """Embeddings, final norm and lm_head of one model, for many answers at once."""

    def __init__(self, local: LocalModel, options: LoadOptions) -> None:
        self._model: Any = load_local_layers(local, options)
        self._device = options.device

    @property
    def generation_config(self) -> Any:
        """The checkpoint's generation config."""
        return self._model.generation_config

    @property
    def can_rewind(self) -> bool:
        """Whether caches can go back to any position at no cost. Recurrent states cannot: they are
        computed again from a snapshot."""
        return not self._model._is_stateful

    @torch.inference_mode()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [P, D] of token ids [P], on the CPU."""
        return embed(self._model, ids.to(self._device)).cpu()

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V], float32, of outputs [N, D] of the last block."""
        return logits(self._model, type(self._model).forward, hidden)


class LmHead:
    """Applies lm_head and samples next tokens, on the one thread that computes."""

    def __init__(self, local_layers: LocalLayers, computing: Executor) -> None:
        self._local_layers = local_layers
        self._computing = computing

    async def choose(self, hidden: torch.Tensor, draws: list[Draw]) -> list[Token]:
        """Return the next token after each of the hidden states [N, D], chosen by its draw."""
        return await self.compute(partial(self._choose, hidden, draws))

    async def compute(self, work: Callable[[], T]) -> T:
        """Run ``work`` on the thread that computes, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._computing, work)

    @torch.inference_mode()
    def _choose(self, hidden: torch.Tensor, draws: list[Draw]) -> list[Token]:
        return choose(self._local_layers.logits(hidden), draws)
