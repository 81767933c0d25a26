"""The client's own parameters inside the blocks: LoRA pairs and a prefix, as they are during one forward."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from swarmnet_client.model import lora
from swarmnet_client.model.placeholders import Placeholder
from swarmnet_protocols.session.adapters import Adapter


@dataclass(frozen=True)
class ClientAdapter:
    """Parameters that hosts apply to this client's tokens. ``prefix`` is as ``prefix.tensors_of`` returns it, or empty."""

    pairs: lora.Pairs = field(default_factory=dict)
    prefix: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def found(cls, layers: Iterable[Placeholder], prefix: Mapping[str, torch.Tensor]) -> "ClientAdapter":
        """The active parameters. Raises ``ConfigError`` for an adapter that hosts cannot apply."""
        return cls(lora.active_pairs(layers), prefix)

    @property
    def learns(self) -> bool:
        """Whether any of them requires gradients."""
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
        """All of them as tensors of an adapter, part of their parameters' autograd graph."""
        return {**lora.tensors_of(self.pairs), **self.prefix}

    @torch.no_grad()
    def is_in(self, adapter: Adapter | None) -> bool:
        """Whether ``adapter`` has exactly these values."""
        tensors = self.tensors()
        known = {} if adapter is None else adapter.tensors
        return tensors.keys() == known.keys() and all(
            torch.equal(tensors[name], known[name]) for name in tensors
        )


class AdapterMaker:
    """Makes adapters, and keeps the last one: its parts are hashed once while its values do not change."""

    def __init__(self) -> None:
        self._last: Adapter | None = None

    @torch.no_grad()
    def adapter(self, client_adapter: ClientAdapter) -> Adapter | None:
        """The adapter with the present values of ``client_adapter``; None if it has no parameters. Raises what ``Adapter`` raises."""
        if not client_adapter.pairs and not client_adapter.prefix:
            return None
        if self._last is None or not client_adapter.is_in(self._last):
            self._last = Adapter(client_adapter.tensors())
        return self._last
