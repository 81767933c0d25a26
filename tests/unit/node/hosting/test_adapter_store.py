"""The quotas of the adapter store, and which adapters are evicted for others."""

import asyncio
import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Iterator

import pytest
import torch

from swarmnet_node.engine.kernels.backend import LoraLayers
from swarmnet_node.engine.torch_layers.adapters import StageAdapter
from swarmnet_node.hosting.adapter_store import AdapterStore
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import ResourceManager, Scope
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.wire import refusal_pb2
from tests.defences import Patch, defence
from tests.support.network.virtual_time import run

ALICE, BOB, CAROL = PeerId("alice"), PeerId("bob"), PeerId("carol")
SIZE = 100
IDLE_S = 60.0


def digest(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def adapter(nbytes: int = SIZE) -> StageAdapter:
    return StageAdapter(0, {"x": torch.zeros(nbytes, dtype=torch.uint8)}, LoraLayers(()), (), 0)


class BoundedStore(AdapterStore):
    """A store with little room, and the scopes of its users."""

    def __init__(self) -> None:
        self.resources = ResourceManager()
        self.resources.limit(Resource.ADAPTERS, system=7, per_peer=4)
        self.resources.limit(Resource.ADAPTER_BYTES, system=8 * SIZE, per_peer=5 * SIZE)
        super().__init__(self.resources.system, idle_s=IDLE_S)

    def scope(self, owner: PeerId) -> Scope:
        return self.resources.peer(owner, 0.0)


def put(store: BoundedStore, owner: PeerId, number: int, nbytes: int = SIZE) -> None:
    with store.reserve(store.scope(owner), nbytes) as grow:
        grow(nbytes)
    store.put(owner, store.scope(owner), digest(number), adapter(nbytes))


def held(store: BoundedStore, owner: PeerId) -> list[int]:
    return [number for number in range(20) if (owner, digest(number)) in store._kept]


def with_store(talk: Callable[[BoundedStore], Awaitable[None]]) -> None:
    async def scenario() -> None:
        await talk(BoundedStore())

    run(scenario())


def assert_no_room(store: BoundedStore, owner: PeerId, nbytes: int = SIZE) -> None:
    with pytest.raises(Refusal) as caught, store.reserve(store.scope(owner), nbytes) as grow:
        grow(nbytes)
    assert caught.value.reason == refusal_pb2.REASON_OUT_OF_RESOURCES


def test_the_least_recently_used_adapter_of_an_owner_is_evicted() -> None:
    async def talk(store: BoundedStore) -> None:
        put(store, BOB, 9)
        for number in range(4):
            put(store, ALICE, number)
        assert store.renew(ALICE, digest(0))
        put(store, ALICE, 4)
        assert held(store, ALICE) == [0, 2, 3, 4], "the number of an owner's adapters is bounded"
        put(store, ALICE, 5, 3 * SIZE)
        assert held(store, ALICE) == [0, 4, 5], "so are their bytes"
        assert held(store, BOB) == [9]
        assert store.nbytes == 6 * SIZE

    with_store(talk)


def test_a_full_store_drops_the_least_recently_used_adapter() -> None:
    async def talk(store: BoundedStore) -> None:
        for number in range(4):
            put(store, ALICE, number)
        for number in range(4):
            put(store, BOB, number)
        assert held(store, ALICE) == [1, 2, 3], "the number of all adapters is bounded"
        put(store, CAROL, 0, 4 * SIZE)
        assert held(store, ALICE) == []
        assert held(store, BOB) == [0, 1, 2, 3]
        assert store.nbytes == 8 * SIZE, "so are their bytes"

    with_store(talk)


def test_stored_parts_in_use_are_not_evicted() -> None:
    async def talk(store: BoundedStore) -> None:
        for number in range(4):
            put(store, ALICE, number)
        with store.use(ALICE, digest(0)), store.use(ALICE, digest(0)) as used:
            assert used is not None
            put(store, ALICE, 4)
            assert held(store, ALICE) == [0, 2, 3, 4]
            await asyncio.sleep(2 * IDLE_S)
            assert held(store, ALICE) == [0]
            assert_no_room(store, ALICE, 5 * SIZE)
        await asyncio.sleep(IDLE_S + 1)
        assert held(store, ALICE) == []

    with_store(talk)


def test_no_adapter_is_dropped_for_one_that_does_not_fit_anyway() -> None:
    async def talk(store: BoundedStore) -> None:
        for number in range(3):
            put(store, ALICE, number)
        assert_no_room(store, ALICE, 5 * SIZE + 1)
        assert held(store, ALICE) == [0, 1, 2]

    with_store(talk)


def test_an_adapter_that_is_not_used_for_long_is_dropped() -> None:
    async def talk(store: BoundedStore) -> None:
        put(store, ALICE, 0)
        put(store, ALICE, 1)
        await asyncio.sleep(0.7 * IDLE_S)
        with store.use(ALICE, digest(1)):
            pass
        await asyncio.sleep(0.7 * IDLE_S)
        assert held(store, ALICE) == [1]
        await asyncio.sleep(0.7 * IDLE_S)
        assert store.nbytes == 0

    with_store(talk)


def test_uploads_in_progress_count_as_stored_bytes() -> None:
    async def talk(store: BoundedStore) -> None:
        scope = store.scope(ALICE)
        with store.reserve(scope, 3 * SIZE) as one, store.reserve(scope, 2 * SIZE) as other:
            assert store.nbytes == 0
            one(3 * SIZE)
            other(SIZE)
            other(2 * SIZE)
            assert store.nbytes == 5 * SIZE
            assert_no_room(store, ALICE, 1)
        put(store, ALICE, 0)

    with_store(talk)


def reserve_announced_uploads(patch: Patch) -> None:
    """Reserve memory for an upload before its bytes come."""
    reserve = AdapterStore.reserve

    @contextlib.contextmanager
    def at_once(store: AdapterStore, scope: Scope, nbytes: int) -> Iterator[Callable[[int], None]]:
        with reserve(store, scope, nbytes) as grow:
            grow(nbytes)
            yield grow

    patch.setattr(AdapterStore, "reserve", at_once)


@defence("an announced upload drops no adapter of others", off=reserve_announced_uploads)
def test_an_announced_upload_drops_no_adapter_before_its_bytes_come() -> None:
    async def talk(store: BoundedStore) -> None:
        for number in range(4):
            put(store, BOB, number)
            put(store, ALICE, number)
        with store.reserve(store.scope(CAROL), 5 * SIZE) as grow:
            kept = held(store, ALICE) + held(store, BOB)
            assert len(kept) == 6
            grow(2 * SIZE)
            assert held(store, ALICE) + held(store, BOB) == kept
            grow(3 * SIZE)
            assert len(held(store, ALICE) + held(store, BOB)) == 5

    with_store(talk)


def test_an_adapter_that_is_larger_than_announced_is_refused() -> None:
    async def talk(store: BoundedStore) -> None:
        with store.reserve(store.scope(ALICE), SIZE):
            pass
        with pytest.raises(Refusal):
            store.put(ALICE, store.scope(ALICE), digest(0), adapter(6 * SIZE))
        assert store.nbytes == 0

    with_store(talk)


def test_an_adapter_is_its_owners_alone() -> None:
    async def talk(store: BoundedStore) -> None:
        put(store, ALICE, 0)
        assert not store.renew(BOB, digest(0))
        with pytest.raises(Refusal) as caught, store.use(BOB, digest(0)):
            pass
        assert caught.value.reason == refusal_pb2.REASON_UNKNOWN_ADAPTER

    with_store(talk)


def test_no_hash_is_no_adapter_and_half_a_hash_is_a_mistake() -> None:
    async def talk(store: BoundedStore) -> None:
        with store.use(ALICE, b"") as nothing:
            assert nothing is None
        with pytest.raises(ProtocolViolation), store.use(ALICE, bytes(31)):
            pass

    with_store(talk)
