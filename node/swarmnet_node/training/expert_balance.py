"""Balance among routed experts: the biases of routers, moved towards the mean load.

Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts".

Routers with sigmoid scores (DeepSeek-V3, GLM-4.5 and others) choose a row's experts by score plus
each expert's bias, and weigh them by score alone. So no gradient reaches the bias. After each step
the bias moves by ``STEP`` towards the mean load:

    bias_i += STEP * sign(mean load - load_i)

Here the biases are parameters, and workers exchange them like all others. The gradient of a bias is
its expert's share of the rows, less the mean. Workers that exchange gradients average it, so its
sign shows the load of all their batches together.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from swarmnet_protocols.quantization.packed_experts import experts_modules

BIAS = "e_score_correction_bias"
"""transformers' name of the biases of a router."""
STEP = 0.001


def share_biases(model: nn.Module) -> None:
    """Make parameters of the buffers of biases, because buffers are neither exchanged nor written
    into checkpoints."""
    for module in model.modules():
        if isinstance(values := module._buffers.get(BIAS), Tensor):
            delattr(module, BIAS)
            module.register_parameter(BIAS, nn.Parameter(values))


class ExpertBalance:
    """The biases of a model whose parameters are a flat vector, ``[n]``, in the order of
    ``named_parameters()``."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """Hook ``model``, so that each forward with gradients adds the loads of experts to the
        gradients of their biases."""
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

    def take(self, gradient: Tensor) -> Tensor:
        """The gradients of the biases, ``[b]``, which become 0 in ``gradient``, ``[n]``: they have
        no part in its norm, nor in AdamW's moments."""
        loads = gradient[self._places]
        gradient[self._places] = 0.0
        return loads

    def biases(self, parameters: Tensor) -> Tensor:
        """A copy of the biases, ``[b]``, of ``parameters``, ``[n]``."""
        return parameters[self._places]

    def step(self, parameters: Tensor, biases: Tensor, loads: Tensor) -> None:
        """Write ``biases``, moved by a step against ``loads``, into ``parameters``: weight decay
        has no part in them."""
        parameters[self._places] = biases - STEP * loads.sign()


def _add_loads(experts: Any, args: tuple[Any, ...], *, bias: nn.Parameter) -> None:
    """``args``: rows, the experts that the router chose for each of them, and their weights."""
    if bias.grad is None or not torch.is_grad_enabled():
        return
    chosen: Tensor = args[1]
    count = bias.numel()
    rows = torch.bincount(chosen.flatten(), minlength=count)[:count]
    bias.grad += (rows / chosen.numel() - 1 / count).view_as(bias)
