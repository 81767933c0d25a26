"""A gateway of a swarm: models are opened on first use, and closed when idle or for others."""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from swarmnet.gateway import model_life, models
from swarmnet.gateway.errors import ApiError
from swarmnet.gateway.model_life import IDLE_S, Held, ModelLife, to_close
from swarmnet.gateway.models import LOOK_S, ModelTable, Reserve
from swarmnet.gateway.routing.router import Router
from swarmnet_client.batching.continuous_batching import BatchedModel, BatchLimits, Overloaded
from swarmnet_client.hosts.model_offers import DIGITS, ModelOffer, SwarmOffers, named
from swarmnet_client.model.load_options import LoadOptions
from swarmnet_protocols.directory.catalog import CatalogModel
from swarmnet_protocols.errors import Unreachable
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.session.adapters import Adapter
from tests.defences import defence, nothing, replacing
from tests.support.swarm.gateway import TEMPLATE, Caller, calling, continued, refused
from tests.support.swarm.swarm_lab import SWARM, Lab, Reference, simulate
from tests.support.swarm.tiny_swarm import load_tiny

MOST_WAITING = model_life.MAX_WAITING
MEMORY = 1000
"""Bytes that a model takes, as these tests say it."""
TOKENS = 6


@pytest.fixture(scope="module")
def beta(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder: Path = tmp_path_factory.mktemp("beta")
    return load_tiny(folder, blocks=4)


@asynccontextmanager
async def swarm_gateway(
    *labs: Lab,
    max_bytes: int = 2 * MEMORY,
    adapters: Mapping[str, Mapping[str, Adapter]] = MappingProxyType({}),
    opening: Callable[[], None] = lambda: None,
    router: Router | None = None,
    batches: Path | None = None,
) -> AsyncIterator[Caller]:
    """A gateway of the models of ``labs``, which share a network. ``opening`` is called before a
    model opens."""

    @asynccontextmanager
    async def opener(
        offer: ModelOffer, reserve: Reserve
    ) -> AsyncIterator[tuple[BatchedModel, Mapping[str, Adapter]]]:
        (lab,) = (each for each in labs if each.manifest == offer.manifest)
        opening()
        await reserve(MEMORY)
        load = LoadOptions.picked("float32", "cpu")
        async with (
            lab.client(f"client of {offer.name}") as hosts,
            BatchedModel.open(lab.reference.local, hosts, load, BatchLimits()) as batched,
        ):
            batched.tokenizer.chat_template = TEMPLATE
            yield batched, adapters.get(offer.name, {})

    async with labs[0].client("observer") as hosts:
        offers = SwarmOffers(hosts.directory, Rules(SWARM, Admission.OPEN), random.Random(0))
        async with (
            ModelTable.of_swarm(offers.read, opener, max_bytes, adapters) as table,
            calling(table, router=router, batches=batches) as caller,
        ):
            yield caller


def in_swarm(tiny: Reference, beta: Reference, scenario: Callable[[Lab, Lab], Awaitable[Any]]) -> Any:
    """Run a scenario in a network with hosts of two models."""

    async def within(lab: Lab) -> Any:
        other = lab.beside(beta)
        await lab.start_all({"a": (0, 4), "b": (4, 6)})
        await other.start("c", other.hosting((0, 4)))
        return await scenario(lab, other)

    return simulate(tiny, within, limit_s=2 * IDLE_S)


def name_of(lab: Lab) -> str:
    """The name of a model of which others have the same name."""
    return f"tiny@{lab.manifest.hex()[:DIGITS]}"


async def loaded(caller: Caller) -> set[str]:
    return {each["id"] for each in (await caller.http.get("/v1/models")).json()["data"] if each["loaded"]}


def test_a_forming_model_is_refused_with_what_is_missing(tiny: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 4), context=512, size_bytes=6_000_000_000))
        async with swarm_gateway(lab) as caller:
            answer = await caller.complete(model="tiny")
            assert refused(answer)[::2] == (503, "model_forming")
            assert "nobody hosts blocks 4:6 of 6, 2 GB" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) > 0
            for path, key in (("/v1/models", "data"), ("/api/tags", "models")):
                (listed,) = (await caller.http.get(path)).json()[key]
                assert (listed["available"], listed["missing_blocks"]) == (False, [[4, 6]])
                assert (listed["missing_gb"], listed["context_length"]) == (2.0, 512)
            assert (await caller.http.get("/health")).status_code == 503
            await lab.start("b", lab.hosting((4, 6), context=512, size_bytes=6_000_000_000))
            await asyncio.sleep(LOOK_S + 1)
            text = (await caller.complete([5, 6], max_tokens=TOKENS, model="tiny")).json()["choices"][0]
            assert text["text"] == continued(tiny.greedy([5, 6], TOKENS))

    simulate(tiny, scenario)


@defence("open models stay within the memory", off=replacing(models, "to_close", lambda *_: []))
def test_a_model_closes_for_another_and_when_idle(tiny: Reference, beta: Reference) -> None:
    async def scenario(lab: Lab, other: Lab) -> None:
        one, two = name_of(lab), name_of(other)
        async with swarm_gateway(lab, other, max_bytes=MEMORY) as caller:
            async with caller.gateway.models.using(one):
                answer = await caller.complete(model=two)
                assert answer.status_code == 503
                assert refused(answer)[2] == "out_of_resources"
            assert await loaded(caller) == {one}
            assert (await caller.complete(model=two, max_tokens=1)).status_code == 200
            assert await loaded(caller) == {two}
            (running,) = (await caller.http.get("/api/ps")).json()["models"]
            closes = datetime.fromisoformat(running["expires_at"]).timestamp()
            assert closes - caller.gateway.clock() == pytest.approx(IDLE_S, abs=1)
            await asyncio.sleep(IDLE_S + 2 * LOOK_S)
            assert await loaded(caller) == set()
            assert (await caller.complete(model=two, max_tokens=1)).status_code == 200

    in_swarm(tiny, beta, scenario)


@pytest.mark.parametrize("when", ["before it opens", "before its first session"])
def test_a_model_whose_hosts_are_lost_is_refused_with_503(tiny: Reference, when: str) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all({"a": (0, 4), "b": (4, 6)})

        def lose() -> None:
            lab.network.crash(lab.peer_id("b"))

        async with swarm_gateway(lab, opening=lose if when == "before it opens" else lambda: None) as caller:
            async with caller.gateway.models.using("tiny"):
                lose()
                answer = await caller.complete(model="tiny")
            assert refused(answer)[::2] == (503, "no_route")
            assert "4:6" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) > 0

    simulate(tiny, scenario)


def test_a_model_that_fails_to_open_is_looked_up_again(tiny: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start_all({"a": (0, 4), "b": (4, 6)})
        failures = [Unreachable("the hosts of the outline are lost")]

        def fail() -> None:
            if failures:
                raise failures.pop()

        async with swarm_gateway(lab, opening=fail) as caller:
            assert (await caller.complete(model="tiny", max_tokens=1)).status_code == 200

    simulate(tiny, scenario)


@pytest.mark.parametrize(
    ("idle_since_s", "needed", "closed"),
    [
        ([None, 1000.0, 900.0], 0, []),
        ([None, 1000.0, 900.0], 1, [2]),
        ([None, 1000.0, 900.0], 5, [2, 1]),
        ([None, 1000.0, 900.0], 9, None),
        ([None, 1000.0, -math.inf], 1, [2]),
        ([None, 1000.0 - IDLE_S, 990.0], 0, [1]),
    ],
)
def test_models_close_for_memory_or_when_idle_for_long(
    idle_since_s: list[float | None], needed: int, closed: list[int] | None
) -> None:
    held = [Held(4, since_s) for since_s in idle_since_s]
    assert to_close(held, 1000.0, limit=12, needed=needed) == closed


def test_the_name_of_a_job_is_its_newest_revision() -> None:
    one, other = "0123456789ab", "ba9876543210"
    offered = [f"pile-{one}-r{rounds}" for rounds in (9, 30, 4)]

    async def read() -> list[ModelOffer]:
        forming = ModelOffer(f"pile-{one}-r31", bytes(32), 4, missing=((0, 4),))
        return [forming, *(ModelOffer(name, bytes(32), 4) for name in (*offered, f"twin-{other}-r1"))]

    async def scenario() -> None:
        async with ModelTable.of_swarm(read, nothing, MEMORY) as table:
            assert [table.find(name).offer.name for name in ("pile", one[:4], offered[2])] == [
                f"pile-{one}-r30",
                f"pile-{one}-r30",
                offered[2],
            ]
            table.learn([ModelOffer(f"pile-{id}-r1", bytes(32), 4) for id in (one, other)])
            with pytest.raises(ApiError, match="names 2 jobs"):
                table.find("pile")

    asyncio.run(scenario())


def test_no_model_takes_the_name_of_an_adapter() -> None:
    async def read() -> list[ModelOffer]:
        return [ModelOffer(name, bytes(32), 4) for name in ("m:law", "n")]

    async def scenario() -> None:
        async with ModelTable.of_swarm(read, nothing, MEMORY, {"m": ["law"]}) as table:
            assert [each.offer.name for each in table.listed()] == ["n"]
            table.learn([*await read(), ModelOffer("m", bytes(32), 4)])
            assert table.find("m:law").parent == "m"

    asyncio.run(scenario())


def test_no_model_takes_the_name_of_another() -> None:
    one, two, three = (bytes([number]) * 32 for number in range(3))
    own = f"m@{one.hex()[:DIGITS]}"
    offered = [CatalogModel(three, own, 4), CatalogModel(one, "m", 4), CatalogModel(two, "m", 4)]
    found = {each.name: each.manifest for each in named(offered, Rules(SWARM, Admission.OPEN))}
    assert len(found) == 3
    assert found[own] == one


def test_few_requests_wait_for_a_model_that_closes() -> None:
    async def scenario() -> None:
        may_close = asyncio.Event()

        @asynccontextmanager
        async def opening() -> AsyncIterator[str]:
            yield "open"
            await may_close.wait()

        async def use() -> str:
            async with life.using() as opened:
                return opened

        life = ModelLife("m", opening)
        await use()
        life.close()
        waiting = [asyncio.create_task(use()) for _ in range(MOST_WAITING)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await use()
        may_close.set()
        assert await asyncio.gather(*waiting) == ["open"] * MOST_WAITING

    asyncio.run(scenario())


@defence("few requests wait for a model to open", off=replacing(model_life, "MAX_WAITING", 1 << 30))
def test_few_requests_wait_for_one_model(tiny: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        never = asyncio.Event()

        @asynccontextmanager
        async def opener(*_: Any) -> AsyncIterator[Any]:
            await never.wait()
            raise NotImplementedError
            yield

        async def offers() -> list[ModelOffer]:
            return [ModelOffer("tiny", lab.manifest, 6)]

        async with ModelTable.of_swarm(offers, opener, MEMORY) as table, calling(table) as caller:
            asked = [caller.complete(model="tiny") for _ in range(MOST_WAITING + 1)]
            codes = sorted(refused(each)[2] for each in await asyncio.gather(*asked))
            assert codes == [*["model_loading"] * MOST_WAITING, "overloaded"]

    simulate(tiny, scenario)
