"""The initial weights of a job without a checkpoint.

Each module draws its weights from a seed of its own: a hash of the job's seed and the module's
name. So a worker makes the weights of its stage alone, and they equal those of the whole model.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_WORD = 8
"""Bytes of a hash that seed torch's generator."""


def draw_weights(drawer: Any, modules: Iterable[tuple[str, nn.Module]], seed: int) -> None:
    """Draw the weights of ``modules`` in place, by their names in the whole model.

    ``drawer``: a transformers model with the config of the whole model. It decides distributions
    and may be empty. torch's global generator is left unchanged.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for name, module in modules:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:_WORD], "big", signed=True))
            drawer._init_weights(module)


def materialize(model: nn.Module) -> None:
    """Give a model on the meta device memory on the CPU, whose values ``undrawn`` recognises."""
    model.to_empty(device="cpu")
    for values in _values(model):
        values.data.fill_(float("nan") if values.is_floating_point() else torch.iinfo(values.dtype).min)


def undrawn(model: nn.Module) -> bool:
    """Return whether a value has not been set since ``materialize``."""
    return any(
        bool(values.isnan().any())
        if values.is_floating_point()
        else bool((values == torch.iinfo(values.dtype).min).any())
        for values in _values(model)
    )


def _values(model: nn.Module) -> list[Tensor]:
    return [each for each in (*model.parameters(), *model.buffers()) if each.dtype != torch.bool]
