"""The blocks of a model, computed by hosts: chains for generating, batches for training."""

import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import torch

from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.hops import ChainReport, ChainSpec
from swarmnet_client.chain.passes import RemoteBatch
from swarmnet_client.model.client_adapter import AdapterMaker, ClientAdapter
from swarmnet_client.swarm.runtime import Runtime
from swarmnet_protocols.session.adapters import Adapter

T = TypeVar("T")


class RemoteBlocks:
    """All blocks of one model on one swarm. The caller's thread computes; the network is on the runtime's own loop."""

    def __init__(
        self, runtime: Runtime, spec: ChainSpec, embed: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """``embed`` turns logged inputs ([P] token ids, or embeddings [P, D]) into embeddings [P, D]."""
        self.spec = spec
        self.report = ChainReport()
        """The report of the chain or batch that was used last."""
        self._runtime = runtime
        self._embed = embed
        self._adapters = AdapterMaker()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the runtime's loop and wait for it. Raises as ``Runtime.run``."""
        return self._runtime.run(work)

    def adapter(self, parameters: ClientAdapter) -> Adapter | None:
        """``parameters`` with their present values, as hosts receive them; None if there are none."""
        return self._adapters.adapter(parameters)

    def open_chain(self, max_length: int, adapter: Adapter | None) -> AbstractAsyncContextManager[Chain]:
        """A chain for sequences of at most ``max_length`` positions, to which hosts apply ``adapter``."""
        spec = dataclasses.replace(self.spec, max_length=max_length, adapter=adapter)
        return Chain.open(self._runtime.swarm, spec, self._embed)

    def batch(self, counts: Sequence[int], adapter: Adapter | None) -> RemoteBatch:
        """A batch of sequences of these lengths, for a forward and backward passes."""
        batch = RemoteBatch(self._runtime.swarm, dataclasses.replace(self.spec, adapter=adapter), counts)
        self.report = batch.report
        return batch
