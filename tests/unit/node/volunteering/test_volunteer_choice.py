"""A volunteer chooses its work, and seldom changes its mind."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnet_node.volunteering.choice import (
    CONFIRM_LOOKS,
    HOST,
    PAUSE_S,
    RETRY_S,
    TRAIN,
    Duty,
    NeedLevel,
    Offer,
    Seen,
    SeenModel,
    VolunteerMemory,
    choices,
    decide,
    is_over,
)
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.training.open_jobs import JobOutline, OpenJob
from tests.defences import defence, replacing

SERVED = SeenModel("tiny", 30, missing=0, thin=0, hosts=3)
THIN = replace(SERVED, thin=30, hosts=1)
LACKING = replace(SERVED, missing=10)


def open_job(
    workers: int = 0,
    *,
    id: str = "ab" * 32,
    least: int = 1,
    most: int = 8,
    needs_user: bool = False,
    is_done: bool = False,
) -> OpenJob:
    outline = JobOutline(id, "corpus", 9, least, most, needs_user, ())
    return OpenJob(outline, frozenset(PeerId(str(each)) for each in range(workers)), is_done)


JOB = open_job()
HOSTS, TRAINS = Duty(HOST, "tiny"), Duty(TRAIN, JOB.outline.id)
GPU = Offer(has_gpu=True)


def chosen(seen: Seen, offer: Offer = Offer()) -> Duty | None:  # noqa: B008 - frozen
    choice, _ = decide(seen, offer, VolunteerMemory(), now=0.0, rng=random.Random(0))
    return choice.work if choice else None


@pytest.mark.parametrize(
    ("model", "job", "with_cpu", "with_gpu"),
    [
        (LACKING, JOB, HOSTS, TRAINS),
        (LACKING, open_job(1), HOSTS, HOSTS),
        (THIN, JOB, TRAINS, TRAINS),
        (THIN, open_job(1), HOSTS, HOSTS),
        (THIN, open_job(least=4), HOSTS, TRAINS),
        (THIN, open_job(3, least=4), TRAINS, TRAINS),
        (SERVED, open_job(7), TRAINS, TRAINS),
        (SERVED, open_job(8), HOSTS, HOSTS),
        (SERVED, open_job(needs_user=True), HOSTS, HOSTS),
        (SERVED, open_job(is_done=True), HOSTS, HOSTS),
        (replace(SERVED, load=0.8), open_job(1), HOSTS, HOSTS),
        (replace(LACKING, is_wanted=False), open_job(1), TRAINS, TRAINS),
    ],
)
def test_a_volunteer_does_what_the_swarm_needs_most(
    model: SeenModel, job: OpenJob, with_cpu: Duty, with_gpu: Duty
) -> None:
    seen = Seen([model], [job])
    assert (chosen(seen), chosen(seen, GPU)) == (with_cpu, with_gpu)


def test_a_machine_of_little_memory_trains_nothing() -> None:
    assert chosen(Seen([SERVED], [JOB]), Offer(memory_bytes=300e6)) == HOSTS
    assert chosen(Seen([], [JOB]), Offer(memory_bytes=300e6)) is None


def looks(
    seen: Seen, memory: VolunteerMemory, times: range, every_s: float = 60.0
) -> tuple[list[Duty], VolunteerMemory]:
    """The switches of a volunteer that sees the same at every look."""
    rng, found = random.Random(0), []
    for number in times:
        choice, memory = decide(seen, Offer(), memory, now=number * every_s, rng=rng)
        found += [choice.work] if choice else []
    return found, memory


@defence("a need must last", off=replacing("swarmnet_node.volunteering.choice", "CONFIRM_LOOKS", 1))
def test_a_need_is_seen_at_several_looks_before_a_switch() -> None:
    alone = Seen([replace(SERVED, hosts=0)], [JOB])
    hosting = VolunteerMemory(HOSTS)
    assert looks(alone, hosting, range(CONFIRM_LOOKS - 1))[0] == []
    assert looks(alone, hosting, range(CONFIRM_LOOKS))[0] == [TRAINS]


def test_a_volunteer_switches_at_most_once_an_hour() -> None:
    training = VolunteerMemory(TRAINS, switched_at=0.0)
    needs_host = Seen([LACKING], [open_job(2)])
    per_hour = int(PAUSE_S / 60)
    assert looks(needs_host, training, range(1, per_hour))[0] == []
    assert looks(needs_host, training, range(1, 2 * per_hour))[0] == [HOSTS]


def test_work_that_is_over_is_left_at_once() -> None:
    training = VolunteerMemory(TRAINS, switched_at=0.0)
    assert looks(Seen([SERVED], [open_job(is_done=True)]), training, range(1, 2))[0] == [HOSTS]
    assert looks(Seen([SERVED], []), training, range(1, 100))[0] == [], "the directory is empty"


def test_work_that_failed_here_is_tried_again_later() -> None:
    memory = VolunteerMemory(TRAINS).after_failure(TRAINS, now=0.0)
    assert decide(Seen([], [JOB]), Offer(), memory, now=RETRY_S - 1, rng=random.Random(0))[0] is None
    again, _ = decide(Seen([], [JOB]), Offer(), memory, now=RETRY_S, rng=random.Random(0))
    assert again is not None


def test_of_many_volunteers_about_as_many_switch_as_a_job_lacks() -> None:
    seen = Seen([replace(SERVED, hosts=19)], [open_job(least=2)])
    memory, rng = VolunteerMemory(HOSTS, wanted=TRAINS, looks=CONFIRM_LOOKS), random.Random(0)
    drawn = [decide(seen, Offer(), memory, now=1e9, rng=rng)[0] is not None for _ in range(200)]
    assert 10 <= sum(drawn) <= 30, "2 of each 20"


MODELS = st.builds(
    SeenModel,
    st.sampled_from(["tiny", "large"]),
    st.just(30),
    missing=st.integers(0, 30),
    thin=st.integers(0, 30),
    hosts=st.integers(0, 50),
    load=st.floats(0, 1),
    is_wanted=st.booleans(),
)
JOBS = st.builds(
    open_job,
    st.integers(0, 10),
    id=st.sampled_from(["ab" * 32, "cd" * 32]),
    least=st.integers(1, 4),
    most=st.integers(4, 8),
    needs_user=st.booleans(),
    is_done=st.booleans(),
)
SWARMS = st.builds(Seen, st.lists(MODELS, max_size=2), st.lists(JOBS, max_size=2))


@given(st.lists(SWARMS, min_size=1, max_size=40), st.booleans(), st.integers(0, 1 << 30))
def test_a_volunteer_never_flaps(seen: list[Seen], has_gpu: bool, seed: int) -> None:
    """Whatever the swarm looks like, work that goes on is left at most once an hour, and only for
    more urgent work."""
    memory, rng, left_at = VolunteerMemory(), random.Random(seed), []
    for minute, each in enumerate(seen):
        offer, before, now = Offer(has_gpu=has_gpu), memory.work, 60.0 * minute
        urgency = {choice.work: choice.urgency for choice in choices(each, offer)}
        choice, memory = decide(each, offer, memory, now=now, rng=rng)
        goes_on = before is not None and not is_over(each, before)
        if choice is not None and goes_on:
            assert before is not None
            hosted = max((u for work, u in urgency.items() if work.role == HOST), default=NeedLevel.SPARE)
            assert choice.urgency > urgency.get(before, hosted if before.role == HOST else NeedLevel.SPARE)
            left_at.append(now)
    assert all(later - earlier >= PAUSE_S for earlier, later in pairwise(left_at))


def test_the_memory_of_a_volunteer_survives_a_restart() -> None:
    memory = VolunteerMemory(TRAINS, "why", 5.0).after_failure(HOSTS, 7.0)
    for each in (memory, VolunteerMemory(), VolunteerMemory(HOSTS, "why")):
        assert VolunteerMemory.from_json(each.to_json()) == each
    assert VolunteerMemory(TRAINS, switched_at=0.0).at_start(PAUSE_S - 1).work == TRAINS
    assert VolunteerMemory(TRAINS, switched_at=0.0).at_start(PAUSE_S).work is None


@pytest.mark.parametrize("text", ["", "[]", '{"work": 3}', '{"work": null, "reason": "", "failed": [[1]]}'])
def test_a_damaged_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        VolunteerMemory.from_json(text)
