"""A model whose trained parameters are one vector, and whose gradients are another.

Reading, replacing, clipping and exchanging them are then one operation each.

In float32, the parameters of the model are views of the vector. If passes compute in bfloat16, or
the vector stays on the CPU (ZeRO-Offload), the model has rounded or copied weights of its own. Each
gradient is then added to the float32 gradients as soon as it is known, and freed.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from swarmnet_node.training.model.building import flatten, is_adapted, trained_parameters
from swarmnet_node.training.model.expert_balance import BIAS
from swarmnet_node.training.steps.memory_options import MemoryOptions
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models.checkpoints.conversion import experts_modules


class FlatModel:
    """A model on ``device``, and the vector ``values`` of its trained parameters, ``[n]``."""

    def __init__(self, model: PreTrainedModel, device: torch.device, memory: MemoryOptions) -> None:
        """Raises ``ConfigError`` if the model cannot compute its activations again."""
        self.model = model
        self.version = 0
        """Counts the changes of the weights."""
        named = trained_parameters(model)
        self.parameters = [parameter for _, parameter in named]
        self._starts = (0, *accumulate(each.numel() for each in self.parameters))[:-1]
        self._gradients: Tensor | None = None
        # The frozen weights of an adapter decide the format of its passes.
        in_bfloat16 = memory.computes_in_bfloat16(device.type) and not is_adapted(model)
        is_at_home = memory.optimizer_states == "cpu"
        self._is_shared = not in_bfloat16 and not is_at_home
        if self._is_shared:
            self.model.to(device)
        self.values = flatten(self.parameters).to("cpu" if is_at_home else device)
        if not self._is_shared:
            kept = {BIAS, *(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
            for (name, parameter), start in zip(named, self._starts, strict=True):
                rounded = in_bfloat16 and not any(module in name for module in kept)
                dtype = torch.bfloat16 if rounded else torch.float32
                parameter.data = parameter.data.to(device, dtype, copy=True)
                collect = partial(self._collect, start=start)
                parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
            self.model.to(device)
        if memory.recompute:
            if not model.supports_gradient_checkpointing:
                raise ConfigError(
                    f"{type(model).__name__} cannot compute its activations again",
                    hint="leave out --recompute, or set microbatch = 1 in the job",
                )
            old = model.gradient_checkpointing_enable  # its name in older transformers
            getattr(model, "activation_checkpointing_enable", old)({"use_reentrant": False})

    @property
    def matrices(self) -> dict[int, Sequence[int]]:
        """The position in the vector and the shape of each hidden matrix.

        Embeddings and output heads are not hidden. Each expert of a layer has matrices of its own.
        """
        ends = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        outside = {id(each) for module in ends if module is not None for each in module.parameters()}
        stacks = {id(each) for _, module in experts_modules(self.model) for each in module.parameters()}
        found: dict[int, Sequence[int]] = {}
        for parameter, start in zip(self.parameters, self._starts, strict=True):
            if id(parameter) in outside or parameter.dim() != (3 if id(parameter) in stacks else 2):
                continue
            *stack, rows, columns = parameter.shape
            for number in range(math.prod(stack)):
                found[start + number * rows * columns] = (rows, columns)
        return found

    def refresh(self) -> None:
        """Round or copy the changed vector into the weights that the model computes with."""
        self.version += 1
        if not self._is_shared:
            for parameter, part in self._parts(self.values):
                parameter.data.copy_(part)

    def gradients(self) -> Tensor:
        """Return the gradients, ``[n]``. They are allocated on first use: zeroth-order methods
        never need them."""
        if self._gradients is None:
            self._gradients = torch.zeros_like(self.values)
            if self._is_shared:
                for parameter, part in self._parts(self._gradients):
                    parameter.grad = part
        return self._gradients

    def free_gradients(self) -> None:
        """Free the gradients, because the next exchange needs the memory."""
        self._gradients = None
        for parameter in self.parameters:
            parameter.grad = None

    def _parts(self, vector: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with its part of ``vector``."""
        for parameter, start in zip(self.parameters, self._starts, strict=True):
            yield parameter, vector[start : start + parameter.numel()].view(parameter.shape)

    def _collect(self, parameter: Tensor, *, start: int) -> None:
        """Add the gradient of a parameter to the vector of gradients, and free it."""
        if parameter.grad is not None:
            part = self.gradients()[start : start + parameter.numel()].view(parameter.shape)
            part.add_(parameter.grad.to(part.device))
            parameter.grad = None
