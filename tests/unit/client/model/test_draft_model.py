"""A draft model: it continues a sequence greedily, wherever that goes, and reads long prompts in
the background."""

import itertools
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swarmnet_client.model.drafts.draft_model import FEW, DraftModel, DraftModelSequence
from swarmnet_client.model.load_options import LoadOptions
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.models import resolve
from tests.support.models.rounding import NEAR
from tests.support.models.tiny import save_tiny_llama
from tests.support.swarm.tiny_swarm import load_tiny

CONTEXT = 128


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=50, max_position_embeddings=CONTEXT, **sizes)
    return LlamaForCausalLM(config).eval()


def continued(model: Any, ids: list[int], count: int) -> list[int]:
    """The greedy continuation, computed whole for each token."""
    answer: list[int] = []
    for _ in range(count):
        answer.append(int(model(torch.tensor([ids + answer])).logits[0, -1].argmax()))
    return answer


def drafted(sequence: DraftModelSequence, count: int) -> list[int]:
    return [token for token, _ in itertools.islice(sequence.tokens(), count)]


def test_a_draft_is_the_greedy_continuation_after_any_draft(model: Any) -> None:
    ids = [5, 9, 31, 2]
    sequence = DraftModel(model).sequence(ids)
    for accepted, other in ((4, 7), (0, 11), (1, 3), (4, 4)):
        draft = drafted(sequence, 4)
        assert draft == continued(model, ids, 4)
        sequence.extend([*draft[:accepted], other])
        ids += [*draft[:accepted], other]


def test_a_token_comes_with_its_probability(model: Any) -> None:
    token, probability = next(DraftModel(model).sequence([1, 2, 3]).tokens())
    with torch.inference_mode():
        logits = model(torch.tensor([[1, 2, 3]])).logits[0, -1].double()
    assert token == int(logits.argmax())
    # A probability is as far off, in parts of itself, as the logits are.
    rounding = 2 * NEAR * float(logits.norm())
    assert probability == pytest.approx(float(logits.softmax(dim=-1).max()), rel=rounding)


def test_a_long_prompt_is_read_in_the_background(model: Any) -> None:
    draft_model = DraftModel(model)
    ids = [number % 47 for number in range(FEW + 40)]
    sequence = draft_model.sequence(ids)
    draft_model.reading.shutdown()  # waits until it is read
    assert sequence.token_s == 0.0
    assert len(sequence._held) == len(ids) - 1
    assert drafted(sequence, 5) == continued(model, ids, 5)


def test_nothing_is_drafted_in_a_prompt_or_beyond_the_context(model: Any) -> None:
    draft_model = DraftModel(model)
    gate = threading.Event()
    draft_model.reading.submit(gate.wait)
    sequence = draft_model.sequence(list(range(FEW + 2)))
    assert math.isinf(sequence.token_s)
    gate.set()
    draft_model.reading.shutdown()
    assert sequence.token_s == 0.0
    sequence._ids += [1] * CONTEXT
    assert math.isinf(sequence.token_s)
    assert not list(sequence.tokens())


def test_a_draft_ends_with_the_context(model: Any) -> None:
    sequence = DraftModel(model).sequence([3] * (CONTEXT - 2))
    sequence._reading.submit(lambda: None).result()
    assert len(list(sequence.tokens())) == 3, "the last one needs no room"


def test_models_with_other_tokens_or_recurrent_states_are_refused(tmp_path: Path, model: Any) -> None:
    save_tiny_llama(tmp_path / "tiny")
    load_tiny(tmp_path)
    target = resolve(str(tmp_path / "model"), cache_dir=tmp_path / "cache")
    tokenizer = target.tokenizer()
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(tmp_path / "tiny")
    options = LoadOptions(draft=str(tmp_path / "tiny"))
    with pytest.raises(ConfigError, match="other tokens than"):
        DraftModel.load(target, options)
    model_with_states = type("Recurrent", (), {"_is_stateful": True})()
    with pytest.raises(ConfigError, match="recurrent states"):
        DraftModel(model_with_states)
