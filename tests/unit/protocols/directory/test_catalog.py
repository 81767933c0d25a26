"""Peers announce what they host in the catalog while few others do, and at every moment it is
complete."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from swarmnet_protocols.directory import catalog
from swarmnet_protocols.directory.catalog import (
    ANNOUNCE_S,
    ENOUGH,
    LIFETIME_S,
    SAMPLE,
    TOPIC,
    CatalogModel,
    announced_model,
    is_enough,
    model_announcer,
    read_catalog,
)
from swarmnet_protocols.errors import ConfigError
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.wire import records_pb2 as pb
from tests.support.network.memory_directory import MemoryBoard, MemoryDirectory
from tests.support.network.memory_network import LinkProfile, MemoryNetwork
from tests.support.network.virtual_time import run
from tests.support.swarm.swarm_lab import EPOCH, SWARM, peer


def model(number: int) -> CatalogModel:
    return CatalogModel(bytes([number]) * 32, f"org/model{number}", 8)


@pytest.mark.parametrize("models", [1, 3])
def test_few_of_many_hosts_announce_and_no_model_is_ever_missing(
    models: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "ENOUGH", 6)

    async def scenario() -> None:
        rng = random.Random(models)
        network = MemoryNetwork(rng, LinkProfile())
        board = MemoryBoard(network, lambda: EPOCH + asyncio.get_running_loop().time(), delay_s=0.05)
        looker = MemoryDirectory(board, peer("looker"), SWARM)

        async def host(number: int) -> None:
            await asyncio.sleep(rng.uniform(0, ANNOUNCE_S) if number >= models else 0.0)
            directory = MemoryDirectory(board, peer(f"host{number}"), SWARM)
            await model_announcer(directory, rng, model(number % models)).run()

        async with network.transport(peer("looker").peer_id):
            online = [network.transport(peer(f"host{number}").peer_id) for number in range(60)]
            for each in online:
                await each.__aenter__()
            tasks = [asyncio.create_task(host(number)) for number in range(60)]
            await asyncio.sleep(1.0)
            most = 0
            while asyncio.get_running_loop().time() < 3 * LIFETIME_S:
                assert {each.name for each in (await read_catalog(looker)).models} == {
                    model(number).name for number in range(models)
                }
                most = max(most, len(board.read(TOPIC)))
                await asyncio.sleep(10.0)
            assert models * 6 <= most <= 3 * models * 6
            await cancel(*tasks)

    run(scenario())


def test_of_a_full_sample_a_model_needs_its_share() -> None:
    """A third of a full sample ends soon, and does not count."""
    bodies = [bytes([number % 16]) for number in range(2 * SAMPLE // 3)]
    assert is_enough(bodies, b"\x00", is_full=True)
    assert not is_enough(bodies, b"\x00", is_full=False)
    assert not is_enough([*bodies, b"\x10"], b"\x10", is_full=True)
    assert not is_enough([], b"\x00", is_full=True)


def test_every_one_of_a_few_hosts_announces() -> None:
    assert not is_enough([b"a"] * (ENOUGH - 1), b"a", is_full=False)
    assert is_enough([b"a"] * ENOUGH, b"a", is_full=False)
    assert not is_enough([b"a"] * ENOUGH, b"b", is_full=False)


def test_a_name_that_several_models_have_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Any peer may announce a model under the name of another. So a user hears that nobody signed a
    name."""

    async def scenario() -> None:
        network = MemoryNetwork(random.Random(0), LinkProfile())
        board = MemoryBoard(network, lambda: EPOCH)

        async def announce(host: str, number: int) -> MemoryDirectory:
            directory = MemoryDirectory(board, peer(host), SWARM)
            entry = pb.CatalogModel(manifest=bytes([number]) * 32, name="talk", blocks=3)
            body = pb.CatalogRecord(model=entry).SerializeToString()
            await directory.publish(TOPIC, body, lifetime_s=LIFETIME_S)
            return directory

        async with AsyncExitStack() as online:
            for host in ("one", "two", "three"):
                await online.enter_async_context(network.transport(peer(host).peer_id))
            directory = await announce("one", 1)
            assert await announced_model(directory, "chat") is None
            assert not caplog.records
            assert await announced_model(directory, "talk") == bytes([1]) * 32
            assert "nobody signed the name" in caplog.text
            await announce("two", 1)
            assert await announced_model(directory, "talk") == bytes([1]) * 32
            await announce("three", 2)
            with pytest.raises(ConfigError, match="announce 2 models as 'talk'"):
                await announced_model(directory, "talk")

    run(scenario())
