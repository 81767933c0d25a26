"""A transformers model whose blocks run in the swarm.

It is the architecture's own CausalLM with embeddings, norm and head from the checkpoint, and one layer: the swarm. So
``generate()`` with its samplers, beams, streamers and stopping criteria, the scaling of embeddings, soft caps on logits
and the loss are transformers' own code.
"""

import functools
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionMaskInterface

from swarmnet_client.autograd import run_blocks
from swarmnet_client.cache import NewPositions, SwarmCache
from swarmnet_client.chain import Chain, ChainReport
from swarmnet_client.hops import ChainSpec
from swarmnet_client.passes import RemoteBatch
from swarmnet_client.runtime import Runtime
from swarmnet_client.swarm import Swarm
from swarmnet_protocols.devices import pick_device, pick_dtype
from swarmnet_protocols.errors import ConfigError, Unreachable
from swarmnet_protocols.models import LocalModel, resolve
from swarmnet_protocols.network import Network, connect
from swarmnet_protocols.timing import Timing

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IMPLEMENTATION = "swarmnet_remote"
"""The name under which transformers is told to build no attention mask: the hosts know what attends to what."""


@dataclass
class _Call:
    """What one forward tells the remote layer besides hidden states.

    ``is_alone``: nothing came before in this cache and nothing will come after. ``is_training``: it is a training step, even
    if nothing before the blocks learns.
    """

    model: "SwarmModel"
    cache: SwarmCache
    ids: torch.Tensor | None
    new: NewPositions
    is_alone: bool
    is_training: bool


class RemoteLayer(torch.nn.Module):
    """Stands where the decoder layers would: hidden states [B, n, D] go to the swarm and come back."""

    def forward(
        self, hidden_states: torch.Tensor, *, swarm_call: _Call, position_ids: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        call = swarm_call
        if torch.is_grad_enabled() and (hidden_states.requires_grad or call.is_training):
            if not call.is_alone:
                raise ValueError("gradients do not flow through a session: leave out past_key_values")
            _check_positions(position_ids, call.new.columns)
            return run_blocks(call.model, hidden_states, call.new.columns)
        inputs = hidden_states if call.ids is None else call.ids
        output = call.cache.extend(inputs, call.new)
        call.model.last_run = call.cache.report
        return output.to(hidden_states)


class SwarmModel:
    """What a swarm model has besides what its architecture has in transformers. Made by ``wrap``."""

    tokenizer: Any
    config: Any
    generate: Any
    _runtime: Runtime
    _spec: ChainSpec
    _session: SwarmCache | None
    last_run: ChainReport

    def run(self, conversation: Any) -> Any:
        """Run a coroutine on the client's loop."""
        return self._runtime.run(conversation)

    def open_chain(self, max_length: int) -> AbstractAsyncContextManager[Chain]:
        """A chain whose lanes may reach ``max_length`` positions."""
        spec = ChainSpec(self._spec.blocks, self._spec.hidden_size, max_length, self._spec.wire)
        return Chain.open(self._runtime.swarm, spec, self._embed)

    def remote_batch(self, counts: Sequence[int]) -> RemoteBatch:
        """A batch of sequences of these lengths that gradients are wanted of. ``last_run`` tells from now on what happens to it."""
        batch = RemoteBatch(self._runtime.swarm, self._spec, counts)
        self.last_run = batch.report
        return batch

    @contextmanager
    def session(self, *, max_length: int | None = None) -> Iterator[SwarmCache]:
        """Keep the KV caches in the swarm between calls.

        Inside, ``generate`` takes whole conversations: what it shares with the one before is not computed again. ``max_length``
        is the longest a row may get (default: the model's context).
        """
        if self._session is not None:
            raise ConfigError("sessions do not nest", hint="end the outer session first")
        with SwarmCache(self, max_length=max_length or self._spec.max_length) as cache:
            self._session = cache
            try:
                yield cache
            finally:
                self._session = None

    def close(self) -> None:
        """Leave the swarm; idempotent."""
        self._runtime.close()

    def __enter__(self) -> "SwarmModel":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @torch.inference_mode()
    def _embed(self, values: torch.Tensor) -> torch.Tensor:
        """Logged inputs as the first hop takes them: ids [P] are looked up, embeddings [P, D] are themselves."""
        if values.is_floating_point():
            return values
        model: Any = self
        embedded: torch.Tensor = model.get_input_embeddings()(values.to(model.device))
        return embedded.cpu()

    def _columns(
        self, mask: torch.Tensor | None, batch: int, length: int, width: int
    ) -> list[tuple[int, int]]:
        """For each row the columns [first, end) that hold tokens. Raises ``ValueError`` for a mask with holes."""
        total = length + width
        if mask is None:
            return [(0, total)] * batch
        if mask.dim() != 2 or mask.shape[1] < total:
            raise ValueError(
                f"an attention mask [{batch}, {total}] is needed, this one is {list(mask.shape)}"
            )
        columns = []
        for row in mask[:, :total].bool().tolist():
            first = row.index(True) if True in row else total
            end = total - row[::-1].index(True) if True in row else total
            if not all(row[first:end]) or (length and end < total):
                raise ValueError("padding must be on the left of the tokens: tokenizer.padding_side = 'left'")
            columns.append((first, end))
        return columns


def wrap(local: LocalModel, runtime: Runtime, *, dtype: torch.dtype, device: torch.device) -> SwarmModel:
    """The swarm model over ``local``'s embeddings and head: an instance of its architecture's CausalLM."""
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
    model: Any = local.load_edges(RemoteLayer(), dtype=dtype, device=device)
    model.config._attn_implementation = IMPLEMENTATION
    model.__class__ = _swarm_class(type(model))
    model.tokenizer = local.tokenizer()
    if model.tokenizer.pad_token_id is None:
        model.tokenizer.pad_token_id = model.tokenizer.eos_token_id
    model.tokenizer.padding_side = "left"
    model._runtime = runtime
    model._spec = ChainSpec(local.manifest.blocks, local.manifest.hidden_size, local.max_positions, dtype)
    model._session = None
    model.last_run = ChainReport()
    wrapped: SwarmModel = model
    return wrapped


def load(
    name: str,
    *,
    network: Network,
    cache_dir: Path,
    dtype: str = "auto",
    device: str = "auto",
) -> "SwarmModel":
    """The model ``name`` on the swarm that ``network`` leads to.

    Raises ``ConfigError`` or ``IntegrityError`` for a model that will not do, ``Unreachable`` when no bootstrap is given or
    answers, and ``NotAuthorised`` when the swarm does not let us in.
    """
    if not network.bootstrap:
        raise Unreachable(
            "nobody to ask where the swarm is", hint="give the address that a node prints: --bootstrap ADDR"
        )
    place = pick_device(device)
    local = resolve(name, cache_dir=cache_dir)
    network.rules.check_model(local.name, local.manifest.hash)
    runtime = Runtime(lambda: _connect(local.manifest.hash, network))
    try:
        return wrap(local, runtime, dtype=pick_dtype(dtype, place), device=place)
    except BaseException:
        runtime.close()
        raise


@asynccontextmanager
async def _connect(manifest: bytes, network: Network) -> AsyncIterator[Swarm]:
    """A client's own place on the network: nothing is served there."""
    async with (
        connect(network, client_mode=True) as (transport, directory),
        Swarm.watch(transport, directory, manifest, rng=random.SystemRandom(), timing=Timing()) as watched,
    ):
        yield watched


def _check_positions(position_ids: torch.Tensor, columns: list[tuple[int, int]]) -> None:
    """Hosts number the tokens of a sequence one after another: raise ``ValueError`` for numbers [B or 1, n] that do not."""
    for row, (first, end) in zip(position_ids.expand(len(columns), -1), columns, strict=True):
        if not bool((row[first:end].diff() == 1).all()):
            raise ValueError("position_ids must number the tokens of a row one after another")


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _swarm_class(base: "type[PreTrainedModel]") -> type:
    """The architecture's class with our ``forward`` and ``generate`` in front of its own."""
    architecture: Any = base

    @functools.wraps(architecture.forward)
    def forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: SwarmCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("give input_ids or inputs_embeds")
        is_alone = past_key_values is None
        batch, width = given.shape[:2]
        keep = logits_to_keep if isinstance(logits_to_keep, int) and logits_to_keep else width
        ids = input_ids.cpu() if input_ids is not None else None
        is_training = self.training and kwargs.get("labels") is not None
        kwargs.pop("use_cache", None)
        with ExitStack() as stack:
            cache = past_key_values
            if cache is None:
                cache = stack.enter_context(SwarmCache(self, max_length=self._spec.max_length))
            columns = self._columns(attention_mask, batch, cache.get_seq_length(), width)
            new = NewPositions(columns, min(keep, width))
            output = architecture.forward(
                self,
                input_ids=input_ids,
                past_key_values=cache,
                inputs_embeds=inputs_embeds,
                logits_to_keep=logits_to_keep,
                use_cache=True,
                swarm_call=_Call(self, cache, ids, new, is_alone, is_training),
                **kwargs,
            )
        if is_alone:
            output.past_key_values = None
        return output

    @functools.wraps(architecture.generate)
    def generate(self: Any, inputs: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is not None:
            return architecture.generate(self, inputs, *args, **kwargs)
        if self._session is not None:
            ids = inputs if inputs is not None else kwargs.get("input_ids")
            _rewind(self._session, ids)
            return architecture.generate(self, inputs, *args, past_key_values=self._session, **kwargs)
        with SwarmCache(self, max_length=self._spec.max_length) as cache:
            return architecture.generate(self, inputs, *args, past_key_values=cache, **kwargs)

    namespace = {"forward": forward, "generate": generate, "__module__": __name__}
    return type(f"Swarm{base.__name__}", (SwarmModel, base), namespace)


def _rewind(cache: SwarmCache, ids: torch.Tensor | None) -> None:
    """Go back to the longest prefix that ``ids`` [B, n] shares with what the session holds, short of its last column."""
    shared = 0
    if ids is not None and cache.tokens is not None and len(ids) == len(cache.tokens):
        width = min(ids.shape[1] - 1, cache.tokens.shape[1])
        differ = (ids[:, :width].cpu() != cache.tokens[:, :width]).any(dim=0).nonzero()
        shared = int(differ[0]) if len(differ) else width
    cache.rewind(shared)
