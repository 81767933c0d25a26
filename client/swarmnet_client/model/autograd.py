"""The remote blocks as a function that autograd differentiates, with respect to its inputs and the client's adapter."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from swarmnet_client.chain.passes import RemoteBatch
from swarmnet_client.model.remote_blocks import RemoteBlocks
from swarmnet_protocols.session.adapters import Adapter


def run_blocks(
    blocks: RemoteBlocks,
    hidden_states: torch.Tensor,
    columns: list[tuple[int, int]],
    adapter: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Hidden states [B, n, D] through all blocks; gradients flow back to them and to the tensors of ``adapter``.

    ``columns`` are the [first, end) of each row that hold tokens; padding is not sent and comes back as zeros.
    Raises what ``Adapter`` and ``RemoteBatch`` raise.
    """
    places = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    bounds = torch.tensor(columns, device=hidden_states.device)
    tokens = (places >= bounds[:, :1]) & (places < bounds[:, 1:])
    counts = [end - first for first, end in columns if end > first]
    if not counts:
        return hidden_states.masked_fill(~tokens[..., None], 0)
    batch = blocks.batch(counts, Adapter(adapter) if adapter else None)
    tensors = [adapter[name] for name in sorted(adapter)]
    outputs = _Passes.apply(hidden_states[tokens], blocks, batch, *tensors)  # type: ignore[no-untyped-call]
    return torch.zeros_like(hidden_states).masked_scatter(tokens[..., None], outputs)


class _Passes(torch.autograd.Function):
    """Hidden states [P, D] of all sequences, in and out. ``tensors`` are the adapter's, sorted by name; hosts have copies."""

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
