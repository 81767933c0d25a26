"""Prompts that begin alike are computed once, for the same owner alone, and a failover changes no
token."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from swarmnet_client.batching.answers import Answer, Request
from swarmnet_client.batching.continuous_batching import BatchLimits
from swarmnet_client.batching.prefix_reuse import FRESH
from swarmnet_client.chain.chain import Chain
from swarmnet_node.hosting.client_limits import ClientLimits
from swarmnet_protocols.arrays import as_tensor
from swarmnet_protocols.session.steps import Row
from tests.support.models.rounding import assert_near
from tests.support.swarm.batching import all_answered, answered, batcher, request
from tests.support.swarm.swarm_lab import Lab, Reference, load_family, simulate

SPANS = {"a": (0, 2), "b": (2, 4), "c": (4, 6)}
SYSTEM = [2 + number * 7 % 90 for number in range(200)]
OWN = 8
USERS = 15
TOKENS = 4
EVENTS = 20


def positions(lab: Lab, name: str = "a") -> int:
    """Positions that a node has computed."""
    return lab.nodes[name].engine.counters.positions


def prompt(user: int) -> list[int]:
    return [*SYSTEM, *[2 + (user * 11 + number * 5) % 90 for number in range(OWN)]]


def expected(reference: Reference, users: int = USERS) -> list[list[int]]:
    return [reference.greedy(prompt(user), TOKENS) for user in range(users)]


def test_a_common_prompt_is_computed_once_for_later_sessions(
    reference: Reference,
) -> None:
    async def scenario(lab: Lab) -> tuple[list[list[int]], int, int]:
        await lab.start_all(SPANS)
        async with batcher(lab) as (running, _):
            first = await answered(running, request(prompt(0), TOKENS))
            alone = positions(lab)
            rest = await all_answered(running, [request(prompt(user), TOKENS) for user in range(1, USERS)])
            return [first, *rest], alone, positions(lab) - alone

    answers, alone, rest = simulate(reference, scenario)
    assert answers == expected(reference)
    assert alone >= len(SYSTEM)
    assert rest <= (USERS - 1) * (OWN + TOKENS + 1)


def test_a_common_prompt_is_computed_once_for_simultaneous_sessions(reference: Reference) -> None:
    async def scenario(lab: Lab) -> tuple[list[list[int]], int]:
        await lab.start_all(SPANS)
        async with batcher(lab) as (running, _):
            answers = await all_answered(running, [request(prompt(user), TOKENS) for user in range(USERS)])
            return answers, positions(lab)

    answers, computed = simulate(reference, scenario)
    assert answers == expected(reference)
    assert computed <= len(SYSTEM) + USERS * (OWN + TOKENS + 1)


def test_a_prompt_whose_leader_leaves_is_answered(reference: Reference) -> None:
    async def scenario(lab: Lab) -> list[int]:
        await lab.start_all(SPANS)
        async with batcher(lab) as (running, _):
            leader = asyncio.create_task(answered(running, request(prompt(0), TOKENS)))
            await asyncio.sleep(0.01)
            follower = asyncio.create_task(answered(running, request(prompt(1), TOKENS)))
            await asyncio.sleep(0.005)
            leader.cancel()
            return await follower

    assert simulate(reference, scenario) == reference.greedy(prompt(1), TOKENS)


def test_no_caches_are_reused_for_another_owner(reference: Reference) -> None:
    """At no moment: not kept ones, nor those of an answer under way, nor of a sequence that has
    just been given to another owner."""

    async def scenario(lab: Lab) -> None:
        await lab.start_all(SPANS)
        async with batcher(lab, BatchLimits(active=2)) as (running, _):
            await answered(running, replace(request(prompt(0), TOKENS), owner="one"))
            wanted = [replace(request(prompt(0), TOKENS), owner=owner) for owner in ("two", "one", "three")]

            async def reused(each: Request) -> int:
                async with running.answer(each) as answer:
                    assert [token.id async for token in answer] == reference.greedy(prompt(0), TOKENS)
                    return answer.reused

            assert await asyncio.gather(*(reused(each) for each in wanted)) == [0, len(prompt(0)) - 1, 0]

    simulate(reference, scenario)


@pytest.mark.matrix
@pytest.mark.parametrize("moment", [0, 1, 3])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_node_that_dies_changes_no_answer_with_a_reused_prompt(
    reference: Reference, moment: int, victim: int
) -> None:
    async def scenario(lab: Lab) -> tuple[list[list[int]], int, int]:
        await lab.start_all(SPANS)
        for name, span in SPANS.items():
            await lab.start(f"{name}2", lab.hosting(span))
        async with batcher(lab) as (running, _):
            first = await answered(running, request(prompt(0), TOKENS))
            dead: list[str] = []

            def strike(answer: Answer) -> None:
                if len(answer.ids) == moment + 1 and not dead:
                    (group,) = running._groups
                    dead.append(group.report.route[victim][0])
                    lab.network.crash(dead[0])

            second = answered(running, request(prompt(1), TOKENS), strike)
            others = all_answered(running, [request(prompt(user), TOKENS) for user in range(2, USERS)])
            rest = await asyncio.gather(second, others)
            (name,) = [each for each in SPANS if lab.peer_id(each) in dead or lab.peer_id(f"{each}2") in dead]
            new = f"{name}2" if lab.peer_id(name) in dead else name
            return [first, rest[0], *rest[1]], running.failovers, positions(lab, new)

    answers, failovers, replayed = simulate(reference, scenario)
    assert answers == expected(reference)
    assert failovers == 1
    assert replayed <= 2 * len(SYSTEM) + USERS * (OWN + 2 * TOKENS), (
        "a replay sends a common prompt twice at most"
    )


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_hop_in_place_of_a_lost_one_computes_only_answers_under_way(
    reference: Reference, victim: int
) -> None:
    """All kept caches but one at most are given up: later prompts begin anew, and the hosts that
    are left free them."""
    old = [[3 + number * (user + 2) % 80 for number in range(120)] for user in range(3)]

    async def scenario(lab: Lab) -> int:
        await lab.start_all(SPANS)
        for name, span in SPANS.items():
            await lab.start(f"{name}2", lab.hosting(span))
        async with batcher(lab) as (running, _):
            for ids in old:
                await answered(running, request(ids, TOKENS))
            (group,) = running._groups
            lost, *_ = group.report.route[victim]

            def strike(answer: Answer) -> None:
                if len(answer.ids) == 1:
                    lab.network.crash(lost)

            assert await answered(running, request(prompt(0), TOKENS), strike) == expected(reference, 1)[0]
            assert running.failovers == 1
            names = [
                next(name for name in lab.nodes if lab.peer_id(name) == hop[0]) for hop in group.report.route
            ]
            replayed = positions(lab, names[victim])
            assert not group.shared(request(old[0], 1))
            assert await answered(running, request(old[0], TOKENS)) == reference.greedy(old[0], TOKENS)
            held = {len(each.held) for each in group._sequences}
            assert held <= {0, 1, len(prompt(0)) + TOKENS - 1, len(old[0]) + TOKENS - 1}
            assert len({lab.cache_bytes()[name] for name in names}) == 1
            return replayed

    assert simulate(reference, scenario) < len(prompt(0)) + 2 * len(old[0])


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_chain_without_an_answer_under_way_is_repaired(reference: Reference, victim: int) -> None:
    """The newest step is all of its sequence, so the log keeps another one: its replay tells a new
    hop how many steps came before."""
    other = SYSTEM[::-1][:20]

    async def scenario(lab: Lab) -> list[list[int]]:
        await lab.start_all(SPANS)
        for name, span in SPANS.items():
            await lab.start(f"{name}2", lab.hosting(span))
        async with batcher(lab) as (running, _):
            before = await answered(running, request(prompt(0), TOKENS))
            assert await answered(running, request(other, 1)) == reference.greedy(other, 1)
            (group,) = running._groups
            lab.network.crash(group.report.route[victim][0])
            await asyncio.sleep(1.0)
            after = await answered(running, request(prompt(0), TOKENS))
            assert running.failovers == 1
            return [before, after]

    assert simulate(reference, scenario) == 2 * expected(reference, 1)


def test_kept_caches_are_dropped_when_the_positions_are_used_up(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnet_client.batching.continuous_batching.KEPT_POSITIONS", 300)
    others = [[3 + number * (user + 2) % 80 for number in range(120)] for user in range(6)]

    async def scenario(lab: Lab) -> None:
        await lab.start_all(SPANS)
        async with batcher(lab) as (running, _):
            for ids in others:
                assert await answered(running, request(ids, TOKENS)) == reference.greedy(ids, TOKENS)
                (group,) = running._groups
                assert sum(len(each.held) for each in group._sequences) <= 300 + len(group._sequences)
            held = [len(each.held) for each in group._sequences]
            assert [count for count in held if count > 1] == [120 + TOKENS - 1] * 2
            assert group.shared(request(others[-1], 1))
            assert not group.shared(request(others[0], 1))
            geometry = lab.nodes["a"].engine.stage.geometry
            dropped = sum(count == 1 for count in held)
            assert lab.cache_bytes()["a"] == 2 * geometry.bytes_for(123) + dropped * geometry.bytes_for(1)

    simulate(reference, scenario)


def test_a_step_frees_the_caches_that_it_replaces_before_it_forks(reference: Reference) -> None:
    """A session that holds all that its client may have goes on, with copies of no more positions
    than it needs."""
    unit = reference.stage(0, 6).geometry.bytes_for(64)

    async def scenario(lab: Lab) -> None:
        limits = ClientLimits(cache_share_per_client=1.0)
        await lab.start("a", lab.hosting((0, 6), limits=limits, max_cache_bytes=4 * unit))
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            for sequence in range(2):
                await chain.forward((Row(sequence, 0, 128, 1, sequence),), np.array(SYSTEM[:128]))
            assert lab.cache_bytes() == {"a": 4 * unit}
            hidden = await chain.forward((Row(1, 50, 1, 1, 0, rewrite=True),), np.array([5]))
            assert reference.next_token(hidden) == reference.greedy([*SYSTEM[:50], 5], 1)[0]
            assert lab.cache_bytes() == {"a": 3 * unit}

    simulate(reference, scenario)


def test_a_reused_prompt_of_a_recurrent_model_gives_the_same_answer(tmp_path: Path) -> None:
    recurrent = load_family("qwen3_5", tmp_path)
    wanted = [[5, 6, 7, 8, 9] * 20 + [10 + user] for user in range(4)]

    async def scenario(lab: Lab) -> tuple[list[list[int]], list[int]]:
        await lab.start_all({"a": (0, 2), "b": (2, 4)})
        async with batcher(lab) as (running, _):
            first = await answered(running, request(wanted[0], TOKENS))
            reused: list[int] = []
            rest = await asyncio.gather(
                *(
                    answered(running, request(ids, TOKENS), lambda answer: reused.append(answer.reused))
                    for ids in wanted[1:]
                )
            )
            return [first, *rest], reused

    answers, reused = simulate(recurrent, scenario)
    assert answers == [recurrent.greedy(ids, TOKENS) for ids in wanted]
    assert set(reused) == {100}


class Sessions:
    """Random work on one chain: sequences grow, go back, fork, are dropped; ``ids`` are those that
    each should hold."""

    def __init__(self, lab: Lab, rng: random.Random) -> None:
        self.lab = lab
        self.rng = rng
        self.ids: dict[int, list[int]] = {}

    def rows(self) -> tuple[tuple[Row, ...], list[int]]:
        rng, before = self.rng, dict(self.ids)
        rows, values = [], []
        for number in rng.sample(range(8), rng.randint(1, 3)):
            source = rng.choice([number, number, rng.randrange(8), FRESH])
            held = before.get(source, [])
            start = rng.choice([len(held), len(held), rng.randint(0, len(held))])
            if start > 300:
                source, held, start = FRESH, [], 0
            ids = [rng.randrange(2, 97) for _ in range(rng.choice([1, 1, 2, 70]))]
            rewrite = source != number or start < len(held)
            rows.append(Row(number, start, len(ids), 1, source, rewrite))
            values += ids
            self.ids[number] = [*held[:start], *ids]
        return tuple(rows), values

    def check(self) -> None:
        """The account of each node equals the caches that its sessions hold, to the byte."""
        for name, node in self.lab.nodes.items():
            caches = [cache for session in node.host.sessions for cache in session._sequences.caches.values()]
            engine = node.engine
            assert engine.cache_bytes == sum(cache.nbytes for cache in caches), name
            assert all(cache.reservation is not None for cache in caches), name
            assert all(
                session._sequences.caches.keys() <= self.ids.keys() for session in node.host.sessions
            ), name
            log = [session._outbox.log for session in node.host.sessions]
            for each, session in zip(log, node.host.sessions, strict=True):
                assert session._log_reservation.amount == each.nbytes, name
                if each._buffers is not None:
                    parts = {
                        key: size for one in each._buffers.values() for key, size in one.storages.items()
                    }
                    assert each._compacted_bytes == sum(parts.values()), name


def test_random_session_events_leak_no_cache_and_accounts_are_exact(reference: Reference, seed: int) -> None:
    """``--seeds 500`` makes ten thousand events."""
    whole = reference.stage(0, 6)

    async def scenario(lab: Lab) -> None:
        spans = {"a": (0, 2), "b": (2, 4), "c": (4, 6), "d": (0, 6)}
        await lab.start_all(spans)
        rng = random.Random(f"{seed}/events")
        chain: Chain
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            work = Sessions(lab, rng)
            for number in range(EVENTS):
                rows, values = work.rows()
                async with asyncio.TaskGroup() as tasks:
                    working = tasks.create_task(chain.forward(rows, np.array(values)))
                    if number % 12 == 8:
                        victim = rng.choice(sorted(lab.sessions()))
                        tasks.create_task(fail(lab, victim, rng.uniform(0, 0.1)))
                outputs = working.result()
                inputs = [work.ids[row.sequence] for row in rows]
                truth = whole.run_sequences(
                    torch.cat([as_tensor(reference.layers.embed(np.array(ids))) for ids in inputs]),
                    [len(ids) for ids in inputs],
                )
                last = torch.tensor([len(ids) for ids in inputs]).cumsum(0) - 1
                assert_near(as_tensor(outputs), truth[last])
                await asyncio.sleep(0.05)  # what was in flight has been counted
                work.check()
        await asyncio.sleep(lab.timing.client_silence_s + lab.timing.link_wait_s)
        assert lab.cache_bytes() == {}
        assert lab.sessions() == {}

    simulate(reference, scenario, seed=seed, limit_s=600.0)


async def fail(lab: Lab, name: str, after_s: float) -> None:
    """End a node; a new one takes its place later under another name."""
    await asyncio.sleep(after_s)
    host = lab.nodes[name].host
    await lab.stop(name)
    del lab.nodes[name]
    await lab.start(f"{name}+", lab.hosting((host.blocks.start, host.blocks.end)))
