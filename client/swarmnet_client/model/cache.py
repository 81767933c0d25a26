"""transformers' KV cache for a model whose keys and values are on the hosts.

The client only records which positions the hosts hold.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.hops import ChainReport
from swarmnet_client.model.client_adapter import ClientAdapter
from swarmnet_client.model.padding import Unpadded
from swarmnet_client.model.remote_blocks import RemoteBlocks
from swarmnet_protocols.arrays import as_array, as_tensor
from swarmnet_protocols.session.adapters import Adapter
from swarmnet_protocols.session.steps import Row


@dataclass(frozen=True)
class NewPositions:
    """The positions of one forward.

    - ``columns``: the [first, end) of each row that hold tokens.
    - ``outputs``: number of columns at the end that need outputs.
    - ``unpadded``: removes the holes of the batch first; None for a batch without holes.
    """

    columns: list[tuple[int, int]]
    outputs: int
    unpadded: Unpadded | None = None


class SwarmCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """The sequences of one chain, one for each row of the batch. Left padding is not sent.

    Supports the operations of a cache that ``generate`` uses: length, beam reordering, cropping.
    Columns do not include a prefix.
    """

    def __init__(self, blocks: RemoteBlocks, *, max_length: int, is_temporary: bool = False) -> None:
        """``is_temporary``: for one forward, which may be a training step."""
        super().__init__(layers=[])
        self._is_temporary = is_temporary
        self._blocks = blocks
        self._max_length = max_length
        self._stack = AsyncExitStack()
        self._chain: Chain | None = None
        self._length = 0
        self._sequences: list[int] = []
        self._firsts: list[int] = []
        self._client_adapter: ClientAdapter | None = None
        self._version: tuple[object, ...] = ()
        self._adapter: Adapter | None = None
        self._is_checked = False
        self._are_ids = True
        self.tokens: torch.Tensor | None = None

    # ---- the interface of transformers ----------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns in the cache, with padding."""
        return self._length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._length + query_length, 0

    @property
    def max_cache_len(self) -> int:
        return self._max_length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the rows: row i continues the former row ``beam_idx[i]``."""
        order = beam_idx.tolist()
        self._sequences = [self._sequences[index] for index in order]
        self._firsts = [self._firsts[index] for index in order]
        if self.tokens is not None:
            self.tokens = self.tokens[beam_idx]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` columns. Raises ``ValueError`` for a positive
        number, as transformers does."""
        if tokens_to_remove > 0:
            raise ValueError("tokens_to_remove is a negative number")
        self.rewind(self._length + tokens_to_remove)

    def rewind(self, length: int) -> None:
        """Go back to the first ``length`` columns."""
        if not 0 <= length <= self._length:
            raise ValueError(f"cannot go to position {length} of {self._length}")
        self.recheck_adapter()
        self.truncate(length)

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` columns. Unlike ``rewind``, expect the same adapter:
        ``generate`` calls this."""
        self._length = length
        if self.tokens is not None:
            self.tokens = self.tokens[:, :length]

    @property
    def batch_size(self) -> int:
        return len(self._sequences) or -1

    # ---- the swarm ------------------------------------------------------------------------------

    @property
    def takes_embeddings(self) -> bool:
        """True if the session began with embeddings, and so must continue with them."""
        return self._length > 0 and not self._are_ids

    def recheck_adapter(self) -> None:
        """Compare the adapter's values before the next columns."""
        self._is_checked = False

    @property
    def checked_adapter(self) -> ClientAdapter | None:
        """The adapter of the sequences, if it was checked that the next columns use it; else
        None."""
        return self._client_adapter if self._is_checked else None

    @property
    def prefix_positions(self) -> int:
        """Positions of the adapter's prefix, before the first column of every sequence."""
        return self._adapter.prefix_positions if self._adapter is not None else 0

    @property
    def report(self) -> ChainReport:
        return self._chain.report if self._chain is not None else ChainReport()

    def compute(
        self,
        hidden_states: torch.Tensor,
        *,
        ids: torch.Tensor | None,
        new: NewPositions,
        client_adapter: ClientAdapter,
        learns: bool,
    ) -> torch.Tensor:
        """Return hidden states [B, n, D] after all blocks. The placeholder of block 0 calls this.

        Without gradients, the inputs extend the cache: ``ids`` [B, n] if given, unless the cache
        holds embeddings. With gradients (``learns``, or ``hidden_states`` requires them), they go
        through passes.

        Raises ``ValueError`` for gradients through a cache that outlives this forward, and what
        ``extend`` and ``RemoteBlocks.pass_through`` raise.
        """
        states = hidden_states if new.unpadded is None else new.unpadded.close(hidden_states)
        if torch.is_grad_enabled() and (states.requires_grad or learns):
            if not self._is_temporary:
                raise ValueError("gradients do not flow through a session: leave out past_key_values")
            outputs = self._blocks.pass_through(states, new.columns, client_adapter.tensors())
        else:
            inputs = states if ids is None or self.takes_embeddings else ids
            outputs = self.extend(inputs, new, client_adapter).to(states)
            self._blocks.report = self.report
        return outputs if new.unpadded is None else new.unpadded.open(outputs)

    def extend(self, inputs: torch.Tensor, new: NewPositions, client_adapter: ClientAdapter) -> torch.Tensor:
        """Compute the columns [B, n] (ids) or [B, n, D] (embeddings); return hidden states [B, n,
        D].

        Only the last ``new.outputs`` columns are filled in; padding and other columns are zero.
        Raises ``ValueError`` if the cached columns were computed with another adapter than
        ``client_adapter``. The cache and ``new`` must both have ids, or both embeddings.

        Autograd does not count changes by fused optimizers. Such a change is noticed at the next
        call with more than one column, or after ``rewind``.
        """
        batch, width = inputs.shape[:2]
        self._use_adapter(client_adapter, are_ids=inputs.dim() == 2, is_token=width == 1)
        if not self._sequences:
            self._sequences = list(range(batch))
        if self._length == 0:
            self._firsts = [first for first, _ in new.columns]
        if batch != len(self._sequences):
            raise ValueError(f"{batch} rows in a session of {len(self._sequences)}")
        held = self._chain.lengths if self._chain is not None else {}
        rows, values, places = [], [], []
        for index, (first, end) in enumerate(new.columns):
            begin = max(first, self._length)
            if end <= begin:
                continue
            start = begin - self._firsts[index]
            wanted = max(0, min(end - begin, end - (self._length + width - new.outputs)))
            source = self._sequences[index]
            rewrite = source != index or start != held.get(index, 0)
            rows.append(Row(index, start, end - begin, wanted, source, rewrite))
            values.append(inputs[index, begin - self._length : end - self._length])
            places.append((index, end - self._length - wanted, end - self._length))
        if rows:
            hidden = self._blocks.run(self._send(tuple(rows), torch.cat(values)))
        else:  # only padding
            hidden = torch.zeros(0, self._blocks.spec.hidden_size)
        self._sequences = list(range(batch))
        self._remember(inputs)
        self._length += width
        filled = torch.zeros(batch, width, hidden.shape[-1], dtype=hidden.dtype)
        taken = 0
        for index, begin, end in places:
            filled[index, begin:end] = hidden[taken : taken + end - begin]
            taken += end - begin
        return filled

    def close(self) -> None:
        """Free the caches in the swarm; idempotent."""
        self._blocks.run(self._stack.aclose())

    def _use_adapter(self, client_adapter: ClientAdapter, *, are_ids: bool, is_token: bool) -> None:
        """Check that the sequences take inputs of this kind and use ``client_adapter``.

        Empty sequences are opened again with this adapter.
        """
        if client_adapter is self._client_adapter and self._is_checked and self._are_ids == are_ids:
            return
        if self._client_adapter is not None:
            is_same = self._is_in_use(client_adapter, is_token=is_token)
            if is_same and self._are_ids == are_ids:
                return
            if self._length:
                raise ValueError(
                    "the adapter has changed since this session began: start a new one"
                    if not is_same
                    else "a session that began with ids continues with ids, and one that began with embeddings with embeddings"
                )
            self.close()
            self._chain, self._sequences = None, []
        self._client_adapter, self._are_ids, self._version = (
            client_adapter,
            are_ids,
            client_adapter.version,
        )
        self._adapter, self._is_checked = self._blocks.adapter(client_adapter), True

    def _is_in_use(self, client_adapter: ClientAdapter, *, is_token: bool) -> bool:
        """Return whether the sequences use ``client_adapter``. For one token, only versions are
        compared.

        A prefix comes only with the first call.
        """
        if client_adapter.prefix or (self.prefix_positions and not self._length):
            return False
        if client_adapter.version != self._version:
            return False
        if not (is_token and self._is_checked):
            self._is_checked = ClientAdapter(
                client_adapter.pairs, self._client_adapter.prefix if self._client_adapter else {}
            ).is_in(self._adapter)
        return self._is_checked

    def _remember(self, inputs: torch.Tensor) -> None:
        """Keep the tokens of all columns, as long as all columns are tokens."""
        known = inputs[:, :0] if self._length == 0 else self.tokens
        self.tokens = torch.cat([known, inputs], dim=1) if inputs.dim() == 2 and known is not None else None

    async def _send(self, rows: tuple[Row, ...], values: torch.Tensor) -> torch.Tensor:
        if self._chain is None:
            self._chain = await self._stack.enter_async_context(
                self._blocks.open_chain(self._max_length, self._adapter)
            )
        return as_tensor(await self._chain.forward(rows, as_array(values)))

    def __enter__(self) -> "SwarmCache":
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
