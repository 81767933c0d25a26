"""Adapters of the tiny model that no host can compute."""

import torch

from swarmnet_protocols.session.adapters import Adapter

HIDDEN = 32
BLOCK = 2
HUGE = 1e30
"""A finite number whose square is not."""


def pair(down: float, up: float) -> Adapter:
    """One LoRA pair of rank 1 for block ``BLOCK``."""
    name = f"{BLOCK}.self_attn.o_proj"
    return Adapter({f"{name}.down": torch.full((1, HIDDEN), down), f"{name}.up": torch.full((HIDDEN, 1), up)})


def unknown_module() -> Adapter:
    """A pair for a module that the model does not have."""
    name = f"{BLOCK}.self_attn.no_such_proj"
    return Adapter({f"{name}.down": torch.zeros(1, HIDDEN), f"{name}.up": torch.zeros(HIDDEN, 1)})
