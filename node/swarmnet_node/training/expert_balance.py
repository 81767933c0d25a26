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
        """Hook ``model``.

        Each forward with gradients then adds the loads of experts to the gradients of their biases.
        """
        places, first = [torch.empty(0, dtype=torch.int64)], 0
        for name, parameter in model.named_parameters():
            if name.endswith(BIAS):
                places.append(torch.arange(first, first + parameter.numel()))
            first += parameter.numel()
        self._places = torch.cat(places).to(device)
        for path, experts in experts_modules(model):
            around = path.rpartition(".")[0] + "."
            for name, parameter in model.named_parameters():
                if name.startswith(around) and name.endswith(BIAS):
                    experts.register_forward_pre_hook(partial(_add_loads, bias=parameter))

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


def _add_loads(experts: Any, args: tuple[Any, ...], *, bias: nn.Parameter) -> None:
    """Add loads. ``args``: rows, the experts that the router chose for each row, and their
    weights."""
    if bias.grad is None or not torch.is_grad_enabled():
        return
    chosen: Tensor = args[1]
    count = bias.numel()
    rows = torch.bincount(chosen.flatten(), minlength=count)[:count]
    bias.grad += (rows / chosen.numel() - 1 / count).view_as(bias)
