"""Error feedback: values that a codec loses are sent later, a round that fails changes nothing, and
nothing is sent twice."""

import pytest
import torch

from swarmnet_protocols.errors import IntegrityError
from swarmnet_protocols.training.codecs import ALIGNMENT, ErrorFeedback, get_codec, result_codec

CODEC = get_codec("int4")
SIZE = 256


def vector(seed: int, size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def decoded(values: torch.Tensor) -> torch.Tensor:
    return CODEC.decode(CODEC.encode(values), len(values))


def whole(values: torch.Tensor) -> list[tuple[int, int]]:
    return [(0, len(values))]


@pytest.mark.parametrize("decay", [1.0, 0.95, 0.0])
def test_error_feedback_follows_its_equation(decay: float) -> None:
    feedback, error = ErrorFeedback(CODEC, SIZE, decay), torch.zeros(SIZE)
    for number in range(5):
        values = vector(number)
        wanted = error * decay + values
        assert torch.equal(feedback.send(number, 0, values), wanted)
        feedback.acknowledge(number, whole(values))
        error = wanted - decoded(wanted)
        assert torch.equal(feedback.residual(), error)
        assert error.any()


def test_a_round_that_delivers_nothing_leaves_the_error_as_it_was() -> None:
    feedback = ErrorFeedback(CODEC, SIZE, decay=0.5)
    feedback.send(0, 0, vector(0))
    feedback.acknowledge(0, whole(vector(0)))
    before = feedback.residual()
    first = feedback.send(1, 0, vector(1))
    feedback.acknowledge(1, ())
    assert torch.equal(feedback.residual(), before)
    assert torch.equal(feedback.send(2, 0, vector(1)), first)


def test_only_the_slices_that_were_delivered_count() -> None:
    size = 3 * ALIGNMENT
    feedback = ErrorFeedback(CODEC, size)
    feedback.send(0, 0, vector(0, size))
    feedback.acknowledge(0, [(0, size)])
    before = feedback.residual()
    wanted = feedback.send(1, 0, vector(1, size))
    middle = slice(ALIGNMENT, 2 * ALIGNMENT)
    feedback.acknowledge(1, [(middle.start, middle.stop)])
    after = before.clone()
    after[middle] = wanted[middle] - decoded(wanted[middle])
    assert torch.equal(feedback.residual(), after)


def test_the_residual_is_sent_in_only_one_of_two_rounds_under_way() -> None:
    feedback = ErrorFeedback(CODEC, SIZE)
    feedback.send(0, 0, vector(0))
    feedback.acknowledge(0, whole(vector(0)))
    error = feedback.residual()
    assert torch.equal(feedback.send(1, 0, vector(1)), error + vector(1))
    assert torch.equal(feedback.send(2, 0, vector(2)), vector(2))
    assert torch.equal(feedback.residual(), error), "nothing has arrived yet"
    feedback.acknowledge(1, whole(vector(1)))
    feedback.acknowledge(2, whole(vector(2)))
    lost = error + vector(1) - decoded(error + vector(1)), vector(2) - decoded(vector(2))
    assert torch.equal(feedback.residual(), lost[0] + lost[1])


def test_a_round_that_begins_again_takes_the_residual_back() -> None:
    feedback = ErrorFeedback(CODEC, SIZE)
    feedback.send(0, 0, vector(0))
    feedback.acknowledge(0, whole(vector(0)))
    first = feedback.send(1, 0, vector(1))
    feedback.send(2, 0, vector(2))
    assert torch.equal(feedback.send(1, 0, vector(1)), first)
    before = feedback.residual()
    feedback.acknowledge(2, whole(vector(2)))
    assert torch.equal(feedback.residual(), before), "a later round than the one that begins again is over"


def test_each_fragment_has_its_part_of_the_residual() -> None:
    feedback = ErrorFeedback(CODEC, 2 * SIZE)
    for number, start in enumerate((0, SIZE)):
        feedback.send(number, start, vector(number))
        feedback.acknowledge(number, whole(vector(number)))
    lost = [vector(number) - decoded(vector(number)) for number in range(2)]
    assert torch.equal(feedback.residual(), torch.cat(lost))
    assert torch.equal(feedback.send(2, SIZE, vector(2)), lost[1] + vector(2))


def test_residuals_that_are_not_finite_are_dropped() -> None:
    feedback = ErrorFeedback(CODEC, SIZE)
    feedback.send(0, 0, torch.full((SIZE,), torch.nan))
    feedback.acknowledge(0, ())
    assert torch.equal(feedback.residual(), torch.zeros(SIZE))


def test_a_round_that_nothing_was_sent_to_changes_nothing() -> None:
    feedback = ErrorFeedback(CODEC, SIZE)
    feedback.acknowledge(0, [(0, SIZE)])
    assert not feedback.residual().any()


@pytest.mark.parametrize(
    "wrong", [torch.zeros(SIZE + 1), torch.zeros(SIZE, dtype=torch.float64), torch.full((SIZE,), torch.inf)]
)
def test_a_residual_of_another_model_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(IntegrityError, match="not a residual of this model"):
        ErrorFeedback(CODEC, SIZE).restore(wrong)


@pytest.mark.parametrize("name", ["int4", "fp4"])
def test_a_mean_of_four_bits_travels_finer_to_hold_what_was_fed_back(name: str) -> None:
    """The relative error of the sum of all transmitted means, after fifty rounds of eight
    workers."""
    codec, workers, size = get_codec(name), 8, 4096
    common = vector(0, size) * vector(1, size).exp()
    feedback = [ErrorFeedback(codec, size) for _ in range(workers)]
    results = {"as contributions": codec, "finer": result_codec(codec)}
    sums = {each: torch.zeros(size) for each in (*results, "true")}
    for number in range(50):
        rows = []
        for worker in range(workers):
            values = common * (1 + vector(number * workers + worker, size))
            sums["true"] += values / workers
            sent = feedback[worker].send(number, 0, values)
            feedback[worker].acknowledge(number, whole(values))
            rows.append(codec.decode(codec.encode(sent), size))
        mean = torch.stack(rows).mean(dim=0)
        for each, result in results.items():
            sums[each] += result.decode(result.encode(mean), size)
    off = {each: float((sums[each] - sums["true"]).norm() / sums["true"].norm()) for each in results}
    assert off["finer"] < 0.01
    assert off["as contributions"] > 3 * off["finer"]
