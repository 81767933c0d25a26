"""Forward passes at perturbed weights, without a second copy of the weights.

Decoder layers are perturbed one after another, each only while it computes. The weights themselves
never change, so there is nothing to restore and no rounding error.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

Shift = Callable[[torch.Tensor, int], torch.Tensor]
"""Returns a perturbed copy of flat weights. The number is the place of the first in the model."""


class _Perturbed:
    """Exchanges the parameters ``own`` for perturbed copies while a module computes."""

    def __init__(self, own: Sequence[nn.Parameter], places: Sequence[int], shift: Shift) -> None:
        self._own = own
        self._places = places
        self._shift = shift
        self._kept: list[torch.Tensor] = []

    def enter(self, *_: Any) -> None:
        self._kept = [parameter.data for parameter in self._own]
        for parameter, place in zip(self._own, self._places, strict=True):
            parameter.data = self._shift(parameter.data.flatten(), place).view(parameter.shape)

    def leave(self, *_: Any) -> None:
        for parameter, weights in zip(self._own, self._kept, strict=True):
            parameter.data = weights
        self._kept = []


@contextmanager
def perturbed(model: nn.Module, trained: Sequence[nn.Parameter], shift: Shift) -> Iterator[None]:
    """Compute with perturbed values of the parameters ``trained`` of ``model`` in the block.

    Places count these parameters in their order. Layers are the entries of the outermost
    ``ModuleList``s. Other modules with parameters are perturbed on their own.
    """
    places, place = {}, 0
    for parameter in trained:
        places[parameter] = place
        place += parameter.numel()
    with ExitStack() as stack:
        for module, parameters in _units(model):
            own = [parameter for parameter in parameters if parameter in places]
            if not own:
                continue
            exchange = _Perturbed(own, [places[parameter] for parameter in own], shift)
            stack.callback(module.register_forward_pre_hook(exchange.enter).remove)
            stack.callback(module.register_forward_hook(exchange.leave, always_call=True).remove)
        yield


def _units(module: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield the modules that are perturbed as a whole, with their parameters."""
    if own := list(module.parameters(recurse=False)):
        yield module, own
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from ((layer, list(layer.parameters())) for layer in child)
        else:
            yield from _units(child)
