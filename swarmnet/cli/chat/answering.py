"""Two ways to answer the prompts of `run`, `bench` and a chat: a batch of one, or transformers.

Both are clients of the swarm. Generation needs torch and transformers only with an adapter.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swarmnet.cli.chat.generation import SamplingOptions

if TYPE_CHECKING:
    from swarmnet_client.batching.answers import Answer, Prefill
    from swarmnet_client.batching.continuous_batching import BatchedModel
    from swarmnet_client.chain.hops import ChainReport
    from swarmnet_client.hosts.runtime import Runtime
    from swarmnet_client.hosts.traffic import Traffic
    from swarmnet_client.model.sampling import Token


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

    def answer(
        self,
        ids: Sequence[int],
        sampling: SamplingOptions,
        put: Callable[[int], None],
        *,
        exact: bool = False,
        prefilled: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        from swarmnet_client.batching.answers import Prefill, Request
        from swarmnet_client.model.sampling import sampling_of

        served = self.runtime.opened
        request = Request(
            tuple(ids),
            sampling.max_new_tokens,
            sampling_of(sampling, served.sampling, served.tokenizer),
            frozenset() if exact else served.end_ids,
            speculate=sampling.speculate and served.speculates,
        )
        run = self.runtime.run
        answering = served.batcher.answer(request)
        answer: Answer = run(answering.__aenter__())
        try:
            coming = answer.news()
            while (news := run(_next(coming))) is not None:
                if isinstance(news, Prefill):
                    prefilled(news.done, news.total)
                else:
                    put(news.id)
        finally:
            self.report = answer.report
            run(answering.__aexit__(None, None, None))


async def _next(coming: "AsyncIterator[Token | Prefill]") -> "Token | Prefill | None":
    return await anext(coming, None)


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

    def answer(
        self,
        ids: Sequence[int],
        sampling: SamplingOptions,
        put: Callable[[int], None],
        *,
        exact: bool = False,
        prefilled: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        import torch

        from swarmnet_client.model.sampling import USUAL_SAMPLING, word_ids

        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        prompt = torch.tensor([list(ids)])
        # Without a mask, transformers takes prompt tokens that equal the padding token for padding.
        choice: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "do_sample": False}
        if sampling.temperature != 0:
            choice["do_sample"] = True
            if not self.model.generation_config.do_sample:
                choice |= {"temperature": USUAL_SAMPLING.temperature, "top_p": USUAL_SAMPLING.top_p}
            given = {"temperature": sampling.temperature, "top_p": sampling.top_p}
            # transformers' own default is 50 likeliest tokens
            given |= {"top_k": sampling.top_k, "min_p": sampling.min_p or None}
            choice |= {name: value for name, value in given.items() if value is not None}
        if sampling.repetition_penalty != 1:
            choice["repetition_penalty"] = sampling.repetition_penalty
        if sampling.bad_words:
            choice["bad_words_ids"] = [[*ids] for ids in word_ids(sampling.bad_words, self.tokenizer)]
        if sampling.biases:
            choice["sequence_bias"] = [[[token], bias] for token, bias in sampling.biases]
        if exact:
            choice["min_new_tokens"] = sampling.max_new_tokens
        self.model.generate(
            prompt,
            max_new_tokens=sampling.max_new_tokens,
            streamer=_Streamer(put),
            speculate=sampling.speculate,
            **choice,
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
