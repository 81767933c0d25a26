"""The client adapter: converts PEFT's LoRA pairs and prefix to the form that hosts apply."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from swarmnet_client.model.placeholders import Placeholder
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.session.adapters import Adapter


@dataclass(frozen=True)
class LoraPart:
    """One adapter's share of a module: output += inputs @ down.T @ up.T * scaling."""

    down: torch.Tensor
    up: torch.Tensor
    scaling: float


Pairs = dict[str, list[LoraPart]]
"""The parts of the active adapters by the name "{block}.{module path in the block}"; no list is
empty."""


@dataclass(frozen=True)
class ClientAdapter:
    """Parameters that hosts apply to this client's tokens. ``prefix`` is as ``prefix_tensors``
    returns it, or empty."""

    pairs: Pairs = field(default_factory=dict)
    prefix: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: Iterable[Placeholder], prefix: Mapping[str, torch.Tensor]) -> "ClientAdapter":
        """Return the active parameters. Raises ``ConfigError`` for an adapter that hosts cannot
        apply."""
        return cls(active_pairs(layers), prefix)

    @property
    def version(self) -> tuple[object, ...]:
        """Changes when LoRA parameters are replaced or their values change, but not when a fused
        optimizer writes values."""
        return tuple(
            (name, id(tensor), 0 if tensor.is_inference() else tensor._version, part.scaling)
            for name, parts in self.pairs.items()
            for part in parts
            for tensor in (part.down, part.up)
        )

    @property
    def learns(self) -> bool:
        """True if any parameter requires gradients."""
        return any(
            tensor.requires_grad
            for tensor in (
                *self.prefix.values(),
                *(
                    tensor
                    for parts in self.pairs.values()
                    for part in parts
                    for tensor in (part.down, part.up)
                ),
            )
        )

    @property
    def prefix_positions(self) -> int:
        return next((tensor.shape[1] for tensor in self.prefix.values()), 0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters as tensors of an adapter, float32 on the CPU, with their autograd
        graph."""
        tensors = dict(self.prefix)
        for name, parts in self.pairs.items():
            down = torch.cat([part.down for part in parts])
            up = torch.cat([part.up * part.scaling for part in parts], dim=1)
            tensors[f"{name}.down"] = down.to("cpu", torch.float32)
            tensors[f"{name}.up"] = up.to("cpu", torch.float32)
        return tensors

    @torch.no_grad()
    def is_in(self, adapter: Adapter | None) -> bool:
        """Return whether ``adapter`` has exactly these values."""
        tensors = self.tensors()
        known = {} if adapter is None else adapter.tensors
        return tensors.keys() == known.keys() and all(
            torch.equal(tensors[name], known[name]) for name in tensors
        )


def adapter_of(model: Any) -> Adapter:
    """Return the present values of PEFT's LoRA pairs in the blocks of ``model``, as hosts receive
    them."""
    return Adapter(ClientAdapter.of(model.base_model.layers, {}).tensors())


def active_pairs(layers: Iterable[Placeholder]) -> Pairs:
    """Return the pairs that PEFT would apply now. Raises ``ConfigError`` for an adapter that hosts
    cannot apply."""
    pairs: Pairs = {}
    for block, layer in enumerate(layers):
        if not isinstance(layer, Placeholder) or layer.block != block:
            raise _lora_refusal(f"layers.{block}", "its place among the blocks was changed")
        if not layer.is_frozen:
            raise _lora_refusal(
                f"layers.{block}", "its own weights (or biases: bias='none' in PEFT) want gradients"
            )
        for path, module, original in layer.replaced():
            if parts := _active_parts(f"layers.{block}.{path}", module, original):
                pairs[f"{block}.{path}"] = parts
    return pairs


def _active_parts(name: str, module: Any, original: nn.Module | None) -> list[LoraPart]:
    from peft.tuners.lora.layer import Linear

    if type(module) is not Linear or module.get_base_layer() is not original:
        raise _lora_refusal(name, f"{type(module).__name__} is not LoRA on a linear layer")
    if module.disable_adapters:
        return []
    if module._forward_pre_hooks or module._forward_hooks:
        raise _lora_refusal(
            name, "hooks, and adapters of single rows (adapter_names), do not reach the hosts"
        )
    return [_part(name, module, adapter) for adapter in module.active_adapters if adapter in module.lora_A]


def _part(name: str, module: Any, adapter: str) -> LoraPart:
    if variant := module.lora_variant.get(adapter):
        raise _lora_refusal(
            name, f"{type(variant).__name__} (use_dora and the like) is more than a pair of matrices"
        )
    if module.lora_bias[adapter]:
        raise _lora_refusal(name, "it has a bias; set lora_bias=False")
    if module.training and getattr(module.lora_dropout[adapter], "p", 0.0) > 0:
        raise _lora_refusal(name, "dropout; set lora_dropout=0 to train, or call model.eval()")
    return LoraPart(module.lora_A[adapter].weight, module.lora_B[adapter].weight, module.scaling[adapter])


def _lora_refusal(name: str, why: str) -> ConfigError:
    return ConfigError(f"hosts cannot apply {name}: {why}", hint="use PEFT's plain LoRA")


def prefix_tensors(cache: Cache, config: Any) -> dict[str, torch.Tensor]:
    """Return the keys and values [key heads, n, head size] of every block, float32 on the CPU.
    Gradients flow through them into ``cache``.

    Raises ``ConfigError`` for a cache that is not the same prefix for every row and every block.
    """
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (config.num_key_value_heads, cache.get_seq_length(), head_size)
    if len(cache.layers) != config.num_hidden_layers or shape[1] == 0:
        raise _prefix_refusal(f"a cache of {len(cache.layers)} blocks and {shape[1]} positions")
    tensors = {}
    for block, layer in enumerate(cache.layers):
        for name, values in (("key", layer.keys), ("value", layer.values)):
            if values is None or tuple(values.shape[1:]) != shape:
                found = None if values is None else list(values.shape[1:])
                raise _prefix_refusal(f"its {name}s of block {block} are {found}, not {list(shape)}")
            if not torch.equal(values, values[:1].expand_as(values)):
                raise _prefix_refusal("its rows differ")
            tensors[f"{block}.prefix.{name}"] = values[0].to("cpu", torch.float32)
    return tensors


def _prefix_refusal(why: str) -> ConfigError:
    return ConfigError(
        f"past_key_values is neither a cache of this model nor a prefix for it: {why}",
        hint="leave it out, or use PEFT's PREFIX_TUNING",
    )
