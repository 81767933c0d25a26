"""What answers the prompts of `run`, `bench` and a chat: a batch of one, or a transformers model.

Both are clients of the swarm. Plain generation needs neither torch nor transformers; adapters and
traces are those of the transformers model.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from swarmnet_client.batching.answers import Answer
    from swarmnet_client.batching.continuous_batching import BatchedModel
    from swarmnet_client.chain.hops import ChainReport
    from swarmnet_client.hosts.runtime import Runtime
    from swarmnet_client.hosts.traffic import Traffic


@dataclass(frozen=True)
class Wanted:
    """A prompt, and how it is answered.

    - ``most``: most tokens of the answer. With ``exact`` it has all of them.
    - ``temperature``: 0 takes the most likely tokens. None, like a ``top_p`` of None, stands for
      the model's own.
    - ``prefilled`` is called while the prompt is computed: with its positions so far, and with all
      of them.
    """

    ids: Sequence[int]
    most: int
    temperature: float | None = 0.0
    top_p: float | None = None
    seed: int | None = None
    speculate: bool = True
    exact: bool = False
    prefilled: Callable[[int, int], None] = lambda done, total: None


class Answerer(Protocol):
    """A model on the swarm."""

    tokenizer: Any
    context: int
    """Most positions of a prompt and its answer."""
    vocabulary_size: int

    @property
    def report(self) -> "ChainReport":
        """The report of the chain that was used last."""

    @property
    def traffic(self) -> "Traffic":
        """Bytes sent to and received from hosts."""

    def session(self) -> AbstractContextManager[object]:
        """Return a context in which the hosts keep what they computed for the next prompt."""

    def answer(self, wanted: Wanted, put: Callable[[int], None]) -> None:
        """Answer a prompt; ``put`` gets each token. Raises ``SwarmnetError``, or
        ``KeyboardInterrupt`` for Ctrl-C."""


@dataclass
class BatchAnswerer:
    """Answers through a batcher, one prompt at a time, on the client's event loop."""

    runtime: "Runtime[BatchedModel]"
    report: "ChainReport" = field(init=False)

    def __post_init__(self) -> None:
        from swarmnet_client.chain.hops import ChainReport

        self.report = ChainReport()
        served = self.runtime.opened
        self.tokenizer = served.tokenizer
        self.context = served.context
        self.vocabulary_size = served.vocabulary.size

    @property
    def traffic(self) -> "Traffic":
        return self.runtime.opened.hosts.traffic

    def session(self) -> AbstractContextManager[object]:
        return nullcontext()

    def answer(self, wanted: Wanted, put: Callable[[int], None]) -> None:
        from swarmnet_client.batching.answers import Request
        from swarmnet_client.model.sampling import Sampling

        served = self.runtime.opened
        usual = served.sampling
        seed = SystemRandom().getrandbits(63) if wanted.seed is None else wanted.seed
        request = Request(
            tuple(wanted.ids),
            wanted.most,
            Sampling(
                usual.temperature if wanted.temperature is None else wanted.temperature,
                usual.top_p if wanted.top_p is None else wanted.top_p,
                seed,
            ),
            frozenset() if wanted.exact else served.end_ids,
            speculate=wanted.speculate and served.speculates,
        )
        run = self.runtime.run
        answering = served.batcher.answer(request)
        answer: Answer = run(answering.__aenter__())
        try:
            total = len(wanted.ids)
            answer.prefilled = lambda done: wanted.prefilled(done, total)
            tokens = aiter(answer)
            while (token := run(_next(tokens))) is not None:
                put(token.id)
        finally:
            self.report = answer.report
            run(answering.__aexit__(None, None, None))


async def _next(tokens: Any) -> Any:
    return await anext(tokens, None)


@dataclass
class ModelAnswerer:
    """Answers through a transformers model, with its adapter if it has one."""

    model: Any

    def __post_init__(self) -> None:
        self.tokenizer = self.model.tokenizer
        self.context = self.model.config.max_position_embeddings
        self.vocabulary_size = self.model.config.vocab_size

    @property
    def report(self) -> "ChainReport":
        report: ChainReport = self.model.last_run
        return report

    @property
    def traffic(self) -> "Traffic":
        traffic: Traffic = self.model.traffic
        return traffic

    def session(self) -> AbstractContextManager[object]:
        session: AbstractContextManager[object] = self.model.session()
        return session

    def answer(self, wanted: Wanted, put: Callable[[int], None]) -> None:
        import torch

        from swarmnet_client.model.sampling import USUAL_SAMPLING

        if wanted.seed is not None:
            torch.manual_seed(wanted.seed)
        ids = torch.tensor([list(wanted.ids)])
        # Without a mask, transformers takes prompt tokens that equal the padding token for padding.
        choice: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False}
        if wanted.temperature != 0:
            choice["do_sample"] = True
            if not self.model.generation_config.do_sample:
                choice |= {"temperature": USUAL_SAMPLING.temperature, "top_p": USUAL_SAMPLING.top_p}
            given = {"temperature": wanted.temperature, "top_p": wanted.top_p}
            choice |= {name: value for name, value in given.items() if value is not None}
        if wanted.exact:
            choice["min_new_tokens"] = wanted.most
        streamer = _Streamer(put)
        self.model.generate(
            ids, max_new_tokens=wanted.most, streamer=streamer, speculate=wanted.speculate, **choice
        )


class _Streamer:
    """A streamer of transformers: ``put`` is called with the prompt, and then with each new
    token."""

    def __init__(self, put: Callable[[int], None]) -> None:
        self._put = put
        self._prompt_seen = False

    def put(self, tokens: Any) -> None:
        if self._prompt_seen:
            for token in tokens.flatten().tolist():
                self._put(token)
        self._prompt_seen = True

    def end(self) -> None: ...
