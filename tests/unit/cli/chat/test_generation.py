"""An answer: shown as it comes, measured, and bounded by the model's context."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

from swarmnet.cli.chat.generation import SamplingOptions, generate
from swarmnet_client.chain.hops import ChainReport
from swarmnet_client.model.cache import SwarmCache
from swarmnet_client.model.model import _swarm_class
from swarmnet_protocols.net import PeerId

GREEDY = SamplingOptions(max_new_tokens=8, temperature=0.0, seed=None)


class _Bytes:
    """A tokenizer whose tokens are UTF-8 bytes, so that letters come in pieces."""

    def decode(self, tokens: list[int], **_: object) -> str:
        return bytes(tokens).decode(errors="replace")


class _Model:
    """A model that answers with ``reply`` and keeps the arguments of each call."""

    tokenizer = _Bytes()
    config = SimpleNamespace(max_position_embeddings=20)

    def __init__(self, reply: str = "") -> None:
        self.last_run = ChainReport(
            failovers=7, longest_stall_s=7.0, audits=7, wrong=[PeerId("the one before")]
        )
        self._reply = reply.encode()
        self.asked: dict[str, Any] = {}

    def generate(
        self, input_ids: torch.Tensor, *, streamer: Any, max_new_tokens: int, **options: Any
    ) -> None:
        assert options.pop("attention_mask").all()
        self.asked = {"max_new_tokens": max_new_tokens, **options}
        self.last_run.route = [(PeerId("a"), 0, 10), (PeerId("b"), 10, 30)]
        self.last_run.precisions = ["f32"]
        self.last_run.failovers += 1
        self.last_run.longest_stall_s = max(self.last_run.longest_stall_s, 0.5)
        streamer.put(input_ids)
        for token in self._reply[:max_new_tokens]:
            streamer.put(torch.tensor([token]))
        streamer.end()


def _ask(model: Any, sampling: SamplingOptions = GREEDY, prompt_tokens: int = 3) -> tuple[Any, list[str]]:
    shown: list[str] = []
    return generate(model, torch.ones(1, prompt_tokens, dtype=torch.long), sampling, shown.append), shown


def test_an_answer_says_everything_that_run_prints() -> None:
    answer, _ = _ask(_Model("hi"))
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
    _, shown = _ask(_Model("é\nß!"))
    assert shown == ["é", "\n", "ß", "!"]


def test_an_incomplete_letter_is_shown_when_the_answer_ends() -> None:
    _, shown = _ask(_Model("aé"), SamplingOptions(2, 0.0, None))
    assert shown == ["a", "\N{REPLACEMENT CHARACTER}"]


def test_temperature_zero_is_greedy_and_above_it_samples() -> None:
    greedy, sampled = _Model("x"), _Model("x")
    _ask(greedy)
    _ask(sampled, SamplingOptions(8, 0.7, 3))
    assert greedy.asked == {"max_new_tokens": 8, "do_sample": False, "speculate": True}
    assert sampled.asked == {"max_new_tokens": 8, "do_sample": True, "temperature": 0.7, "speculate": True}


def test_an_answer_ends_where_the_context_does() -> None:
    model = _Model("x" * 100)
    answer, _ = _ask(model, SamplingOptions(100, 0.0, None), prompt_tokens=15)
    assert len(answer.token_ids) == 5


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match=r"20 tokens.*shorten"):
        _ask(_Model(), prompt_tokens=20)


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
