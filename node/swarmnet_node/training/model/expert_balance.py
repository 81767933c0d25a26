"""Balances routed experts: moves the biases of routers towards the mean load.

Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts".

Routers with sigmoid scores (DeepSeek-V3, GLM-4.5 and others) choose a row's experts by score plus
each expert's bias, but weigh them by score alone. So no gradient reaches the bias. Instead, after
each step the bias moves by ``STEP`` towards the mean load:

    bias_i += STEP * sign(mean load - load_i)

Here the biases are parameters, and workers exchange them like all others. The gradient of a bias is
its expert's share of the rows minus the mean share. If workers exchange gradients, this one is
averaged, too. Its sign then shows the load of all their batches together.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from swarmnet_protocols.models.checkpoints.conversion import experts_modules

BIAS = "e_score_correction_bias"
"""The name of a router's biases in transformers."""
STEP = 0.001


def share_biases(model: nn.Module) -> None:
    """Turn the buffers of biases into parameters: buffers are neither exchanged nor saved."""
    for module in model.modules():
        if isinstance(values := module._buffers.get(BIAS), Tensor):
            delattr(module, BIAS)
            module.register_parameter(BIAS, nn.Parameter(values))


class ExpertBalance:
    """The biases of a model with flat parameters ``[n]``, in the order of
    ``named_parameters()``."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Hook ``model``, which computes on ``device``.

        Each forward with gradients then counts the loads of experts.
        """
        places, first = [torch.empty(0, dtype=torch.int64)], 0
        for name, parameter in model.named_parameters():
            if name.endswith(BIAS):
                places.append(torch.arange(first, first + parameter.numel()))
            first += parameter.numel()
        self._places = torch.cat(places)
        self._loads = torch.zeros(len(self._places), device=device)
        names = [name for name, _ in model.named_parameters() if name.endswith(BIAS)]
        parts = torch.split_with_sizes(self._loads, [len(each) for each in places[1:]])
        for path, experts in experts_modules(model):
            around = path.rpartition(".")[0] + "."
            for name, part in zip(names, parts, strict=True):
                if name.startswith(around):
                    experts.register_forward_pre_hook(partial(_add_loads, loads=part))

    def insert(self, gradient: Tensor) -> None:
        """Move the counted loads into ``gradient``, ``[n]``, as the gradients of the biases."""
        gradient[self._places] = self._loads.to(gradient.device)
        self._loads.zero_()

    def extract(self, gradient: Tensor) -> Tensor:
        """Return the gradients of the biases, ``[b]``, and set them to 0 in ``gradient``, ``[n]``.

        The loads must not change the gradient's norm or AdamW's moments.
        """
        loads = gradient[self._places]
        gradient[self._places] = 0.0
        return loads

    def biases(self, parameters: Tensor) -> Tensor:
        """Return a copy of the biases, ``[b]``, in ``parameters``, ``[n]``."""
        return parameters[self._places]

    def step(self, parameters: Tensor, biases: Tensor, loads: Tensor) -> None:
        """Write ``biases``, moved one step against ``loads``, into ``parameters``.

        This undoes what the optimizer's weight decay did to the biases.
        """
        parameters[self._places] = biases - STEP * loads.sign()


def _add_loads(experts: Any, args: tuple[Any, ...], *, loads: Tensor) -> None:
    """Add to ``loads`` the difference between each expert's share of the rows and the mean share.

    ``args``: rows, the experts that the router chose for each row, and their weights.
    """
    if torch.is_grad_enabled():
        chosen: Tensor = args[1]
        count = loads.numel()
        rows = torch.bincount(chosen.flatten(), minlength=count)[:count]
        loads += rows / chosen.numel() - 1 / count
