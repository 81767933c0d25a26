"""The swarm's blocks as a function that autograd differentiates with respect to its inputs."""

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from swarmnet_client.passes import RemoteBatch

if TYPE_CHECKING:
    from swarmnet_client.model import SwarmModel


def run_blocks(
    model: "SwarmModel", hidden_states: torch.Tensor, columns: list[tuple[int, int]]
) -> torch.Tensor:
    """Hidden states [B, n, D] through all blocks of ``model``; gradients flow back to them.

    ``columns`` are those [first, end) of each row that hold tokens; the others are never sent and come back as zeros.
    Raises what ``RemoteBatch`` raises.
    """
    places = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    bounds = torch.tensor(columns, device=hidden_states.device)
    tokens = (places >= bounds[:, :1]) & (places < bounds[:, 1:])
    batch = model.remote_batch([end - first for first, end in columns if end > first])
    outputs = _RemoteBlocks.apply(hidden_states[tokens], model, batch)  # type: ignore[no-untyped-call]
    return torch.zeros_like(hidden_states).masked_scatter(tokens[..., None], outputs)


class _RemoteBlocks(torch.autograd.Function):
    """[P, D] of all sequences together, in and out."""

    @staticmethod
    def forward(
        ctx: Any, hidden_states: torch.Tensor, model: "SwarmModel", batch: RemoteBatch
    ) -> torch.Tensor:
        ctx.model, ctx.batch = model, batch
        keep_graphs: bool = ctx.needs_input_grad[0]
        outputs: torch.Tensor = model.run(
            batch.forward(hidden_states.detach().cpu(), keep_graphs=keep_graphs)
        )
        return outputs.to(hidden_states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        found: torch.Tensor = ctx.model.run(ctx.batch.backward(gradients.cpu()))
        return found.to(gradients), None, None
