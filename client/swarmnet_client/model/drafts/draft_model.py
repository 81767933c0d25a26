"""A draft model: a small model in this process that proposes the next tokens of a large one on the
swarm (Leviathan et al. 2023, section 2)."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from swarmnet_client.model.drafts.speculation import common_prefix
from swarmnet_client.model.load_options import LoadOptions
from swarmnet_protocols.averages import averaged
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import LocalModel, resolve

FEW = 32
"""Up to this many new tokens are read when the next draft begins. More are read in the
background."""
_SMOOTHING = 0.2
"""Weight of the newest measurement in the mean seconds of a token."""


class DraftModel:
    """A causal model of transformers in this process, with the tokenizer of the model that it
    drafts for."""

    def __init__(self, model: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        """``clock``, in seconds, times its tokens. Raises ``ConfigError`` for a model with
        recurrent states, which cannot forget a wrong token."""
        if model._is_stateful:
            raise ConfigError(
                "a model with recurrent states cannot draft", hint="--draft takes one with attention only"
            )
        self.model = model
        self.clock = clock
        self.reading = ThreadPoolExecutor(1, thread_name_prefix="draft")

    @classmethod
    def load(cls, target: LocalModel, options: LoadOptions) -> "DraftModel":
        """Return the model ``options.draft``, to draft for ``target``. Raises ``ConfigError`` if
        their tokens differ, and what ``resolve`` raises."""
        local = resolve(options.draft, cache_dir=target.cache_dir)
        if local.tokenizer().get_vocab() != target.tokenizer().get_vocab():
            raise ConfigError(
                f"{options.draft} has other tokens than {target.name}: it cannot draft for it",
                hint="use a small model of the same family",
            )
        return cls(local.load_whole(dtype=options.torch_dtype, device=options.torch_device).eval())

    def sequence(self, ids: Sequence[int]) -> "DraftModelSequence":
        """Return a sequence that begins with ``ids``, which are read in the background."""
        return DraftModelSequence(self, ids)

    def close(self) -> None:
        """Stop reading; idempotent."""
        self.reading.shutdown(cancel_futures=True)


class DraftModelSequence:
    """A ``DraftSequence`` with a KV cache. Used by one thread at a time."""

    def __init__(self, draft_model: DraftModel, ids: Sequence[int]) -> None:
        self._model = draft_model.model
        self._clock = draft_model.clock
        self._reading = draft_model.reading
        self._ids = list(ids)
        self._cache = DynamicCache()
        self._held: list[int] = []
        """The tokens in the KV cache: the first tokens of the sequence, then the last draft."""
        self._token_s = 0.0
        self._read: Future[torch.Tensor] | None = None
        self._read_ahead()

    @property
    def token_s(self) -> float:
        is_reading = self._read is not None and not self._read.done()
        has_room = len(self._ids) < self._model.config.max_position_embeddings
        return self._token_s if has_room and not is_reading else float("inf")

    def extend(self, ids: Sequence[int]) -> None:
        self._ids += ids
        if self._read is None or self._read.done():
            self._read_ahead()

    def tokens(self) -> Iterator[tuple[int, float]]:
        if self._read is not None:
            self._read.result()
            self._read = None
        self._rewind()
        coming = self._ids[len(self._held) :]
        while len(self._held) + len(coming) <= self._model.config.max_position_embeddings:
            started = self._clock()
            probabilities = self._forward(coming)
            self._token_s = averaged(self._token_s, self._clock() - started, _SMOOTHING)
            probability, token = probabilities.max(dim=-1)
            coming = [int(token)]
            yield coming[0], float(probability)

    def _read_ahead(self) -> None:
        """Read new tokens in the background if they are too many to read during a draft.

        The last token is left: its forward gives the first token of a draft.
        """
        if len(self._ids) - len(self._held) > FEW:
            self._rewind()
            self._read = self._reading.submit(self._forward, self._ids[len(self._held) : -1])

    def _rewind(self) -> None:
        """Remove tokens from the KV cache that are not in the sequence, and the sequence's last
        token. That one is computed again, for its logits."""
        same = common_prefix(self._held, self._ids[:-1])
        self._cache.crop(same - len(self._held))
        del self._held[same:]

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the probabilities [V] of the token after ``ids``, which continue the ids in the
        cache."""
        output = self._model(
            input_ids=torch.tensor([ids], device=self._model.device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            return_dict=True,
        )
        self._held += ids
        logits: torch.Tensor = output.logits[0, -1].float()
        return logits.softmax(dim=-1).cpu()
