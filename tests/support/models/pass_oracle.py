"""The true results of a pass with an adapter: transformers and PEFT in this process, differentiated
by autograd."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import nn
from transformers import DynamicCache

from tests.support.models.peft_oracle import lora_tensors, with_lora
from tests.support.models.rounding import assert_near


@dataclass(frozen=True)
class LocalPass:
    """An adapter's tensors, the outputs and input gradients of a pass with it, and the gradients of
    its tensors by name."""

    tensors: dict[str, torch.Tensor]
    outputs: torch.Tensor
    gradients: torch.Tensor
    own: dict[str, torch.Tensor]


def lora_pass(
    plain: Any, targets: Sequence[str], inputs: torch.Tensor, counts: Sequence[int], wanted: torch.Tensor
) -> LocalPass:
    """A pass of sequences [P, D] through the blocks of ``plain`` with random LoRA pairs; ``wanted``
    are the gradients of the outputs."""
    tuned = with_lora(plain, targets)
    stack = tuned.get_base_model().model
    stack.norm = nn.Identity()
    leaf = inputs.clone().requires_grad_()
    outputs = torch.cat(
        [stack(inputs_embeds=row[None]).last_hidden_state[0] for row in leaf.split(list(counts))]
    )
    outputs.backward(wanted)
    own = {}
    for name, module in tuned.named_modules():
        if isinstance(module, Linear):
            block, _, path = name.split(".layers.")[1].partition(".")
            own[f"{block}.{path}.down"] = _grad(module.lora_A["default"].weight)
            own[f"{block}.{path}.up"] = _grad(module.lora_B["default"].weight) / module.scaling["default"]
    return LocalPass(lora_tensors(tuned), outputs.detach(), _grad(leaf), own)


def prefix_pass(
    plain: Any, positions: int, inputs: torch.Tensor, counts: Sequence[int], wanted: torch.Tensor
) -> LocalPass:
    """The same results as those of ``lora_pass``, with a random prefix in place of LoRA pairs."""
    stack, text = plain.model, plain.config
    stack.norm = nn.Identity()
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    generator = torch.Generator().manual_seed(5)
    tensors = {
        f"{block}.prefix.{kind}": torch.randn(
            text.num_key_value_heads, positions, size, generator=generator
        ).requires_grad_()
        for block in range(text.num_hidden_layers)
        for kind in ("key", "value")
    }
    leaf = inputs.clone().requires_grad_()
    outputs = []
    for row in leaf.split(list(counts)):
        cache = DynamicCache()
        for block in range(text.num_hidden_layers):
            key, value = (tensors[f"{block}.prefix.{kind}"][None] for kind in ("key", "value"))
            cache.update(key, value, block)
        outputs.append(stack(inputs_embeds=row[None], past_key_values=cache).last_hidden_state[0])
    torch.cat(outputs).backward(wanted)
    own = {name: _grad(tensor) for name, tensor in tensors.items()}
    detached = {name: tensor.detach() for name, tensor in tensors.items()}
    return LocalPass(detached, torch.cat(outputs).detach(), _grad(leaf), own)


def assert_same(found: Sequence[torch.Tensor], own: dict[str, torch.Tensor], expected: LocalPass) -> None:
    """Assert that outputs, input gradients and the gradients of every adapter tensor are those of
    ``expected``."""
    assert own.keys() == expected.own.keys()
    pairs = [*zip(found, (expected.outputs, expected.gradients), strict=True)]
    for ours, theirs in [*pairs, *((own[name], expected.own[name]) for name in own)]:
        assert_near(ours, theirs)


def _grad(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad
