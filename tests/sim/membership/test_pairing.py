"""Pairing by a code: newcomers, people who mistype, and attackers in the same network."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import count

import pytest
from spake2 import SPAKE2_A, SPAKE2_B

from swarmnet_protocols.errors import NotAuthorised, StreamEnded, SwarmnetError
from swarmnet_protocols.joining import pairing
from swarmnet_protocols.joining.pairing import (
    CODE_S,
    MAX_TRIES,
    TRIES,
    Codes,
    Door,
    Found,
    House,
    knock,
    try_code,
)
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.resource_limits import SYSTEM_LIMITS, Resource
from swarmnet_protocols.net.limits.subnets import SubnetSlots
from swarmnet_protocols.net.protocol_ids import PAIRING
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import pairing_pb2 as pb
from tests.defences import Patch, defence
from tests.support.network import virtual_time
from tests.support.network.memory_network import LinkProfile, MemoryNetwork, MemoryTransport
from tests.support.network.private_swarm import identity_of

CODE = "000040"
INVITE = "swn1invite"


class Room:
    """A house, whose code is always ``CODE``, and people who come."""

    def __init__(self, stack: AsyncExitStack, *, near: bool = True) -> None:
        self._stack = stack
        self._network = MemoryNetwork(random.Random(0), LinkProfile(delay_s=0.02))
        self.shown: list[str] = []
        self.invited: list[PeerId] = []
        self.near = near
        self.tried = 0

    async def person(self, name: str) -> MemoryTransport:
        return await self._stack.enter_async_context(self._network.transport(identity_of(name).peer_id))

    async def open(self, name: str = "house") -> PeerId:
        transport = await self.person(name)

        async def is_near(_: PeerId) -> bool:
            return self.near

        house = House("home", self._invite, lambda code, _: self.shown.append(code), lambda _: None)
        await PAIRING.serve(transport, Door(house, transport, is_near).answer)
        return transport.peer_id

    def _invite(self, peer: PeerId, label: str) -> str:
        self.invited.append(peer)
        return f"{INVITE} {label}"


def run(scenario: Callable[[Room], Awaitable[None]], **how: bool) -> None:
    async def main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pairing, "random_code", lambda: CODE)
            async with AsyncExitStack() as stack:
                await scenario(Room(stack, **how))

    virtual_time.run(main())


async def at_door(who: MemoryTransport, house: PeerId) -> Found:
    return await knock(await PAIRING.open(who, house, Timing(), addresses=[]), "laptop")


def test_a_newcomer_with_the_code_gets_an_invite_for_itself() -> None:
    async def scenario(room: Room) -> None:
        house, newcomer = await room.open(), await room.person("newcomer")
        found = await at_door(newcomer, house)
        assert (found.name, room.shown) == ("home", [CODE])
        assert await try_code(found, CODE, newcomer.peer_id) == f"{INVITE} laptop"
        assert room.invited == [newcomer.peer_id]

    run(scenario)


def test_two_wrong_codes_leave_a_try_and_the_third_ends_the_code() -> None:
    async def scenario(room: Room) -> None:
        house, newcomer = await room.open(), await room.person("newcomer")
        found = await at_door(newcomer, house)
        assert [await try_code(found, "999999", newcomer.peer_id) for _ in range(3)] == [2, 1, 0]
        assert room.shown == [CODE] * 2
        assert await try_code(found, CODE, newcomer.peer_id) == f"{INVITE} laptop"

    run(scenario)


def test_a_used_code_admits_no_second_newcomer() -> None:
    async def scenario(room: Room) -> None:
        house = await room.open()
        one, two = await room.person("one"), await room.person("two")
        doors = [await at_door(each, house) for each in (one, two)]
        assert len(room.shown) == 1
        assert await try_code(doors[0], CODE, one.peer_id) == f"{INVITE} laptop"
        assert await try_code(doors[1], CODE, two.peer_id) == 0
        assert len(room.shown) == 2

    run(scenario)


@defence("a code ends after a minute", off=lambda patch: patch.setattr(pairing, "CODE_S", 1e9))
def test_a_code_ends_after_a_minute() -> None:
    numbers, shown = count(), list[str]()
    codes = Codes(lambda: str(next(numbers)), lambda code, _: shown.append(code))
    codes.ensure_shown("laptop", 0.0)
    codes.ensure_shown("laptop", CODE_S - 1)
    assert shown == ["0"]
    assert not codes.has_valid(CODE_S)
    codes.ensure_shown("laptop", CODE_S)
    assert shown == ["0", "1"]


async def guess(room: Room, house: PeerId, each: int) -> None:
    """Try one code after another, ``each`` under a new identity and with a new code, until the
    house refuses."""
    for number in count():
        attacker = await room.person(f"attacker {number}")
        found = await at_door(attacker, house)
        for _ in range(each):
            room.tried += 1
            result = await try_code(found, f"{room.tried:06}", attacker.peer_id)
            assert not isinstance(result, str), f"guessed after {room.tried} tries"
        found.stream.close()
        if each < TRIES:
            await asyncio.sleep(CODE_S)


@defence(
    "a code counts its tries over all peers",
    off=lambda patch: patch.setattr(Codes, "take_try", lambda self: self._code),
)
@defence("after some tries the door is shut", off=lambda patch: patch.setattr(pairing, "MAX_TRIES", 10**6))
@pytest.mark.parametrize("each", [TRIES, TRIES - 1])
def test_nobody_guesses_a_code_by_trying_all(each: int) -> None:
    """Not even by sparing the last try of each code, so that no code is used up."""

    async def scenario(room: Room) -> None:
        house = await room.open()
        with pytest.raises((NotAuthorised, StreamEnded), match="too many wrong codes"):
            await guess(room, house, each)
        assert room.tried <= MAX_TRIES + 1
        assert not room.invited

    run(scenario)


def test_a_try_that_is_not_finished_counts() -> None:
    async def scenario(room: Room) -> None:
        house = await room.open()
        for number in range(TRIES):
            attacker = await room.person(f"attacker {number}")
            found = await at_door(attacker, house)
            side = SPAKE2_A(b"000000")
            await found.stream.send(pb.PairingRequest(attempt=side.start()))
            await found.stream.receive()
            found.stream.close()
        newcomer = await room.person("newcomer")
        found = await at_door(newcomer, house)
        assert len(room.shown) == 2
        assert await try_code(found, CODE, newcomer.peer_id) == f"{INVITE} laptop"

    run(scenario)


def bind_no_ids(patch: Patch) -> None:
    patch.setattr(pairing, "newcomer_side", lambda code, **_: SPAKE2_A(code.encode()))
    patch.setattr(pairing, "house_side", lambda code, **_: SPAKE2_B(code.encode()))


@defence("nobody in the middle gets into the swarm", off=bind_no_ids)
def test_nobody_in_the_middle_gets_into_the_swarm() -> None:
    """It passes on every message, and has its own peer id on both sides."""

    async def scenario(room: Room) -> None:
        house, newcomer, middle = (
            await room.open(),
            await room.person("newcomer"),
            await room.person("middle"),
        )
        behind = await at_door(middle, house)

        async def pass_on(front: pairing.HouseStream) -> None:
            await front.receive()
            await front.send(pb.PairingReply(house=pb.House(name="home")))
            while True:
                request, _ = await front.receive()
                await behind.stream.send(request)
                reply, _ = await behind.stream.receive()
                await front.send(reply)

        await PAIRING.serve(middle, pass_on)
        found = await at_door(newcomer, middle.peer_id)
        assert await try_code(found, CODE, newcomer.peer_id) == TRIES - 1
        assert not room.invited

    run(scenario)


def repeat_itself(patch: Patch) -> None:
    def same(size: int) -> bytes:
        return bytes(size)

    patch.setattr(pairing, "newcomer_side", lambda code, **_: SPAKE2_A(code.encode()))
    patch.setattr(pairing, "house_side", lambda code, **_: SPAKE2_B(code.encode(), entropy_f=same))


@defence("a recorded pairing is useless", off=repeat_itself)
def test_a_recorded_pairing_is_useless() -> None:
    async def scenario(room: Room) -> None:
        house, newcomer = await room.open(), await room.person("newcomer")
        found = await at_door(newcomer, house)
        recorded: list[pb.PairingRequest] = []
        send = found.stream.send

        async def record(message: pb.PairingRequest) -> None:
            recorded.append(message)
            await send(message)

        found.stream.send = record  # type: ignore[method-assign, assignment]
        assert await try_code(found, CODE, newcomer.peer_id) == f"{INVITE} laptop"
        attacker = await room.person("attacker")
        again = await at_door(attacker, house)
        for message in recorded:
            await again.stream.send(message)
            reply, _ = await again.stream.receive()
        assert reply.HasField("wrong")
        assert room.invited == [newcomer.peer_id]

    run(scenario)


@defence(
    "a house that does not know the code is not believed",
    off=lambda patch: patch.setattr(pairing.hmac, "compare_digest", lambda *_: True),
)
def test_a_house_that_does_not_know_the_code_is_not_believed() -> None:
    async def scenario(room: Room) -> None:
        newcomer, liar = await room.person("newcomer"), await room.person("liar")

        async def welcome(front: pairing.HouseStream) -> None:
            await front.receive()
            await front.send(pb.PairingReply(house=pb.House(name="home")))
            await front.receive()
            side = pairing.house_side("111111", newcomer=front.peer, house=liar.peer_id)
            await front.send(pb.PairingReply(answer=side.start()))
            await front.receive()
            await front.send(pb.PairingReply(welcome=pb.Welcome(invite=INVITE, proof=bytes(32))))

        await PAIRING.serve(liar, welcome)
        found = await at_door(newcomer, liar.peer_id)
        with pytest.raises(NotAuthorised, match="did not prove"):
            await try_code(found, CODE, newcomer.peer_id)

    run(scenario)


def everybody_is_near(patch: Patch) -> None:
    answer = Door.answer

    async def open_to_all(self: Door, stream: pairing.HouseStream) -> None:
        async def near(_: PeerId) -> bool:
            return True

        self._is_near = near
        await answer(self, stream)

    patch.setattr(Door, "answer", open_to_all)


@defence("nobody pairs from outside the local network", off=everybody_is_near)
def test_nobody_pairs_from_outside_the_local_network() -> None:
    async def scenario(room: Room) -> None:
        house = await room.open()
        with pytest.raises(StreamEnded, match="local network only"):
            await at_door(await room.person("newcomer"), house)
        assert not room.shown

    run(scenario, near=False)


@defence(
    "strangers that type nothing keep nobody out",
    off=lambda patch: patch.setattr(SubnetSlots, "_make_room", lambda _: None),
)
def test_strangers_that_type_nothing_keep_nobody_out() -> None:
    async def scenario(room: Room) -> None:
        house = await room.open()
        limit = SYSTEM_LIMITS[Resource.PAIRINGS]
        idle = [await at_door(await room.person(f"stranger {each}"), house) for each in range(limit)]
        newcomer = await room.person("newcomer")
        found = await at_door(newcomer, house)
        assert await try_code(found, CODE, newcomer.peer_id) == f"{INVITE} laptop"
        with pytest.raises(StreamEnded):
            await idle[0].stream.receive()

    run(scenario)


def test_a_stranger_has_one_pairing_at_a_time() -> None:
    async def scenario(room: Room) -> None:
        house, stranger = await room.open(), await room.person("stranger")
        await at_door(stranger, house)
        with pytest.raises(StreamEnded):
            await at_door(stranger, house)

    run(scenario)


OFF_CURVE = bytes.fromhex("41d7cf210374e04ef3f8ab2bb1d051f0d4efae46d2ae375d25e1305aa0c8cb09d8")


@pytest.mark.parametrize(
    "element", [OFF_CURVE, b"", b"A", b"A" + bytes(32), b"A" + b"\xff" * 32, b"B" * 33, b"A" * 99]
)
def test_an_element_that_is_no_point_is_a_wrong_code(element: bytes) -> None:
    side = pairing.house_side(CODE, newcomer=PeerId("n"), house=PeerId("h"))
    side.start()
    assert pairing.finished(side, element) is None


def test_a_shut_door_says_what_to_do() -> None:
    codes = Codes(lambda: CODE, lambda *_: None)
    for _ in range(MAX_TRIES):
        codes.ensure_shown("laptop", 0.0)
        codes.take_try()
    with pytest.raises(Refusal, match="start it again"):
        codes.ensure_shown("laptop", 0.0)
    assert issubclass(Refusal, SwarmnetError)
