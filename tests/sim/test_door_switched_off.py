"""What the defences of the door are worth: with one of them switched off, the attack that it stops gets through.

So the tests of ``test_door.py`` are not vacuous.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from swarmnet_protocols.membership import certificates, door, membership, rules, signed
from swarmnet_protocols.membership.door import Door
from swarmnet_protocols.membership.revocations import Revocations
from swarmnet_protocols.membership.roles import ANY_ROLE, Role
from swarmnet_protocols.protocol_ids import DOOR, LINK, SESSION
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.transport import Message
from tests.sim.test_door import INTRUDERS
from tests.support.door_world import HEARD, World, answer, converse, hear, hello, knock, run
from tests.support.private_swarm import PrivateSwarm, identity_of

SwitchOff = Callable[[pytest.MonkeyPatch], None]


def nothing(*_: Any, **__: Any) -> None:
    pass


async def keep_quiet(_: Door) -> None:
    """Say nothing at the door that would make the other side look again."""


@contextlib.asynccontextmanager
async def admit_anybody(*_: Any) -> AsyncIterator[None]:
    yield


def admit_without_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        membership,
        "admit",
        lambda rules_, certificate, peer, *_: rules.Member(peer, certificate.roles, certificate.not_after),
    )


def ignore_the_calendar(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (certificates, rules):
        monkeypatch.setattr(module, "check_current", nothing)


GUARDS: dict[str, SwitchOff] = {
    "outsider": lambda patch: patch.setattr(
        membership, "admit", lambda rules_, certificate, peer, *_: rules.Member(peer, ANY_ROLE)
    ),
    "expired": ignore_the_calendar,
    "revoked": lambda patch: patch.setattr(Revocations, "why_out", nothing),
    "certificate of another peer": admit_without_looking,
    "changed certificate": lambda patch: patch.setattr(signed, "verify", lambda *_: True),
}
GUARDS["not yet"] = GUARDS["certificate of another swarm"] = GUARDS["expired"]


@pytest.mark.parametrize("name", GUARDS)
def test_an_intruder_gets_in_when_nobody_looks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    GUARDS[name](monkeypatch)

    async def scenario(world: World) -> None:
        victim = await world.member("bob")
        victim.membership.take_revocations(
            [world.swarm.revocation(identity_of("mallory").peer_id)] if name == "revoked" else []
        )
        await victim.transport.serve(SESSION, answer)
        mallory, intruder = await world.stranger("mallory"), INTRUDERS[name]
        reply = await knock(mallory, victim, hello(intruder.swarm, intruder.certificate(world, SESSION)))
        assert reply.HasField("hello")
        assert await hear(mallory, victim.raw, SESSION) == HEARD

    run(scenario)


def test_nobody_needs_the_door_when_streams_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Door, "admitting", admit_anybody)

    async def scenario(world: World) -> None:
        victim, mallory = await world.member("bob"), await world.stranger("mallory")
        await victim.transport.serve(SESSION, answer)
        assert await hear(mallory, victim.raw, SESSION) == HEARD

    run(scenario)


def test_any_role_will_do_when_roles_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_check_role", nothing)

    async def scenario(world: World) -> None:
        victim, observer = await world.member("bob"), await world.member("mallory", Role.OBSERVER)
        await victim.transport.serve(LINK, answer)
        assert await hear(observer.transport, victim.raw, LINK) == HEARD

    run(scenario)


def test_a_revoked_member_stays_when_nobody_is_reviewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Door, "_review", nothing)
    monkeypatch.setattr(Door, "_keep_comparing", keep_quiet)

    async def scenario(world: World) -> None:
        server, client = await world.member("bob"), await world.member("mallory")
        await server.transport.serve(SESSION, answer)
        stream = await converse(client, server)
        server.membership.take_revocations([world.swarm.revocation(client.peer_id)])
        await asyncio.sleep(120.0)
        await stream.send(Message(b"still here?"))
        assert await stream.receive() == HEARD

    run(scenario)


def test_an_expired_member_stays_when_nobody_looks_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Door, "_arm", nothing)
    monkeypatch.setattr(Door, "_keep_comparing", keep_quiet)

    async def scenario(world: World) -> None:
        server = await world.member("bob")
        await server.transport.serve(SESSION, answer)
        client = await world.peer("mallory", world.swarm.certificate("mallory", Role.CLIENT, lifetime_s=3600))
        stream = await converse(client, server)
        await asyncio.sleep(7200.0)
        await stream.send(Message(b"still here?"))
        assert await stream.receive() == HEARD

    run(scenario)


def test_silent_strangers_stay_when_nobody_is_impatient() -> None:
    async def scenario(world: World) -> None:
        server, stranger = await world.member("bob"), await world.stranger("mallory")
        stream = await stranger.open(server.peer_id, DOOR, deadline_s=5.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stream.receive(), 3600.0)

    run(scenario, PrivateSwarm(timing=Timing(door_s=1e6)))
