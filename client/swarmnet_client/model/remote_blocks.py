"""The blocks of a model, computed by hosts.

A chain generates. A batch trains: autograd can differentiate it.
"""

import dataclasses
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import torch
from torch.autograd.function import once_differentiable

from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.hops import ChainReport, ChainSpec
from swarmnet_client.chain.passes import RemoteBatch
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_client.hosts.runtime import Runtime
from swarmnet_client.model.client_adapter import ClientAdapter
from swarmnet_protocols.arrays import Array, as_array, as_tensor
from swarmnet_protocols.session.adapters import Adapter

T = TypeVar("T")


class RemoteBlocks:
    """All blocks of one model on one swarm, with the model's own layers (``head.Layers``).

    The caller's thread computes. The network runs on the runtime's own loop.
    """

    def __init__(
        self,
        runtime: Runtime[ModelHosts],
        spec: ChainSpec,
        embed: Callable[[torch.Tensor], torch.Tensor],
        read: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """``embed`` and ``read`` as in ``Chain``, with tensors."""
        self.spec = spec
        self.report = ChainReport()
        """The report of the chain or batch that was used last."""
        self._runtime = runtime
        self._embed: Callable[[Array], Array] = lambda values: as_array(embed(as_tensor(values)))
        self._read: Callable[[Array], Array] = lambda outputs: as_array(read(as_tensor(outputs)).cpu())
        self._adapter: Adapter | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the runtime's loop and wait for it. Raises as ``Runtime.run``."""
        return self._runtime.run(work)

    @torch.no_grad()
    def adapter(self, client_adapter: ClientAdapter) -> Adapter | None:
        """Return the present values of ``client_adapter`` as hosts receive them; None without
        parameters.

        The last adapter is kept, so its parts are hashed only once while its values do not change.
        Raises what ``Adapter`` raises.
        """
        if not client_adapter.pairs and not client_adapter.prefix:
            return None
        if self._adapter is None or not client_adapter.is_in(self._adapter):
            self._adapter = Adapter(client_adapter.tensors())
        return self._adapter

    def open_chain(
        self, max_length: int, adapter: Adapter | None, *, wait_s: float = 0.0
    ) -> AbstractAsyncContextManager[Chain]:
        """Open a chain for sequences of at most ``max_length`` positions. Hosts apply ``adapter``.

        ``wait_s``: longest wait for overloaded hosts; the model's own if that is longer.
        """
        wait_s = max(wait_s, self.spec.wait_s)
        spec = dataclasses.replace(self.spec, max_length=max_length, adapter=adapter, wait_s=wait_s)
        return Chain(self._runtime.opened, spec, self._embed, self._read).open()

    def _batch(self, counts: Sequence[int], adapter: Adapter | None) -> RemoteBatch:
        """Return a batch of sequences of these lengths, for a forward and backward passes."""
        batch = RemoteBatch(self._runtime.opened, dataclasses.replace(self.spec, adapter=adapter), counts)
        self.report = batch.report
        return batch

    @property
    def can_rewind(self) -> bool:
        return True

    def embed(self, ids: Array) -> Array:
        """Return embeddings [P, D] of token ids [P]."""
        return self._embed(ids)

    def logits(self, hidden: Array) -> Array:
        """Return logits [N, V], float32, of outputs [N, D] of the last block."""
        return self._read(hidden)

    async def pass_forward(
        self, inputs: torch.Tensor, counts: Sequence[int], adapter: Adapter | None
    ) -> torch.Tensor:
        """Return hidden states [P, D] of sequences after all blocks with ``adapter``.

        Several calls may run at a time.
        """
        return await self._batch(counts, adapter).forward(inputs)

    def pass_through(
        self,
        hidden_states: torch.Tensor,
        columns: Sequence[tuple[int, int]],
        adapter: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return hidden states [B, n, D] after all blocks.

        Gradients flow back to the inputs and to the tensors of ``adapter``. ``columns``: for each
        row, the columns [first, end) that hold tokens. Padding is not sent, and comes back as
        zeros. Raises the errors of ``Adapter`` and ``RemoteBatch``.
        """
        places = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        bounds = torch.tensor(columns, device=hidden_states.device)
        tokens = (places >= bounds[:, :1]) & (places < bounds[:, 1:])
        counts = [end - first for first, end in columns if end > first]
        if not counts:
            return hidden_states.masked_fill(~tokens[..., None], 0)
        batch = self._batch(counts, Adapter(adapter) if adapter else None)
        tensors = [adapter[name] for name in sorted(adapter)]
        outputs = _Passes.apply(hidden_states[tokens], self, batch, *tensors)  # type: ignore[no-untyped-call]
        return torch.zeros_like(hidden_states).masked_scatter(tokens[..., None], outputs)


class _Passes(torch.autograd.Function):
    """Maps the blocks' inputs [P, D] of all sequences to their outputs [P, D].

    ``tensors`` belong to the adapter, sorted by name. Hosts have copies of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        blocks: RemoteBlocks,
        batch: RemoteBatch,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.blocks, ctx.batch = blocks, batch
        ctx.places = [(tensor.device, tensor.dtype) for tensor in tensors]
        keep_graphs = any(ctx.needs_input_grad)
        outputs: torch.Tensor = blocks.run(
            batch.forward(hidden_states.detach().cpu(), keep_graphs=keep_graphs)
        )
        return outputs.to(hidden_states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input_gradients, by_name = ctx.blocks.run(ctx.batch.backward(gradients.cpu()))
        ordered = [by_name[name] for name in sorted(by_name)]
        return (
            input_gradients.to(gradients),
            None,
            None,
            *(tensor.to(device, dtype) for tensor, (device, dtype) in zip(ordered, ctx.places, strict=True)),
        )
