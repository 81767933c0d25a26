"""A transformers model whose blocks run on hosts.

It is the architecture's own CausalLM, with embeddings, norm and head from the checkpoint and
placeholders as layers. So these are transformers' own code: ``generate()`` with its samplers,
beams, streamers and stopping criteria, the scaling of embeddings, soft caps on logits, and the
loss.

A forward goes through these steps:

1. ``forward`` of the swarm class reads the attention mask and finds the client's adapter, then
   calls the architecture's own ``forward``.
2. That embeds the inputs and calls the layers. The placeholder of block 0 calls
   :meth:`SwarmCache.compute`; the others return their inputs.
3. :meth:`SwarmCache.compute` sends new positions down a chain, or, if gradients are wanted, whole
   sequences through passes (:meth:`RemoteBlocks.pass_through`).
4. The architecture applies norm and head to the outputs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache

from swarmnet_client.chain.hops import ChainReport
from swarmnet_client.chain.trace import Trace, tracing
from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_client.hosts.runtime import Runtime
from swarmnet_client.hosts.traffic import Traffic
from swarmnet_client.model.cache import NewPositions, SwarmCache
from swarmnet_client.model.client_adapter import ClientAdapter, prefix_tensors
from swarmnet_client.model.drafts.draft_model import DraftModel
from swarmnet_client.model.drafts.speculation import StepTimes
from swarmnet_client.model.drafts.speculative_decoding import SpeculativeDecoding, may_speculate
from swarmnet_client.model.load_options import LoadOptions, memory_notice
from swarmnet_client.model.local_layers import load_local_layers, logits
from swarmnet_client.model.padding import Unpadded, check_positions, read_mask
from swarmnet_client.model.remote_blocks import RemoteBlocks
from swarmnet_protocols.errors import ConfigError, Unreachable
from swarmnet_protocols.joining.network import Network
from swarmnet_protocols.joining.without_hub import resolve_in_swarm
from swarmnet_protocols.models import LocalModel
from swarmnet_protocols.models.partial_model import embed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SwarmModel:
    """The attributes and methods that a swarm model adds to its architecture. Made by ``wrap``."""

    tokenizer: Any
    config: Any
    generation_config: Any
    generate: Any
    blocks: RemoteBlocks
    _runtime: Runtime[ModelHosts]
    _session: SwarmCache | None
    _generating: SwarmCache | None
    _step_times: StepTimes
    """Times of decode steps. They decide how long drafts are."""
    _draft_model: DraftModel | None
    _closing: ExitStack

    def run(self, work: Any) -> Any:
        """Run a coroutine on the client's event loop and wait for it."""
        return self.blocks.run(work)

    @property
    def last_run(self) -> ChainReport:
        """The report of the chain or batch that was used last."""
        return self.blocks.report

    @property
    def traffic(self) -> Traffic:
        """Bytes sent to and received from hosts since the model was opened."""
        return self._runtime.opened.traffic

    @contextmanager
    def session(self, *, max_length: int | None = None) -> Iterator[SwarmCache]:
        """Keep the KV caches in the swarm between calls.

        While the context is open, ``generate`` takes whole conversations, and computes only the
        part after what is in the cache. ``max_length``: most positions of a row (default: the
        model's context).
        """
        if self._session is not None:
            raise ConfigError("sessions do not nest", hint="end the outer session first")
        with SwarmCache(self.blocks, max_length=max_length or self.blocks.spec.max_length) as cache:
            self._session = cache
            try:
                yield cache
            finally:
                self._session = None

    @contextmanager
    def trace(self, path: str | Path) -> Iterator[Trace]:
        """Trace every step in this context across all hops. When the context ends, write the trace
        to a file.

        Perfetto (ui.perfetto.dev) and chrome://tracing show such files. Sessions that were opened
        before are not traced. Raises ``OSError`` if the file cannot be written.
        """
        spec = self.blocks.spec
        with tracing(path) as trace:
            self.blocks.spec = dataclasses.replace(spec, trace=trace.keep)
            try:
                yield trace
            finally:
                self.blocks.spec = spec

    def close(self) -> None:
        """Leave the swarm; idempotent."""
        self._closing.close()

    def __enter__(self) -> "SwarmModel":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @torch.inference_mode()
    def _embed(self, values: torch.Tensor) -> torch.Tensor:
        """Return embeddings [P, D] of logged inputs: of ids [P], or embeddings [P, D] unchanged."""
        if values.is_floating_point():
            return values
        model: Any = self
        return embed(model, values.to(model.device)).cpu()


def wrap(local: LocalModel, runtime: Runtime[ModelHosts], options: LoadOptions) -> SwarmModel:
    """Return a swarm model with the embeddings and the head of ``local``. It is an instance of its
    architecture's class.

    The head of a classifier is initialised at random if the checkpoint has none.
    """
    model: Any = load_local_layers(local, options)
    architecture: Any = type(model)
    model.__class__ = _swarm_class(architecture)
    model.tokenizer = local.tokenizer()
    model.generation_config.eos_token_id = [*local.end_ids(model.tokenizer)] or None
    if model.tokenizer.pad_token_id is None:
        model.tokenizer.pad_token_id = model.tokenizer.eos_token_id
    model.tokenizer.padding_side = "left"
    # a classifier looks for the last token that is not padding
    if model.config.pad_token_id is None:
        model.config.pad_token_id = model.tokenizer.pad_token_id
    model._runtime = runtime
    read = functools.partial(logits, model, architecture.forward)
    model.blocks = RemoteBlocks(runtime, options.chain_spec(local), model._embed, read)
    model._session = None
    model._generating = None
    model._step_times = StepTimes()
    model._draft_model = None
    model._closing = ExitStack()
    model._closing.callback(runtime.close)
    wrapped: SwarmModel = model
    return wrapped


def load(
    name: str,
    *,
    network: Network,
    cache_dir: Path,
    options: LoadOptions,
    max_disk_bytes: int | None = None,
    notice: Callable[[str], None] = lambda text: None,
) -> SwarmModel:
    """Open the model ``name`` on the swarm of ``network``. ``max_disk_bytes``: as for ``resolve``.

    ``notice`` hears if embeddings and head take more memory than in the file, before they are
    loaded.

    Raises ``ConfigError`` or ``IntegrityError`` for a model that cannot be used, ``Unreachable`` if
    no bootstrap peer is given or answers, and ``NotAuthorised`` if the swarm does not admit this
    client.
    """
    if not network.peer.bootstrap and not network.mdns:
        raise Unreachable(
            "no bootstrap peer is known", hint="give the address that a node prints: --bootstrap ADDR"
        )
    local = resolve_in_swarm(name, lambda: network, cache_dir=cache_dir, max_disk_bytes=max_disk_bytes)
    if text := memory_notice(local, options):
        notice(text)
    runtime = Runtime(lambda: ModelHosts.connect(local, network))
    try:
        model = wrap(local, runtime, options)
        if options.draft:
            model._draft_model = DraftModel.load(local, options)
            model._closing.callback(model._draft_model.close)
        return model
    except BaseException:
        runtime.close()
        raise


def _swarm_class(base: "type[PreTrainedModel]") -> type:
    """Return a subclass of the architecture's class. Its ``forward`` uses the swarm, and so does
    ``generate`` if there is one."""
    architecture: Any = base

    @functools.wraps(architecture.forward)
    def forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        input_ids, inputs_embeds = _placed(input_ids, self.device), _placed(inputs_embeds, self.device)
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("give input_ids or inputs_embeds")
        batch, width = given.shape[:2]
        wanted = kwargs.get("logits_to_keep")
        keep = wanted if isinstance(wanted, int) and wanted else width
        is_training = self.training and kwargs.get("labels") is not None
        kwargs.pop("use_cache", None)
        wants_dict = kwargs.pop("return_dict", None)
        prefix: dict[str, torch.Tensor] = {}
        if past_key_values is not None and not isinstance(past_key_values, SwarmCache):
            prefix = prefix_tensors(past_key_values, self.config)
            past_key_values = self._generating
        is_alone = past_key_values is None
        # The adapter does not change while ``generate`` runs, so it is checked only once.
        client_adapter = (
            past_key_values.checked_adapter if past_key_values is self._generating and not is_alone else None
        )
        if client_adapter is None or prefix:
            client_adapter = ClientAdapter.of(self.base_model.layers, prefix)
        with ExitStack() as stack:
            cache = past_key_values
            if cache is None:
                max_length = self.blocks.spec.max_length
                cache = SwarmCache(self.blocks, max_length=max_length, is_temporary=True)
                stack.enter_context(cache)
            held = cache.get_seq_length()
            mask = _without_prefix(attention_mask, client_adapter.prefix_positions or cache.prefix_positions)
            columns = read_mask(mask, batch, held, width)
            if kwargs.get("position_ids") is not None:
                check_positions(kwargs["position_ids"], columns, held)
            unpadded = Unpadded.needed(mask, columns, held, width, are_ids=input_ids is not None)
            compute = functools.partial(
                cache.compute,
                ids=input_ids.cpu() if input_ids is not None else None,
                new=NewPositions(columns, min(keep, width), unpadded),
                client_adapter=client_adapter,
                learns=is_training or client_adapter.learns,
            )
            output = architecture.forward(
                self,
                input_ids=input_ids,
                past_key_values=cache,
                inputs_embeds=inputs_embeds,
                use_cache=True,
                return_dict=True,
                swarm_call=compute,
                **kwargs,
            )
        if is_alone:
            output = type(output)(
                **{name: value for name, value in output.items() if name != "past_key_values"}
            )
        if wants_dict is None:
            wants_dict = self.config.return_dict
        return output if wants_dict else output.to_tuple()

    namespace = {"forward": forward, "__module__": __name__}
    if hasattr(architecture, "generate"):
        namespace["generate"] = _generate(architecture)
    return type(f"Swarm{base.__name__}", (SwarmModel, base), namespace)


def _generate(architecture: Any) -> Callable[..., Any]:
    """Return ``generate`` of an architecture, with the caches in the swarm.

    It has one more option: ``speculate``, whether a single sequence may be decoded speculatively.
    The tokens are the same. Inputs may be on another device than the model; the result is on the
    model's device.
    """

    @functools.wraps(architecture.generate)
    def generate(
        self: Any, inputs: torch.Tensor | None = None, *args: Any, speculate: bool = True, **kwargs: Any
    ) -> Any:
        with ExitStack() as stack:
            if kwargs.get("assistant_model") is self:
                raise ValueError(
                    "a model cannot assist itself: give a smaller model of the same family, or leave out "
                    "assistant_model"
                )
            inputs = _placed(inputs, self.device)
            kwargs = {name: _placed(value, self.device) for name, value in kwargs.items()}
            ids = inputs if inputs is not None else kwargs.get("input_ids")
            cache = kwargs.pop("past_key_values", None)
            if cache is None and self._session is not None:
                cache = self._session
                # PEFT puts prompts before the ids, so ids do not show what is in the cache.
                is_prompted = cache.prefix_positions or _is_prompted(self)
                cache.rewind(0 if is_prompted else _shared(cache, ids))
            if cache is None:
                cache = stack.enter_context(SwarmCache(self.blocks, max_length=self.blocks.spec.max_length))
            if not isinstance(cache, SwarmCache):
                raise ValueError("generate() continues only what a cache of model.session() holds")
            cache.recheck_adapter()
            self._generating = cache
            stack.callback(setattr, self, "_generating", None)
            config = {"generation_config": args[0]} if args else {}
            if speculate and may_speculate(self, ids, config | kwargs) and not _is_prompted(self):
                _stop_at_strings(kwargs)
                kwargs["custom_generate"] = SpeculativeDecoding(
                    self._step_times, self._draft_model, cache, kwargs.get("streamer")
                )
            return architecture.generate(self, inputs, *args, past_key_values=cache, **kwargs)

    return generate


def _placed(value: Any, device: torch.device) -> Any:
    """Return a tensor on ``device``; anything else unchanged."""
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _stop_at_strings(options: dict[str, Any]) -> None:
    """Turn ``stop_strings`` and ``tokenizer`` among the options of ``generate`` into a stopping
    criterion.

    transformers gives no tokenizer to the stopping criteria of a ``custom_generate`` that is a
    function.
    """
    from transformers import StoppingCriteriaList, StopStringCriteria

    if options.get("stop_strings") and options.get("tokenizer"):
        criterion = StopStringCriteria(options.pop("tokenizer"), options.pop("stop_strings"))
        others = options.get("stopping_criteria") or []
        options["stopping_criteria"] = StoppingCriteriaList([*others, criterion])


def _without_prefix(mask: torch.Tensor | None, positions: int) -> torch.Tensor | None:
    """Return the part [B, n] of a mask [B, positions + n] behind a prefix.

    Raises ``ValueError`` if the mask hides some of the prefix.
    """
    if mask is None or not positions:
        return mask
    if not bool(mask[:, :positions].all()):
        raise ValueError(
            f"the attention mask must start with ones for the {positions} positions of the prefix"
        )
    return mask[:, positions:]


def _is_prompted(model: Any) -> bool:
    """Return whether PEFT prepares the inputs of ``generate``, as it does to put prompts before
    them."""
    return getattr(model.prepare_inputs_for_generation, "__self__", model) is not model


def _shared(cache: SwarmCache, ids: torch.Tensor | None) -> int:
    """Return how many leading columns of ids [B, n] the session holds. The last column does not
    count.
    """
    if ids is None or cache.tokens is None or len(ids) != len(cache.tokens):
        return 0
    width = min(ids.shape[1] - 1, cache.tokens.shape[1])
    differ = (ids[:, :width].cpu() != cache.tokens[:, :width]).any(dim=0).nonzero()
    return int(differ[0]) if len(differ) else width
