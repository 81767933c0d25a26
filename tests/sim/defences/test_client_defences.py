"""Invalid messages of hosts and invalid records that clients refuse, and how they continue without
them."""

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from swarmnet_client.chain.failures import Suspects
from swarmnet_protocols.directory.host_announcements import PROTOCOL, hosts_topic, read_hosts
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.net import Message
from swarmnet_protocols.net.protocol_ids import LINK, SESSION
from swarmnet_protocols.net.refusal import Refusal
from swarmnet_protocols.session.steps import Row
from swarmnet_protocols.session.wire_tensors import encode_tensor
from swarmnet_protocols.wire import records_pb2, refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb
from tests.defences import defence, replacing
from tests.support.attacks.lying_hosts import PROMPT, assert_liar_is_replaced
from tests.support.network.memory_directory import MemoryDirectory
from tests.support.network.memory_network import MemoryStream
from tests.support.swarm.swarm_lab import SWARM, Lab, Reference, peer, simulate

HIDDEN = 32
LAYOUT = {"a": (0, 2), "b": (2, 4), "c": (4, 6), "c2": (4, 6)}


def nan_output(reply: pb.SessionReply, payload: bytes) -> tuple[pb.SessionReply, bytes]:
    tensor, values = encode_tensor(np.full(list(reply.output.tensor.shape), math.nan, np.float32))
    return pb.SessionReply(output=pb.Output(step=reply.output.step, tensor=tensor)), bytes(values)


def wrong_size(reply: pb.SessionReply, payload: bytes) -> tuple[pb.SessionReply, bytes]:
    tensor, values = encode_tensor(np.zeros((7, HIDDEN), np.float32))
    return pb.SessionReply(output=pb.Output(step=reply.output.step, tensor=tensor)), bytes(values)


def wrong_bytes(reply: pb.SessionReply, payload: bytes) -> tuple[pb.SessionReply, bytes]:
    return reply, payload[:-4]


def lie_too_long(_reply: pb.SessionReply, _payload: bytes) -> Refusal:
    return Refusal(refusal_pb2.REASON_TOO_LONG, "")


def blame(_reply: pb.SessionReply, _payload: bytes) -> Refusal:
    return Refusal(refusal_pb2.REASON_PROTOCOL, "")


def lie_not_finite(_reply: pb.SessionReply, _payload: bytes) -> Refusal:
    return Refusal(refusal_pb2.REASON_NOT_FINITE, "")


LIES = [nan_output, wrong_size, wrong_bytes, lie_too_long, blame, lie_not_finite]


@defence(
    "a host that blames its client does not end the session alone",
    off=replacing(Suspects, "narrow", lambda *_: (frozenset(), frozenset())),
    layout={"a": (0, 6), "b": (0, 6)},
    lie=blame,
)
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("layout", [LAYOUT, {"a": (0, 6), "b": (0, 6)}], ids=["chain", "one hop"])
def test_a_last_hop_that_lies_is_replaced(
    reference: Reference,
    layout: Mapping[str, tuple[int, int]],
    lie: Callable[..., tuple[pb.SessionReply, bytes] | Refusal],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forge(stream: MemoryStream, message: Message) -> Message | Refusal | None:
        if stream.protocol.id != SESSION.id or stream.peer != peer("client").peer_id:
            return None
        reply = pb.SessionReply.FromString(message.header)
        if not reply.HasField("output") or reply.output.step < 3:
            return None
        lied = lie(reply, bytes(message.payload))
        if isinstance(lied, Refusal):
            return lied
        changed, payload = lied
        return Message(changed.SerializeToString(), payload)

    assert_liar_is_replaced(reference, layout, forge, monkeypatch)


def skip_steps(sent: pb.LinkRequest, payload: bytes) -> bytes:
    sent.step.seq += 5
    return payload


def nan_inputs(sent: pb.LinkRequest, payload: bytes) -> bytes:
    return np.full(len(payload) // 4, math.nan, np.float32).tobytes()


NONSENSE = [skip_steps, nan_inputs]


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("layout", [LAYOUT, {"a": (0, 2), "b": (2, 4), "c": (4, 6)}], ids=["two", "one"])
def test_a_hop_that_sends_invalid_steps_to_the_next_is_replaced(
    reference: Reference,
    layout: Mapping[str, tuple[int, int]],
    nonsense: Callable[[pb.LinkRequest, bytes], bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hop after it refuses: both are suspected."""

    def forge(stream: MemoryStream, message: Message) -> Message | None:
        sender = stream._transport.peer_id
        if stream.protocol.id != LINK.id or sender not in (peer("b").peer_id, peer("b2").peer_id):
            return None
        sent = pb.LinkRequest.FromString(message.header)
        if not sent.HasField("step") or sent.step.seq < 3:
            return None
        payload = nonsense(sent, bytes(message.payload))
        return Message(sent.SerializeToString(), payload)

    assert_liar_is_replaced(reference, {**layout, "b2": (2, 4)}, forge, monkeypatch)


def test_a_host_out_of_memory_is_left_for_another_one(reference: Reference) -> None:
    async def scenario(lab: Lab) -> list[int]:
        await lab.start("small", lab.hosting((0, 6), max_cache_bytes=280_000))
        async with lab.client() as swarm:
            await asyncio.sleep(1.0)
            async with lab.chain(swarm) as chain:
                started = []

                async def start_large() -> None:
                    await lab.start("large", lab.hosting((0, 6)))

                def on_token(number: int) -> None:
                    if number == 1:
                        started.append(asyncio.create_task(start_large()))

                tokens = await lab.generate(chain, PROMPT * 15, 12, on_token)
                assert [hop for hop, _, _ in chain.report.route] == [lab.peer_id("large")]
            await asyncio.gather(*started)
        return tokens

    assert simulate(reference, scenario) == reference.greedy(PROMPT * 15, 12)


def test_memory_used_up_on_all_hosts_has_its_own_error(reference: Reference) -> None:
    async def scenario(lab: Lab) -> float:
        await lab.start("small", lab.hosting((0, 6), max_cache_bytes=280_000))
        async with lab.client() as swarm, lab.chain(swarm) as chain:
            began = asyncio.get_running_loop().time()
            with pytest.raises(OutOfResources):
                await lab.generate(chain, PROMPT * 15, 12)
            return asyncio.get_running_loop().time() - began

    assert simulate(reference, scenario) <= 20.0


def test_a_sequence_longer_than_the_session_is_refused_at_once(reference: Reference) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 6)))
        async with lab.client() as swarm, lab.chain(swarm, max_length=8) as chain:
            await chain.forward((Row(0, 0, 8, 1, 0),), np.arange(8))
            with pytest.raises(OutOfResources):
                await chain.forward((Row(0, 8, 1, 1, 0),), np.arange(1))
            await chain.forward((Row(0, 7, 1, 1, 0, rewrite=True),), np.arange(1))

    simulate(reference, scenario)


@pytest.mark.parametrize(
    "change",
    [
        {"start": 4, "end": 2},
        {"start": 0, "end": 1 << 30},
        {"step_s": math.nan},
        {"step_s": -1.0},
        {"step_s": math.inf},
        {"manifest": bytes(32)},
        {"protocol": 99},
    ],
    ids=str,
)
def test_an_invalid_record_is_ignored(reference: Reference, change: dict[str, Any]) -> None:
    async def scenario(lab: Lab) -> int:
        directory = MemoryDirectory(lab.board, peer("hostile"), SWARM)
        options: dict[str, Any] = {
            "manifest": lab.manifest,
            "start": 0,
            "end": 6,
            "state": records_pb2.HOST_STATE_ONLINE,
            "protocol": PROTOCOL,
            "step_s": 0.0,
        }
        found = []
        async with lab.network.transport(lab.peer_id("hostile")):
            for body in (options, {**options, **change}):
                record = records_pb2.HostRecord(**body).SerializeToString()
                await directory.publish(
                    hosts_topic(lab.manifest, lab.peer_id("hostile")), record, lifetime_s=45.0
                )
                await asyncio.sleep(1.0)
                found.append(len(await read_hosts(directory, lab.manifest)))
        assert found[0] == 1
        return found[1]

    assert simulate(reference, scenario) == 0


def test_an_announced_host_that_does_not_serve_is_skipped_for_a_while(reference: Reference) -> None:
    async def scenario(lab: Lab) -> list[int]:
        directory = MemoryDirectory(lab.board, peer("hostile"), SWARM)
        record = records_pb2.HostRecord(
            manifest=lab.manifest,
            start=0,
            end=6,
            state=records_pb2.HOST_STATE_ONLINE,
            protocol=PROTOCOL,
            step_s=0.0,
        )
        async with lab.network.transport(lab.peer_id("hostile")):
            await directory.publish(
                hosts_topic(lab.manifest, lab.peer_id("hostile")), record.SerializeToString(), lifetime_s=45.0
            )
            await lab.start("honest", lab.hosting((0, 6)))
            async with lab.client() as swarm, lab.chain(swarm) as chain:
                return await lab.generate(chain, PROMPT, 4)

    assert simulate(reference, scenario) == reference.greedy(PROMPT, 4)
