"""The decisions of the batcher: which requests start or wait, which sequence they reuse, how
prompts share a step; and sampling."""

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from swarmnet_client.batching.answers import Answer, Request
from swarmnet_client.batching.continuous_batching import BatchLimits, Load, may_start, may_wait, retry_after_s
from swarmnet_client.batching.prefix_reuse import MIN_SHARED, RunningSequence, pick_sequence
from swarmnet_client.batching.sequences import share
from swarmnet_client.model.sampling import (
    NUCLEUS,
    Draw,
    Sampling,
    Token,
    changed_scores,
    choose,
    distribution,
)
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.errors import IntegrityError
from tests.support.models.rounding import UNIT

LIMITS = BatchLimits(active=4, waiting=2, positions=1000)
LONG = tuple(range(2, 2 + 2 * MIN_SHARED))


@pytest.mark.parametrize(
    ("load", "positions", "starts"),
    [
        (Load(), 10, True),
        (Load(), 5000, True),
        (Load(active=3, positions=900), 100, True),
        (Load(active=3, positions=900), 101, False),
        (Load(active=4), 10, False),
        (Load(active=2, room=2), 10, False),
        (Load(active=1, room=2), 10, True),
    ],
)
def test_requests_start_while_sequences_and_memory_are_free(load: Load, positions: int, starts: bool) -> None:
    assert may_start(load, LIMITS, positions) is starts


def test_the_queue_is_bounded_and_a_refusal_names_the_retry_time() -> None:
    assert may_wait(Load(active=4, waiting=1), LIMITS)
    assert not may_wait(Load(active=4, waiting=2), LIMITS)
    assert may_wait(Load(active=1), LIMITS, 5)
    assert not may_wait(Load(active=1), LIMITS, 6)
    assert not may_wait(Load(active=1, room=2), LIMITS, 4)
    assert retry_after_s(Load(active=4, waiting=4, answer_s=10)) == 10
    assert retry_after_s(Load(answer_s=0)) == 1
    assert retry_after_s(Load(active=1, waiting=1000, answer_s=10)) == 60


def test_the_sequence_that_holds_most_of_a_prompt_is_reused() -> None:
    sequences = [
        RunningSequence(0, used=3),
        RunningSequence(1, list(LONG), used=9),
        RunningSequence(2, list(LONG[:-4]), used=1),
        RunningSequence(3, used=2),
    ]
    wanted = Request((*LONG, 99), 5)
    assert pick_sequence(sequences, wanted).number == 1
    sequences[1].answer = Answer(wanted)
    assert pick_sequence(sequences, wanted).number == 2
    # the sequence unused for longest
    assert pick_sequence(sequences, Request((1, 2, 3), 5)).number == 2
    assert pick_sequence(sequences, Request((*LONG, 99), 5, owner="another")).number == 2
    assert sequences[2].shared(Request((*LONG, 99), 5, owner="another")) == 0
    # at least one position must be sent
    assert sequences[1].shared(Request(LONG, 5)) == len(LONG) - 1


def test_prompts_share_a_step_and_short_prompts_are_served_first() -> None:
    assert share(100, [10, 200, 30]) == [10, 60, 30]
    assert share(100, [200, 300]) == [50, 50]
    assert share(1, [5, 5, 5]) == [0, 0, 1]
    assert share(100, []) == []


def rows(count: int, vocabulary: int = 50) -> Array:
    return np.random.default_rng(1).standard_normal((count, vocabulary), np.float32) * 3


def test_greedy_takes_the_likeliest() -> None:
    scores = rows(3)
    tokens = choose(scores, [Draw(Sampling(), 0)] * 3)
    assert [token.id for token in tokens] == scores.argmax(-1).tolist()


@pytest.mark.parametrize("top_p", [1.0, 0.7])
def test_tokens_are_sampled_with_their_probabilities(top_p: float) -> None:
    """Against transformers' own warpers."""
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    row = rows(1, 12)
    draws = 4000
    tokens = choose(
        np.broadcast_to(row, (draws, 12)),
        [Draw(Sampling(1.4, top_p, seed=5), position) for position in range(draws)],
    )
    seen = torch.bincount(torch.tensor([token.id for token in tokens]), minlength=12) / draws
    warped = TemperatureLogitsWarper(1.4)(None, torch.from_numpy(row))
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(None, warped)
    expected = warped.softmax(-1)[0]
    assert torch.all(seen[expected == 0] == 0)
    assert torch.all((seen - expected).abs() < 4 / math.sqrt(draws))


def test_a_nucleus_larger_than_the_sorted_part_is_sampled_whole() -> None:
    row = np.zeros((1, 4 * NUCLEUS), np.float32)
    tokens = {choose(row, [Draw(Sampling(1.0, 0.99, seed), 0)])[0].id // NUCLEUS for seed in range(60)}
    assert tokens == {0, 1, 2, 3}


def test_a_draw_follows_from_seed_and_position_alone() -> None:
    scores = rows(1)
    draw = Draw(Sampling(1.0, seed=7), 3)
    others = [Draw(Sampling(1.0, seed=seed), random.Random(seed).randrange(9)) for seed in range(5)]
    alone = choose(scores, [draw])[0]
    assert choose(np.concatenate([rows(5), scores]), [*others, draw])[-1] == alone
    drawn = {choose(scores, [Draw(Sampling(2.0, seed=7), position)])[0].id for position in range(20)}
    assert len(drawn) > 3


def test_penalties_and_biases_follow_the_formula_of_openai() -> None:
    """The score becomes mu[j] - c[j] * frequency - (c[j] > 0) * presence + bias[j]; other rows of
    the batch keep theirs."""
    scores = rows(3, 12)
    counts = {3: 2, 7: 1}
    rules = Sampling(
        2.0, seed=5, presence_penalty=1.5, frequency_penalty=-0.5, biases=((7, 3.0), (9, -100.0))
    )
    changed = scores[1].copy()
    changed[3] -= 2 * -0.5 + 1.5
    changed[7] -= 1 * -0.5 + 1.5 - 3.0
    changed[9] -= 100.0
    before = scores.copy()
    (greedy,) = choose(scores[1:2], [Draw(replace(rules, temperature=0.0), 3, counts)])
    assert greedy.id == int(changed.argmax())
    for position in range(50):
        draws = [Draw(Sampling(), 0), Draw(rules, position, counts), Draw(Sampling(2.0, seed=5), position)]
        chosen = [token.id for token in choose(scores, draws)]
        assert chosen[0] == int(scores[0].argmax())
        assert chosen[1:] == [
            choose(row[None], [Draw(Sampling(2.0, seed=5), position)])[0].id for row in (changed, scores[2])
        ]
    assert np.array_equal(scores, before)


RULES: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"min_p": 0.2},
    {"top_k": 30, "top_p": 0.6, "min_p": 0.1},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "biases": ((3, 4.0), (5, -2.0), (11, 90.0))},
    {"bad_words": ((3,), (7, 8), (9, 7, 6), (8, 4))},
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_sampling_equals_the_processors_of_transformers(rules: dict[str, Any]) -> None:
    """Each rule alone, and several in one order."""
    sampling = Sampling(0.8, **rules)
    prompt, answer = [2, 3, 5, 11], [9, 7, 7, 20]
    (scores,) = rows(1, 200)
    draw = Draw(sampling, 4, Counter(answer), frozenset(prompt), answer[-3:])
    config = GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p or None,
        repetition_penalty=sampling.repetition_penalty,
        bad_words_ids=[[*word] for word in sampling.bad_words] or None,
        sequence_bias=[[[token], bias] for token, bias in sampling.biases] or None,
    )
    config._eos_token_tensor = None
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    tiny = LlamaConfig(vocab_size=200, **sizes)
    processors = LlamaForCausalLM(tiny)._get_logits_processor(config, len(prompt), device="cpu")
    theirs = processors(torch.tensor([[*prompt, *answer]]), torch.from_numpy(scores[None].copy()))[0]
    expected = theirs.double().softmax(-1).numpy()
    found = np.zeros(200)
    probabilities, tokens = distribution(changed_scores(scores[None], [draw])[0], sampling)
    found[slice(None) if tokens is None else tokens[: len(probabilities)]] = probabilities
    rounding = (len(scores) + 4) * UNIT  # of exponents and of their sum
    assert found / found.sum() == pytest.approx(expected, abs=rounding)
    assert (found == 0).tolist() == (expected == 0).tolist()


def test_tokens_of_an_answer_are_counted_only_for_penalties() -> None:
    for sampling, counted in ((Sampling(), {}), (Sampling(presence_penalty=0.1), {5: 2, 6: 1})):
        answer = Answer(Request((1,), 9, sampling))
        for token in (5, 6, 5):
            answer.add(Token(token))
        assert answer.counts == counted


def test_log_probabilities_do_not_depend_on_sampling_or_biases() -> None:
    scores = rows(1)
    (token,) = choose(scores, [Draw(Sampling(0.5, 0.1, 1, top_logprobs=3), 0)])
    expected = torch.log_softmax(torch.from_numpy(scores[0]).double(), -1)
    assert choose(scores, [Draw(Sampling(top_logprobs=3, biases=((token.id, 100.0),)), 0)]) == [token]
    rounding = (len(scores[0]) + 4) * UNIT  # of the sum, and of what comes before and after it
    assert token.logprob == pytest.approx(float(expected[token.id]), abs=rounding)
    assert [one for one, _ in token.top] == expected.topk(3).indices.tolist()
    assert choose(scores, [Draw(Sampling(), 0)])[0].logprob is None
    assert choose(scores, [Draw(Sampling(top_logprobs=0), 0)])[0].top == ()


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_an_error(wrong: float) -> None:
    scores = np.zeros((2, 5), np.float32)
    scores[1, 3] = wrong
    with pytest.raises(IntegrityError, match="not finite"):
        choose(scores, [Draw(Sampling(), 0)] * 2)
