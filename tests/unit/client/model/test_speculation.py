"""Speculative decoding: drafts from the sequence itself, the length that pays, and the choice of
valid tokens."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence

import pytest

from swarmnet_client.model.drafts.speculation import MAX_DRAFT, Draft, PromptLookup, Speculator, StepTimes


def times(step_s: float, position_s: float) -> StepTimes:
    """The step times of a chain, measured on steps of one to nine positions."""
    measured = StepTimes()
    for number in range(60):
        positions = 1 + number % 9
        measured.add(positions, step_s + (positions - 1) * position_s)
    return measured


def test_a_draft_is_what_followed_the_longest_match() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3])
    assert lookup.draft(3) == Draft((4, 9, 2), 3)
    assert lookup.draft(0) == Draft()
    lookup.extend([9])
    assert lookup.draft(2) == Draft((2, 3), 1)
    lookup.extend([77])
    assert lookup.draft(2) == Draft()


def test_of_equal_matches_the_latest_is_continued() -> None:
    assert PromptLookup([7, 1, 5, 7, 2, 6, 7]).draft(1) == Draft((2,), 1)


def test_of_equal_matches_the_copied_one_is_continued() -> None:
    text = [1, 2, 3, 4, 5, 9, 4, 6]  # "4" is followed by 5, and later by 6
    lookup = PromptLookup([*text, 1])
    assert lookup.draft(1) == Draft((2,), 1)
    lookup.extend([2, 77])  # a copy of the beginning, with 77 instead of 3
    assert lookup.draft(1) == Draft()
    lookup.extend([4])
    assert lookup.draft(1) == Draft((5,), 1)


def test_a_draft_of_a_repetition_repeats_it() -> None:
    assert PromptLookup([1, 2, 3, 1, 2]).draft(7).tokens == (3, 1, 2, 3, 1, 2, 3)


def test_nothing_is_drafted_before_a_step_was_measured() -> None:
    assert Speculator([5] * 40).draft(StepTimes()) == ()


def test_slow_trips_make_long_drafts_and_dear_positions_none() -> None:
    def drafted(step_s: float, position_s: float) -> int:
        return len(Speculator([5] * 40).draft(times(step_s, position_s)))

    assert drafted(0.4, 0.002) == MAX_DRAFT
    assert 1 <= drafted(0.04, 0.01) < MAX_DRAFT
    assert drafted(0.04, 0.06) == 0


def test_a_draft_is_never_longer_than_allowed() -> None:
    assert len(Speculator([5] * 40).draft(times(0.4, 0.0), most=3)) == 3
    assert Speculator([5] * 40).draft(times(0.4, 0.0), most=-1) == ()


def test_drafts_are_shorter_in_steps_with_many_sequences() -> None:
    alone, beside = (
        len(Speculator([4, 5] * 5).draft(times(0.1, 0.005), positions=count)) for count in (1, 16)
    )
    assert beside < alone


def test_the_time_of_a_position_is_found_in_noise() -> None:
    rng = random.Random(1)
    measured = StepTimes()
    for _ in range(300):
        positions = rng.choice([1, 1, 4, 9, 17])
        measured.add(positions, (0.1 + 0.004 * (positions - 1)) * rng.uniform(0.9, 1.1))
    assert measured.position_s == pytest.approx(0.004, rel=0.3)
    assert measured.step_s(1) == pytest.approx(0.1, rel=0.1)


def test_drafts_are_tried_again_after_a_while_without() -> None:
    measured = times(0.04, 0.05)
    for _ in range(200):
        measured.add(1, 0.04)
    assert Speculator([5] * 40).draft(measured)


class Counting:
    """A draft model that continues a sequence by counting, and counts the tokens that were asked
    for."""

    def __init__(self, probability: float = 0.95, token_s: float = 0.0) -> None:
        self.ids = [100]
        self.asked = 0
        self.probability = probability
        self.token_s = token_s

    def extend(self, ids: Sequence[int]) -> None:
        self.ids += ids

    def tokens(self) -> Iterator[tuple[int, float]]:
        for token in itertools.count(self.ids[-1] + 1):
            self.asked += 1
            yield token, self.probability


def test_a_draft_model_drafts_what_cannot_be_looked_up() -> None:
    model = Counting()
    speculator, chain = Speculator([100], model), times(0.4, 0.002)
    assert speculator.draft(chain, most=3) == (101, 102, 103)
    assert speculator.choose([101, 102, 7, 8], 3) == 3
    assert model.ids == [100, 101, 102, 7]
    assert speculator.draft(chain, most=2) == (8, 9)


def test_a_long_match_is_continued_without_the_draft_model() -> None:
    model, text = Counting(), [1, 2, 3, 4, 9, 8, 1, 2, 3, 4]
    assert Speculator(text, model).draft(times(0.4, 0.002), most=2) == (9, 8)
    assert Speculator(text[:-1], model).draft(times(0.4, 0.002), most=2) == (101, 102), "three tokens"


def test_a_draft_model_that_saves_no_time_computes_nothing() -> None:
    for token_s in (0.1, math.inf):
        model = Counting(token_s=token_s)
        assert Speculator([100], model).draft(times(0.05, 0.002)) == ()
        assert model.asked == 0


def test_while_a_draft_model_reads_what_was_found_is_drafted() -> None:
    assert Speculator([5, 6, 5], Counting(token_s=math.inf)).draft(times(0.4, 0.002), most=1) == (6,)


def test_the_less_a_draft_model_is_sure_the_shorter_are_its_drafts() -> None:
    chain = times(0.1, 0.02)
    sure, unsure = (len(Speculator([100], Counting(each)).draft(chain)) for each in (0.95, 0.4))
    assert sure > unsure


def test_a_draft_model_that_is_always_wrong_is_given_up() -> None:
    model, chain = Counting(), times(0.1, 0.02)
    speculator = Speculator([100], model)
    for number in range(60):
        speculator.choose([5 * number, *speculator.draft(chain)], 0)
    asked = model.asked
    for number in range(20):
        draft = speculator.draft(chain)
        speculator.choose([7 * number, *draft], len(draft))
    assert model.asked - asked <= 20


@pytest.mark.parametrize("number", range(20))
def test_the_valid_tokens_are_those_of_plain_decoding(number: int) -> None:
    rng = random.Random(number)
    prompt = [rng.randrange(4) for _ in range(30)]
    answer = [rng.randrange(4) for _ in range(20)] * 4
    speculator, chain, found, trips = Speculator(prompt), times(0.4, 0.001), [], 0
    while len(found) < len(answer):
        draft = speculator.draft(chain, most=len(answer) - len(found) - 1) if found else ()
        # After a wrong token the model's choices mean nothing.
        chosen = answer[len(found) : len(found) + 1]
        for token in draft:
            chosen.append(answer[len(found) + len(chosen)] if token == chosen[-1] else -1)
        found += chosen[: speculator.choose(chosen, len(draft))]
        trips += 1
    assert found == answer
    assert trips < len(answer)


def test_drafts_are_given_up_when_wrong_and_taken_up_when_right() -> None:
    """The first token of a draft is checked whether it was sent or not."""
    speculator, chain = Speculator([1, 2] * 20), times(0.1, 0.02)
    assert speculator.draft(chain)
    for _ in range(40):
        draft = speculator.draft(chain)
        speculator.choose([99, *draft], len(draft))
        speculator._lookup.extend([1, 2] * 9)
    assert not speculator.draft(chain)
    for _ in range(40):
        speculator.choose([1], 0)
        speculator._lookup.extend([2])
        draft = speculator.draft(chain)
    assert draft


@pytest.mark.parametrize("position_s", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("vocabulary", [64, 512, 20_000])
def test_a_text_without_repetition_is_as_fast_as_without_drafts(vocabulary: int, position_s: float) -> None:
    """Steps take 1 s, and ``position_s`` for each drafted token. Single tokens occur again, which
    is a match; what follows them does not."""
    took_s = plain_s = 0.0
    for seed in range(5):
        rng = random.Random(seed)
        text = rng.choices(range(vocabulary), k=256)
        speculator, measured, held = Speculator(text[:64]), StepTimes(), 65
        speculator.choose(text[64:held], 0)
        while held < len(text):
            draft = speculator.draft(measured, most=len(text) - held - 1)
            step_s = 1 + position_s * len(draft)
            measured.add(1 + len(draft), step_s)
            took_s += step_s
            held += speculator.choose(text[held : held + len(draft) + 1], len(draft))
        plain_s += len(text) - 65
    assert took_s <= 1.02 * plain_s
