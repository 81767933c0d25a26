"""An answer: shown as it comes, measured, and bounded by the model's context."""

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from transformers import GenerationConfig

from swarmnet.cli.chat.answering import ModelAnswerer
from swarmnet.cli.chat.generation import Answerer, RunAnswer, SamplingOptions, Screen, generate
from swarmnet_client.chain.hops import ChainReport
from swarmnet_client.hosts.traffic import Traffic
from swarmnet_client.model.cache import SwarmCache
from swarmnet_client.model.model import _swarm_class
from swarmnet_protocols.net import PeerId

GREEDY = SamplingOptions(max_new_tokens=8, temperature=0.0, seed=None)


class _Bytes:
    """A tokenizer whose tokens are UTF-8 bytes, so that letters come in pieces."""

    def decode(self, tokens: list[int], **_: object) -> str:
        return bytes(tokens).decode(errors="replace")

    def encode(self, text: str, **_: object) -> list[int]:
        return [*text.encode()]


class _Answerer:
    """Answers with ``reply`` and reports one failover."""

    tokenizer = _Bytes()
    context = 20
    vocabulary_size = 256
    traffic = Traffic()

    def __init__(self, reply: str = "") -> None:
        self.report = ChainReport(
            failovers=7, longest_stall_s=7.0, audits=7, wrong=[PeerId("the one before")]
        )
        self._reply = reply.encode()

    def session(self) -> Any: ...

    def answer(
        self, ids: Sequence[int], sampling: SamplingOptions, put: Callable[[int], None], **_: object
    ) -> None:
        self.report.route = [(PeerId("a"), 0, 10), (PeerId("b"), 10, 30)]
        self.report.precisions = ["f32"]
        self.report.failovers += 1
        self.report.longest_stall_s = max(self.report.longest_stall_s, 0.5)
        for token in self._reply[: sampling.max_new_tokens]:
            put(token)


class _Shown(Screen):
    def __init__(self) -> None:
        super().__init__(as_json=True)
        object.__setattr__(self, "texts", list[str]())

    def show(self, piece: str) -> None:
        self.texts.append(piece)  # type: ignore[attr-defined]


def _ask(
    answerer: Answerer, sampling: SamplingOptions = GREEDY, prompt_tokens: int = 3
) -> tuple[RunAnswer, list[str]]:
    screen = _Shown()
    answer = generate(answerer, [1] * prompt_tokens, sampling, screen)
    return answer, screen.texts  # type: ignore[attr-defined]


def test_an_answer_says_everything_that_run_prints() -> None:
    answer, _ = _ask(_Answerer("hi"))
    fields = json.loads(json.dumps(answer.to_json()))
    assert 0 <= fields.pop("first_token_s") <= fields.pop("total_s")
    assert fields.pop("tokens_per_s") > 0
    assert fields == {
        "text": "hi",
        "token_ids": [104, 105],
        "prompt_tokens": 3,
        "route": [{"peer_id": "a", "start": 0, "end": 10}, {"peer_id": "b", "start": 10, "end": 30}],
        "trips": 0,
        "tokens_per_trip": 2.0,
        "failovers": 1,
        "longest_stall_s": 0.5,
        "audited": 0,
        "wrong_hosts": [],
        "precisions": ["f32"],
    }


def test_text_is_shown_in_whole_letters_and_completely() -> None:
    _, shown = _ask(_Answerer("é\nß!"))
    assert shown == ["é", "\n", "ß", "!"]


def test_an_incomplete_letter_is_shown_when_the_answer_ends() -> None:
    _, shown = _ask(_Answerer("aé"), SamplingOptions(2, 0.0, None))
    assert shown == ["a", "\N{REPLACEMENT CHARACTER}"]


class _Transformer:
    """A transformers model that keeps the arguments of ``generate``."""

    tokenizer = _Bytes()
    config = SimpleNamespace(max_position_embeddings=20, vocab_size=256)

    def __init__(self, **stated: Any) -> None:
        self.generation_config = GenerationConfig(**stated)
        self.asked: dict[str, Any] = {}

    def generate(self, input_ids: torch.Tensor, *, streamer: Any, **options: Any) -> None:
        assert options.pop("attention_mask").all()
        self.asked = options
        streamer.put(input_ids)
        streamer.put(torch.tensor([120]))


@pytest.mark.parametrize(
    ("stated", "temperature", "expected"),
    [
        ({}, 0.0, {"do_sample": False}),
        ({}, 0.5, {"do_sample": True, "temperature": 0.5, "top_p": 0.95, "top_k": 0}),
        ({}, None, {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 0}),
        ({"do_sample": True, "temperature": 0.2}, None, {"do_sample": True, "top_k": 0}),
    ],
)
def test_a_transformers_model_samples_as_it_is_told(
    stated: dict[str, Any], temperature: float | None, expected: dict[str, Any]
) -> None:
    model, tokens = _Transformer(**stated), list[int]()
    ModelAnswerer(model).answer([1, 2], SamplingOptions(8, temperature, seed=3), tokens.append)
    assert tokens == [120]
    assert model.asked == {"max_new_tokens": 8, "speculate": True} | expected


def test_a_transformers_model_hears_every_rule_of_sampling() -> None:
    model = _Transformer()
    rules = SamplingOptions(
        8, 0.5, top_k=4, min_p=0.1, repetition_penalty=1.2, bad_words=["no"], logit_bias=["5=-1.5"]
    )
    ModelAnswerer(model).answer([1, 2], rules, lambda _: None)
    expected = {"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.2, "sequence_bias": [[[5], -1.5]]}
    assert model.asked.items() >= expected.items()
    assert [*b"no"] in model.asked["bad_words_ids"]


def test_an_answer_ends_where_the_context_does() -> None:
    answerer = _Answerer("x" * 100)
    answer, _ = _ask(answerer, SamplingOptions(100, 0.0, None), prompt_tokens=15)
    assert len(answer.token_ids) == 5


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match=r"20 tokens.*shorten"):
        _ask(_Answerer(), prompt_tokens=20)


def test_inputs_of_generate_move_to_the_model() -> None:
    """The device ``meta`` stands in for a GPU; a tokenizer's tensors are on the CPU."""
    seen: dict[str, Any] = {}

    class Architecture:
        device = torch.device("meta")
        blocks = SimpleNamespace(spec=SimpleNamespace(max_length=16))
        _session, _generating, _is_stateful = None, None, False

        def prepare_inputs_for_generation(self) -> None: ...

        def forward(self, **options: Any) -> None: ...

        def generate(self, inputs: torch.Tensor | None, **options: Any) -> None:
            seen.update(options, inputs=inputs)

    model: Any = _swarm_class(Architecture)  # type: ignore[arg-type]
    ids = torch.ones(1, 3, dtype=torch.long)
    cache = SwarmCache(Architecture.blocks, max_length=16)  # type: ignore[arg-type]
    options = {"attention_mask": ids, "past_key_values": cache, "speculate": False}
    model.generate(Architecture(), ids, **options)
    assert {seen["inputs"].device.type, seen["attention_mask"].device.type} == {"meta"}
