"""Trials of a stage while it is loaded. They find the caches that its layers need, and a fast way
to compute the layers.

1. :func:`check_ends` refuses a model that does more than its layers do.
2. :func:`probe` computes one position, and finds the attention and the states of each layer.
3. :func:`check_states` refuses layers with a state that the probe has not found.
4. :func:`choose_method` tries faster ways to compute the layers. A way is used only if it
   reproduces the outputs of transformers' own layers on random inputs.
5. :func:`choose_fused` does the same for attention over an arena, once the stage has one.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from swarmnet_node.engine.caches.cache_arena import CacheArena
from swarmnet_node.engine.caches.kv_cache import LayerShape
from swarmnet_node.engine.caches.recurrent_state import StateGeometry, StateProbe
from swarmnet_node.engine.kernels.backend import AttentionRule, Backend, DecoderLayer, DecodeStep
from swarmnet_node.engine.torch_layers.attention import GeometryProbe
from swarmnet_node.engine.torch_layers.decoder_layers import decoder_layers, is_llama
from swarmnet_node.engine.torch_layers.llama_layers import LlamaLayers
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.checkpoint import CONFIG_FAULTS

_log = logging.getLogger(__name__)

TRIAL_TOLERANCE_EPS = 100
"""Largest relative error of a trial, in units of the dtype's epsilon. Rounding causes a few units;
a different function causes far more."""
TRIAL_POSITIONS = 5
NO_ATTENTION = LayerShape(0, 0, 0)


@dataclass(frozen=True)
class ForwardMethod:
    """A way to compute a forward: with transformers' own layers, or with faster ones."""

    layers: Sequence[DecoderLayer] = ()
    """The layers as data. Empty if they are known to transformers only."""
    llama_layers: LlamaLayers | None = None
    """Layers that replace transformers' layers."""
    decode_step: DecodeStep | None = None
    """The backend's forward of few positions, or of any number."""
    is_fused: bool = False
    """True if attention over an arena takes one call for all sequences."""

    def part(self, start: int, end: int, backend: Backend) -> "ForwardMethod":
        """Return the method for layers [start, end)."""
        layers = self.layers[start:end]
        return replace(
            self,
            layers=layers,
            llama_layers=self.llama_layers and self.llama_layers.part(start, end),
            decode_step=self.decode_step and backend.decode_step(layers),
        )


Attempt = Callable[[ForwardMethod, Sequence[Sequence[int]]], torch.Tensor]
"""Computes random positions of new sequences with a method, and returns the outputs.

Each step has a number of positions for each sequence. All sequences end equally long.
"""


@dataclass(frozen=True)
class LayerNeeds:
    """Caches, attention rules and recurrent states of a model's layers. ``mixers`` are the modules
    with recurrent states."""

    shapes: tuple[LayerShape, ...]
    """``NO_ATTENTION`` for a layer without attention."""
    rules: tuple[AttentionRule, ...]
    states: StateGeometry | None
    mixers: Sequence[nn.Module]

    @property
    def is_plain(self) -> bool:
        """True if every layer has attention, and no layer has recurrent states."""
        return self.states is None and NO_ATTENTION not in self.shapes


@torch.inference_mode()
def check_ends(model: Any, hidden_size: int) -> None:
    """Raise ``ConfigError`` if ``model`` changes hidden states before or after its layers.

    Every hop would repeat such a change.
    """
    bare = copy.copy(model)
    bare._modules = {**model._modules, "layers": nn.ModuleList()}
    zeros, positions = _one_position(model, hidden_size)
    try:
        outputs = bare(inputs_embeds=zeros + 1, position_ids=positions, use_cache=False).last_hidden_state
    except CONFIG_FAULTS as error:
        raise ConfigError(f"{type(model).__name__} does not fit its config: {error}") from error
    if not torch.equal(outputs, zeros + 1):
        raise ConfigError(f"{type(model).__name__} changes its inputs before or after its blocks")


@torch.inference_mode()
def probe(model: Any, hidden_size: int) -> LayerNeeds:
    """Compute one position. Raises ``ConfigError`` for layers that a stage cannot compute."""
    attention, states = GeometryProbe(), StateProbe(model.layers)
    zeros, positions = _one_position(model, hidden_size)
    try:
        with states.watching():
            model(
                inputs_embeds=zeros,
                position_ids=positions,
                past_key_values=states,
                use_cache=False,
                packed=attention,
            )
    except CONFIG_FAULTS as error:
        raise _refusal(model) from error
    found = dict(zip(attention.indices, attention.layers, strict=True))
    if len(found) < len(attention.indices) or not found.keys() <= set(range(len(model.layers))):
        raise _refusal(model)
    layers = [found.get(index, (NO_ATTENTION, AttentionRule())) for index in range(len(model.layers))]
    geometry = StateGeometry(tuple(states.states.values()), hidden_size) if states.states else None
    return LayerNeeds(
        tuple(shape for shape, _ in layers), tuple(rule for _, rule in layers), geometry, states.mixers
    )


def check_states(
    attempt: Attempt,
    run_sequences: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
    model: Any,
    hidden_size: int,
) -> None:
    """Raise ``ConfigError`` unless steps give the same outputs as ``run_sequences``.

    Otherwise the layers have a state that the stage does not know.
    """
    [inputs] = random_inputs(1, TRIAL_POSITIONS, hidden_size)
    if not agree(attempt(ForwardMethod(), [[2], [1], [2]]), run_sequences(inputs, [TRIAL_POSITIONS])):
        raise _refusal(model)


def choose_method(
    attempt: Attempt,
    model: Any,
    rules: Sequence[AttentionRule],
    backend: Backend,
    devices: Sequence[torch.device],
) -> ForwardMethod:
    """Return the fastest method that agrees with transformers' layers."""
    chosen = ForwardMethod()
    layers = decoder_layers(model, rules)
    if layers is None:
        return chosen
    expected = attempt(chosen, [[TRIAL_POSITIONS]])
    chosen = ForwardMethod(layers)
    if is_llama(layers):
        faster = replace(chosen, llama_layers=LlamaLayers(layers, model.rotary_emb, backend, devices))
        if not agree(attempt(faster, [[TRIAL_POSITIONS]]), expected):
            return ForwardMethod()
        chosen = faster
    if step := backend.decode_step(layers):
        faster = replace(chosen, decode_step=step)
        if agree(attempt(faster, [[2], [2], [1]]), expected):
            chosen = faster
    return chosen


def choose_fused(
    attempt: Attempt,
    method: ForwardMethod,
    arena: CacheArena,
    rules: Sequence[AttentionRule],
    backend: Backend,
) -> ForwardMethod:
    """Return ``method``, with attention to all sequences of an arena in one call if that agrees."""
    if not all(
        backend.is_fused(keys[:1], values, rule)
        for (keys, values), rule in zip(arena.buffers, rules, strict=True)
    ):
        return method
    steps = [[TRIAL_POSITIONS, TRIAL_POSITIONS - 2], [1, 3]]
    fused = replace(method, is_fused=True)
    try:
        is_right = agree(attempt(fused, steps), attempt(method, steps))
    except RuntimeError as error:
        _log.warning("attention runs one sequence at a time: %s", error)
        return method
    return fused if is_right else method


def agree(outputs: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether outputs are equal up to rounding. This also works for outputs of zeros."""
    error = (outputs - expected).float().norm()
    return bool(error <= TRIAL_TOLERANCE_EPS * torch.finfo(expected.dtype).eps * expected.float().norm())


def random_inputs(sequences: int, positions: int, hidden_size: int) -> torch.Tensor:
    """Return the inputs of a trial, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(sequences, positions, hidden_size, generator=generator)


def _one_position(model: Any, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states [1, 1, D] of zeros, and their position [1, 1]."""
    weight = next(model.parameters())
    zeros = torch.zeros(1, 1, hidden_size, dtype=weight.dtype, device=weight.device)
    return zeros, torch.zeros(1, 1, dtype=torch.long, device=weight.device)


def _refusal(model: Any) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} has layers with other state than keys, values and recurrent states",
        hint="docs/families.md lists families that work",
    )
