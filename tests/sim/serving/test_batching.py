"""Answers over shared chains equal the answers that each request would get alone."""

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from swarmnet_client.batching import continuous_batching as batching
from swarmnet_client.batching.answers import Answer, Request
from swarmnet_client.batching.continuous_batching import Batcher, BatchLimits, Overloaded
from swarmnet_client.batching.prefix_reuse import MIN_SHARED, RunningSequence
from swarmnet_client.batching.sequences import IDLE_S
from swarmnet_client.model.drafts.draft_model import DraftModel
from swarmnet_protocols.errors import NoRoute, OutOfResources, SwarmnetError, Unreachable
from tests.defences import defence, replacing, yes
from tests.support.swarm.batching import all_answered, answered, batcher, head_of, request
from tests.support.swarm.swarm_lab import Lab, Reference, simulate

SPANS = {"a": (0, 2), "b": (2, 4), "c": (4, 6)}
TOKENS = 10


def prompts(count: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(2, 97) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def test_sequences_of_mixed_lengths_give_what_each_gives_alone(reference: Reference) -> None:
    wanted = [
        request(ids, 1 + number % TOKENS) for number, ids in enumerate([*prompts(40), prompts(1, 300)[0]])
    ]

    async def scenario(lab: Lab) -> list[list[int]]:
        await lab.start_all(SPANS)
        async with batcher(lab, BatchLimits(active=12, waiting=99)) as (running, _):
            return await all_answered(running, wanted)

    expected = [reference.greedy(list(each.ids), each.max_tokens) for each in wanted]
    assert simulate(reference, scenario) == expected


def test_a_long_prompt_that_comes_late_does_not_change_the_others(reference: Reference) -> None:
    long = [2 + number % 90 for number in range(480)]

    async def scenario(lab: Lab) -> list[list[int]]:
        await lab.start_all(SPANS)
        async with batcher(lab) as (running, _), asyncio.TaskGroup() as tasks:
            late: list[asyncio.Task[list[int]]] = []

            def at_third(answer: Answer) -> None:
                if len(answer.ids) == 3:
                    late.append(tasks.create_task(answered(running, request(long, 4))))

            early = tasks.create_task(answered(running, request([5, 6], 40)))
            watched = await answered(running, request([7, 8, 9], 30), at_third)
            return [await early, watched, await late[0]]

    expected = [reference.greedy([5, 6], 40), reference.greedy([7, 8, 9], 30), reference.greedy(long, 4)]
    assert simulate(reference, scenario) == expected


@pytest.mark.parametrize("moment", [0, 1, 5])
def test_a_node_that_dies_changes_no_answer(reference: Reference, moment: int) -> None:
    wanted = [request(ids, TOKENS) for ids in prompts(6)]
    wanted += [request(ids, TOKENS, temperature=1.0, seed=3) for ids in prompts(2)]

    async def scenario(lab: Lab, *, fails: bool) -> tuple[list[list[int]], int]:
        await lab.start_all(SPANS)
        await lab.start("b2", lab.hosting((2, 4)))
        async with batcher(lab) as (running, _):

            def strike(answer: Any) -> None:
                if fails and len(answer.ids) == moment + 1:
                    (group,) = running._groups
                    victim = group.report.route[1][0]
                    lab.network.crash(victim)

            first = answered(running, wanted[0], strike)
            rest = all_answered(running, wanted[1:])
            one, others = await asyncio.gather(first, rest)
            return [one, *others], running.failovers

    undisturbed, _ = simulate(reference, lambda lab: scenario(lab, fails=False))
    disturbed, failovers = simulate(reference, lambda lab: scenario(lab, fails=True))
    assert failovers == 1
    assert disturbed == undisturbed
    assert undisturbed[:6] == [reference.greedy(list(each.ids), TOKENS) for each in wanted[:6]]


def repetitive(count: int, tokens: int = 40) -> list[Request]:
    """Requests whose answers repeat themselves, with a few surprises: by biases, as the tiny
    model's own choices never do."""
    biases = tuple((token, 6.0) for token in (11, 12, 13))
    styles = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.0, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    ]
    return [
        request(ids, tokens, seed=number, biases=biases, **styles[number % len(styles)])
        for number, ids in enumerate(prompts(count))
    ]


def test_speculation_needs_fewer_trips_for_the_same_answers(reference: Reference) -> None:
    counted: dict[bool, int] = {}

    async def scenario(lab: Lab, *, speculate: bool) -> list[tuple[list[int], int]]:
        await lab.start_all(SPANS)
        async with batcher(lab) as (running, _):
            found = []
            for wanted in repetitive(6):
                async with running.answer(replace(wanted, speculate=speculate)) as answer:
                    found.append(([token.id async for token in answer], answer.trips))
            hosts = [node.host for node in lab.nodes.values() if node.host is not None]
            counted[speculate] = sum(host.counters.answered for host in hosts)
            return found

    plain = simulate(reference, lambda lab: scenario(lab, speculate=False))
    fewer = simulate(reference, lambda lab: scenario(lab, speculate=True))
    tokens = sum(len(tokens) for tokens, _ in plain)
    assert counted[False] == tokens
    assert 0.95 * tokens < counted[True] <= tokens, "hosts count what clients keep of their drafts"
    assert [tokens for tokens, _ in plain] == [tokens for tokens, _ in fewer]
    assert all(trips == len(tokens) for tokens, trips in plain)
    assert sum(trips for _, trips in fewer) < 0.8 * sum(trips for _, trips in plain)


def draft_model(reference: Reference, *, is_right: bool) -> DraftModel:
    """The model of the swarm, or one of the same shape with other weights, whose tokens take no
    time."""
    model = reference.local.load_whole(dtype=torch.float32, device=torch.device("cpu"))
    if not is_right:
        torch.manual_seed(3)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    return DraftModel(model, clock=lambda: 0.0)


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("moment", [0, 9])
def test_a_draft_model_saves_trips_and_changes_no_answer(
    reference: Reference, moment: int, *, is_right: bool
) -> None:
    """Without a failure, and with a node that dies at its ninth token. Prompts are random: they
    have nothing to look up."""
    wanted = [
        request(ids, TOKENS, temperature=number % 2, seed=number) for number, ids in enumerate(prompts(6))
    ]

    async def scenario(lab: Lab, drafts: DraftModel | None) -> tuple[list[list[int]], int, int]:
        await lab.start_all(SPANS)
        await lab.start("b2", lab.hosting((2, 4)))
        trips = []
        async with batcher(lab, draft_model=drafts) as (running, _):

            def strike(answer: Answer) -> None:
                if moment and len(answer.ids) >= moment and running.failovers == 0:
                    (group,) = running._groups
                    lab.network.crash(group.report.route[1][0])

            async def ask(each: Request) -> list[int]:
                async with running.answer(each) as answer:
                    tokens = []
                    async for token in answer:
                        tokens.append(token.id)
                        strike(answer)
                    trips.append(answer.trips)
                    return tokens

            found = await asyncio.gather(*map(ask, wanted))
            return found, sum(trips), running.failovers

    plain, plain_trips, _ = simulate(reference, lambda lab: scenario(lab, None))
    drafts = draft_model(reference, is_right=is_right)
    drafted, trips, failovers = simulate(reference, lambda lab: scenario(lab, drafts))
    drafts.close()
    assert drafted == plain
    assert (failovers > 0) == (moment > 0)
    if is_right:
        assert trips < 0.7 * plain_trips
    else:
        assert trips <= plain_trips


@pytest.mark.parametrize("moment", [3, 9, 20])
def test_a_node_that_dies_changes_no_speculative_answer(reference: Reference, moment: int) -> None:
    wanted = repetitive(6)

    async def scenario(lab: Lab, *, fails: bool) -> tuple[list[list[int]], int]:
        await lab.start_all(SPANS)
        await lab.start("b2", lab.hosting((2, 4)))
        async with batcher(lab) as (running, _):

            def strike(answer: Answer) -> None:
                if fails and len(answer.ids) >= moment and running.failovers == 0:
                    (group,) = running._groups
                    lab.network.crash(group.report.route[1][0])

            first = answered(running, wanted[0], strike)
            rest = all_answered(running, wanted[1:])
            one, others = await asyncio.gather(first, rest)
            return [one, *others], running.failovers

    undisturbed, _ = simulate(reference, lambda lab: scenario(lab, fails=False))
    disturbed, failovers = simulate(reference, lambda lab: scenario(lab, fails=True))
    assert failovers >= 1
    assert disturbed == undisturbed


def test_a_seeded_answer_does_not_depend_on_other_requests(reference: Reference) -> None:
    mine = request([9, 8, 7], TOKENS, temperature=1.5, top_p=0.9, seed=42)
    others = [request(ids, TOKENS, temperature=2.0, seed=number) for number, ids in enumerate(prompts(7))]

    async def scenario(lab: Lab, wanted: list[Any]) -> list[int]:
        await lab.start_all(SPANS)
        async with batcher(lab) as (running, _):
            return (await all_answered(running, wanted))[-1]

    alone = simulate(reference, lambda lab: scenario(lab, [mine]))
    assert simulate(reference, lambda lab: scenario(lab, [*others, mine])) == alone
    another = replace(mine, sampling=replace(mine.sampling, seed=43))
    assert simulate(reference, lambda lab: scenario(lab, [another])) != alone


def test_a_request_that_leaves_frees_its_sequence_at_once(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(SPANS)
        async with batcher(lab, BatchLimits(active=1, waiting=1)) as (running, _):
            async with running.answer(request([5, 6, 7], 400)) as answer:
                waiting = asyncio.create_task(answered(running, request([1, 2], 3)))
                async for _token in answer:
                    if len(answer.ids) == 2:
                        assert (running.load.active, running.load.waiting) == (1, 1)
                        break
            assert (running.load.active, running.load.waiting) == (1, 0)
            assert await waiting == reference.greedy([1, 2], 3)
            assert running.load.active == 0
            await asyncio.sleep(5)  # the steps that were in flight have returned
            forwards = lab.nodes["a"].status().host.forwards
            await asyncio.sleep(20)
            assert lab.nodes["a"].status().host.forwards == forwards
            assert len(answer.ids) <= 3

    simulate(reference, scenario)


def test_a_waiting_request_may_leave(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(SPANS)
        async with (
            batcher(lab, BatchLimits(active=1, waiting=2)) as (running, _),
            running.answer(request([5], 4)) as first,
        ):
            gone = asyncio.create_task(answered(running, request([6], 4)))
            await asyncio.sleep(0)
            assert running.load.waiting == 1
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            assert running.load.waiting == 0
            assert [token.id async for token in first] == reference.greedy([5], 4)

    simulate(reference, scenario)


@defence("the queue is bounded", off=replacing(batching, "may_wait", yes))
def test_requests_beyond_the_sequences_and_the_queue_are_refused(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(SPANS)
        async with batcher(lab, BatchLimits(active=2, waiting=1)) as (running, _):
            tasks = [asyncio.create_task(answered(running, request([number], 5))) for number in (5, 6, 7, 8)]
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert done[:3] == [reference.greedy([number], 5) for number in (5, 6, 7)]
            assert isinstance(done[3], Overloaded)
            assert 1 <= done[3].retry_after_s <= 60

    simulate(reference, scenario)


def for_any_owner(patch: pytest.MonkeyPatch) -> None:
    shared = RunningSequence.shared

    def shared_with_all(sequence: RunningSequence, request: Any) -> int:
        sequence.owner = request.owner
        return shared(sequence, request)

    patch.setattr(RunningSequence, "shared", shared_with_all)


@defence("caches are reused for their owner only", off=for_any_owner)
def test_the_next_turn_of_a_conversation_sends_only_what_is_new(reference: Reference) -> None:
    history = [2 + number % 50 for number in range(3 * MIN_SHARED)]

    async def scenario(lab: Lab) -> None:
        await lab.start_all(SPANS)
        async with batcher(lab) as (running, _):
            first = await answered(running, request(history, 6))
            assert first == reference.greedy(history, 6)
            longer = [*history, *first, 11, 12]
            async with running.answer(request(longer, 5)) as answer:
                assert [token.id async for token in answer] == reference.greedy(longer, 5)
                # the last token of an answer is never sent
                assert answer.reused == len(history) + 5
            stranger = replace(request(longer, 5), owner="another caller")
            async with running.answer(stranger) as answer:
                assert [token.id async for token in answer] == reference.greedy(longer, 5)
                assert answer.reused == 0
            shorter = [*history[:-3], 90, 91]
            async with running.answer(request(shorter, 5)) as answer:
                assert [token.id async for token in answer] == reference.greedy(shorter, 5)
                assert answer.reused == len(history) - 3

    simulate(reference, scenario)


def test_a_reused_sequence_frees_its_old_caches(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(SPANS)
        async with batcher(lab, BatchLimits(active=1)) as (running, _):
            await answered(running, request(list(range(2, 90)) * 5, 2))
            large = lab.cache_bytes()["a"]
            await answered(running, request([5, 6], 2))
            assert lab.cache_bytes()["a"] < large / 4

    simulate(reference, scenario)


def test_an_idle_chain_is_closed_and_the_next_answer_opens_another(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all(SPANS)
        async with batcher(lab) as (running, _):
            await answered(running, request([5], 3))
            assert lab.sessions() == {"a": 1, "b": 1, "c": 1}
            await asyncio.sleep(2 * IDLE_S + 5)
            assert lab.sessions() == {}
            assert await answered(running, request([5], 3)) == reference.greedy([5], 3)

    simulate(reference, scenario, limit_s=400)


def test_blocks_without_a_host_are_an_error_for_every_waiting_request(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 4)))
        async with batcher(lab) as (running, _):
            tasks = [asyncio.create_task(answered(running, request([number], 5))) for number in (5, 6)]
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(error) for error in done] == [NoRoute, NoRoute]
            await lab.start("b", lab.hosting((4, 6)))
            await asyncio.sleep(10)
            assert await answered(running, request([7], 5)) == reference.greedy([7], 5)

    simulate(reference, scenario)


@pytest.mark.parametrize("error", [Unreachable("broke"), OutOfResources("full"), SwarmnetError("odd")])
def test_the_answers_of_a_broken_chain_continue_on_another(
    reference: Reference, error: SwarmnetError
) -> None:
    class Breaking:
        """A chain that breaks after some steps."""

        def __init__(self, chain: Any, steps: int) -> None:
            self._chain, self._left = chain, steps
            self.report = chain.report
            self.lengths = chain.lengths

        async def forward(self, *step: Any) -> Any:
            self._left -= 1
            if self._left < 0:
                raise error
            return await self._chain.forward(*step)

    async def scenario(lab: Lab) -> tuple[list[list[int]], int]:
        await lab.start_all(SPANS)
        opened = 0
        async with lab.client() as swarm:

            @asynccontextmanager
            async def open_chain(*_: Any) -> Any:
                nonlocal opened
                opened += 1
                async with lab.chain(swarm) as chain:
                    yield Breaking(chain, 4) if opened <= 3 else chain

            async with Batcher(head_of(reference), open_chain, BatchLimits()).running() as running:
                return await all_answered(running, [request([5, 6, 7], 20), request([8], 20)]), opened

    answers, opened = simulate(reference, scenario)
    assert answers == [reference.greedy([5, 6, 7], 20), reference.greedy([8], 20)]
    assert opened >= 4


def test_an_answer_without_progress_is_given_up(reference: Reference) -> None:
    async def scenario(lab: Lab) -> int:
        opened = 0

        @asynccontextmanager
        async def open_chain(*_: Any) -> Any:
            nonlocal opened
            opened += 1
            raise Unreachable("never works")
            yield

        async with Batcher(head_of(reference), open_chain, BatchLimits()).running() as running:
            with pytest.raises(Unreachable, match="never works"):
                await answered(running, request([5], 3))
        return opened

    assert simulate(reference, scenario) == 3
