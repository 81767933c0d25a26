"""The LoRA pairs that PEFT has put into a swarm model's placeholders, as hosts apply them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swarmnet_client.model.placeholders import Placeholder
from swarmnet_protocols.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """One adapter's share of a module: output += inputs @ down.T @ up.T * scaling."""

    down: torch.Tensor
    up: torch.Tensor
    scaling: float


Pairs = dict[str, list[Part]]
"""By the name "{block}.{module path in the block}", what the active adapters add there; never empty."""


def active_pairs(layers: Iterable[Placeholder]) -> Pairs:
    """What PEFT would apply now. Raises ``ConfigError`` for anything that hosts cannot do."""
    pairs: Pairs = {}
    for block, layer in enumerate(layers):
        if not isinstance(layer, Placeholder) or layer.block != block:
            raise _refusal(f"layers.{block}", "its place among the blocks was changed")
        if not layer.is_frozen:
            raise _refusal(
                f"layers.{block}", "its own weights (or biases: bias='none' in PEFT) want gradients"
            )
        for path, module, original in layer.replaced():
            if parts := _active_parts(f"layers.{block}.{path}", module, original):
                pairs[f"{block}.{path}"] = parts
    return pairs


def tensors_of(pairs: Pairs) -> dict[str, torch.Tensor]:
    """The tensors of an adapter, float32 on the CPU, part of the graph of PEFT's parameters."""
    tensors = {}
    for name, parts in pairs.items():
        down = torch.cat([part.down for part in parts])
        up = torch.cat([part.up * part.scaling for part in parts], dim=1)
        tensors[f"{name}.down"] = down.to("cpu", torch.float32)
        tensors[f"{name}.up"] = up.to("cpu", torch.float32)
    return tensors


def version_of(pairs: Pairs) -> tuple[object, ...]:
    """Another for other parameters, and for most changes of their values: some optimizers (fused ones) make them unseen."""
    return tuple(
        (name, id(tensor), 0 if tensor.is_inference() else tensor._version, part.scaling)
        for name, parts in pairs.items()
        for part in parts
        for tensor in (part.down, part.up)
    )


def _active_parts(name: str, module: Any, original: nn.Module | None) -> list[Part]:
    from peft.tuners.lora import layer as lora

    if type(module) is not lora.Linear or module.get_base_layer() is not original:
        raise _refusal(name, f"{type(module).__name__} is not LoRA on a linear layer")
    if module.disable_adapters:
        return []
    if module._forward_pre_hooks or module._forward_hooks:
        raise _refusal(name, "hooks, and adapters of single rows (adapter_names), do not reach the hosts")
    return [_part(name, module, adapter) for adapter in module.active_adapters if adapter in module.lora_A]


def _part(name: str, module: Any, adapter: str) -> Part:
    if variant := module.lora_variant.get(adapter):
        raise _refusal(
            name, f"{type(variant).__name__} (use_dora and the like) is more than a pair of matrices"
        )
    if module.lora_bias[adapter]:
        raise _refusal(name, "it has a bias; set lora_bias=False")
    if module.training and getattr(module.lora_dropout[adapter], "p", 0.0) > 0:
        raise _refusal(name, "dropout; set lora_dropout=0 to train, or call model.eval()")
    return Part(module.lora_A[adapter].weight, module.lora_B[adapter].weight, module.scaling[adapter])


def _refusal(name: str, why: str) -> ConfigError:
    return ConfigError(f"hosts cannot apply what is in {name}: {why}", hint="use PEFT's plain LoRA")
