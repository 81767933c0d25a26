"""A shared subspace: new models whose stages send k numbers a token instead of the hidden size.

This is ReparamSSN of Pluralis' Agora and ProtocolNanoGPT:

- U [D, k], orthonormal columns, and a frozen table T [V, D] come from the job's seed, so nobody
  sends them.
- Every output projection of attention and every second matrix of an MLP is U Z with a trained Z
  [k, in]. The embedding of a token is U e + T[token] with a trained e [k].
- So the residual stream x of a token stays in T[token] + span(U). A boundary carries
  c = U^T (x - T[token]) and the token's id. The gradient of c is exact.

Final norm and output head stay whole. They are in the stage that also embeds, so every boundary
carries k numbers. ``Subspace.fold`` returns the weights of an ordinary model.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from swarmnet_node.training.model.initial_weights import draw_weights
from swarmnet_protocols.training.job_settings import JobError, StagesSection

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose blocks only add these two matrices' outputs to the residual stream."""

_MATRICES = ("self_attn.o_proj", "mlp.down_proj")
"""The matrices whose outputs are added to the residual stream."""
_EMBEDDING = "embed_tokens"
_TABLE_DEVIATION = 0.02
"""Standard deviation of T, as of other initial embeddings."""


class Subspace(nn.Module):
    """U and T of a job."""

    basis: Tensor
    table: Tensor

    def __init__(self, *, hidden_size: int, vocab_size: int, rank: int, seed: int) -> None:
        super().__init__()
        self.rank = rank
        generator = torch.Generator().manual_seed(seed)
        columns = torch.randn(hidden_size, rank, generator=generator)
        table = torch.randn(vocab_size, hidden_size, generator=generator) * _TABLE_DEVIATION
        self.register_buffer("basis", torch.linalg.qr(columns).Q.contiguous(), persistent=False)
        self.register_buffer("table", table, persistent=False)

    def project(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return c [..., k] of the residual stream ``hidden`` [..., D] of tokens ``ids`` [...]."""
        return (hidden - F.embedding(ids, self.table)) @ self.basis

    def restore(self, sent: Tensor, ids: Tensor) -> Tensor:
        """Return the residual stream [..., D] of tokens ``ids`` [...] from c [..., k]."""
        return F.linear(sent, self.basis) + F.embedding(ids, self.table)

    def fold(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of an ordinary model from parameters ``named`` of one in this
        subspace."""
        folded = dict(named)
        for name, weight in named.items():
            module = name.removesuffix(".weight")
            if module.endswith(_MATRICES):
                folded[name] = self.basis @ weight
            elif module.endswith(_EMBEDDING):
                folded[name] = F.linear(weight, self.basis) + self.table
        return folded


class SubspaceLinear(nn.Linear):
    """The product with U Z; its weight is Z [k, in]."""

    def __init__(self, subspace: Subspace, replaced: nn.Linear) -> None:
        super().__init__(replaced.in_features, subspace.rank, bias=False, device=replaced.weight.device)
        self.subspace = subspace

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(super().forward(input), self.subspace.basis)


class SubspaceEmbedding(nn.Embedding):
    """Embeddings U e + T[token]; its weight has the rows e."""

    def __init__(self, subspace: Subspace, replaced: nn.Embedding) -> None:
        super().__init__(replaced.num_embeddings, subspace.rank, device=replaced.weight.device)
        self.subspace = subspace

    def forward(self, input: Tensor) -> Tensor:
        return self.subspace.restore(super().forward(input), input)


def enter_subspace(
    drawer: Any, modules: Iterable[tuple[str, nn.Module]], *, rank: int, seed: int
) -> Subspace:
    """Give new ``modules`` the parameters of a subspace of dimension ``rank``, and return it.

    ``modules``: all of a model or of a stage, with their names in the whole model. ``drawer``: as
    in ``draw_weights``. ``check_subspace`` has checked its config.
    """
    config = drawer.config
    subspace = Subspace(hidden_size=config.hidden_size, vocab_size=config.vocab_size, rank=rank, seed=seed)
    known = list(modules)
    places = {child: (module, key) for _, module in known for key, child in module.named_children()}
    for name, module in known:
        entered: nn.Module
        if name.endswith(_MATRICES) and isinstance(module, nn.Linear):
            entered = SubspaceLinear(subspace, module)
        elif name.endswith(_EMBEDDING) and isinstance(module, nn.Embedding):
            entered = SubspaceEmbedding(subspace, module)
        else:
            continue
        draw_weights(drawer, [(name, entered)], seed)
        setattr(*places[module], entered)
    return subspace


def numbers_in_subspace(name: str, parameter: Tensor, stages: StagesSection, hidden_size: int) -> int:
    """Return how many values of a parameter of the whole model a job with ``stages`` trains."""
    is_replaced = name.removesuffix(".weight").endswith((*_MATRICES, _EMBEDDING))
    if stages.subspace is None or not is_replaced:
        return parameter.numel()
    return parameter.numel() // hidden_size * stages.subspace


def check_subspace(stages: StagesSection, config: Any) -> None:
    """Raise ``JobError`` for a model that would leave the subspace of the job's stages."""
    if stages.subspace is None:
        return
    if config.model_type not in FAMILIES:
        why = f"needs a model of another type than {config.model_type!r}: {', '.join(FAMILIES)}"
    elif config.tie_word_embeddings:
        why = "needs an output head of its own: set tie_word_embeddings = false in [model.config]"
    elif getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False):
        why = "needs matrices without biases: remove attention_bias and mlp_bias from [model.config]"
    elif stages.subspace >= config.hidden_size:
        why = f"must be less than the hidden size, {config.hidden_size}"
    else:
        return
    raise JobError("stages", "subspace", why, hint="correct it, or remove subspace")
