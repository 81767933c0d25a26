"""Adapter uploads that hosts refuse, and that a misbehaving client affects no other client."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from safetensors.torch import save

from swarmnet_client.chain.adapter_upload import upload_adapter
from swarmnet_client.chain.chain import Chain
from swarmnet_client.chain.hops import ChainSpec
from swarmnet_node.hosting.adapter_store import AdapterStore
from swarmnet_node.hosting.client_limits import ClientLimits
from swarmnet_protocols.net import Message, Stream
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.protocol_ids import ADAPTER
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.session.adapters import Adapter
from swarmnet_protocols.session.arrays import ElementType
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb
from tests.support.attacks.raw_client import Stranger, next_reply
from tests.support.attacks.refusals import refusal
from tests.support.models.peft_oracle import random_tensors
from tests.support.swarm.swarm_lab import SWARM, Lab, Reference, simulate

PROMPT = [5, 6, 7, 8, 9]
TOKENS = 10
CHUNK = ADAPTER.max_payload_bytes


class Uploader(Stranger):
    """A client that exchanges raw messages with the host of blocks 0:4."""

    @property
    def store(self) -> AdapterStore:
        host = self.lab.nodes["a"].host
        assert host is not None
        return host.adapters

    async def announce_upload(self, data: bytes, **changes: Any) -> Stream:
        options: dict[str, Any] = {
            "swarm": SWARM,
            "manifest": self.lab.manifest,
            "span": pb.Span(start=0, end=4),
            "adapter": hashlib.sha256(data).digest(),
            "size_bytes": len(data),
        }
        stream = await self.transport.open(self.host, ADAPTER, deadline_s=1.0)
        upload = pb.Upload(**{**options, **changes})
        await stream.send(Message(pb.AdapterRequest(upload=upload).SerializeToString()))
        return stream

    async def bring(self, data: bytes, **changes: Any) -> pb.AdapterReply:
        """Announce an upload, send the part if the host wants it, and return the last reply."""
        stream = await self.announce_upload(data, **changes)
        reply = await next_reply(stream, pb.AdapterReply)
        if reply.HasField("wanted"):
            for start in range(0, len(data), CHUNK):
                await send_chunk(stream, data[start : start + CHUNK])
            reply = await next_reply(stream, pb.AdapterReply)
        return reply

    async def open_session(self, adapter: bytes, end: int = 4) -> pb.SessionReply:
        """A session that names an adapter; the first reply."""
        stream = await self.send_open(span=pb.Span(start=0, end=end), adapter=adapter)
        reply = pb.SessionReply.FromString((await stream.receive()).header)
        stream.close()
        return reply


async def send_chunk(stream: Stream, payload: bytes) -> None:
    await stream.send(Message(pb.AdapterRequest(chunk=pb.Chunk()).SerializeToString(), payload))


def with_stranger(reference: Reference, talk: Callable[[Uploader], Awaitable[None]], **limits: Any) -> None:
    async def scenario(lab: Lab) -> None:
        await lab.start("a", lab.hosting((0, 4), limits=ClientLimits(**limits)))
        async with lab.network.transport(lab.peer_id("stranger")) as transport:
            await talk(Uploader(lab, transport))
        assert lab.sessions() == {}

    simulate(reference, scenario)


def part_of(blocks: tuple[int, ...] = (0, 3), **options: Any) -> bytes:
    return save(random_tensors(blocks, **options))


async def assert_refused(reading: Awaitable[object], reason: int, why: str = "") -> None:
    refused = await refusal(reading)
    assert refused.reason == reason
    assert why in refused.detail


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"swarm": bytes(31)}, refusal_pb2.REASON_WRONG_SWARM),
        ({"manifest": bytes(32)}, refusal_pb2.REASON_WRONG_MODEL),
        ({"span": pb.Span(start=3, end=5)}, refusal_pb2.REASON_WRONG_SPAN),
        ({"span": pb.Span(start=2, end=2)}, refusal_pb2.REASON_WRONG_SPAN),
        ({"span": pb.Span(start=0, end=2)}, refusal_pb2.REASON_PROTOCOL),
        ({"adapter": b"short"}, refusal_pb2.REASON_PROTOCOL),
        ({"adapter": b""}, refusal_pb2.REASON_PROTOCOL),
        ({"adapter": bytes(32)}, refusal_pb2.REASON_PROTOCOL),
        ({"size_bytes": 0}, refusal_pb2.REASON_PROTOCOL),
        ({"size_bytes": 100}, refusal_pb2.REASON_PROTOCOL),
        ({"size_bytes": 1 << 40}, refusal_pb2.REASON_OUT_OF_RESOURCES),
    ],
)
def test_an_invalid_adapter_upload_is_refused(
    reference: Reference, changes: dict[str, Any], reason: int
) -> None:
    async def talk(stranger: Uploader) -> None:
        await assert_refused(stranger.bring(part_of(), **changes), reason)
        assert stranger.store.nbytes == 0

    with_stranger(reference, talk)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (part_of(rank=300), "rank 300"),
        (part_of((3, 4)), "block 4, which this host does not have"),
        (part_of(modules=[("mlp.experts", 32, 32)]), "no linear module mlp.experts"),
        (part_of(modules=[("self_attn.q_proj", 32, 48)]), "48 inputs"),
        (
            save({"0.self_attn.q_proj.down": torch.full((2, 32), float("nan"))}),
            "without 0.self_attn.q_proj.up",
        ),
        (save({name: tensor / 0 for name, tensor in random_tensors([1]).items()}), "not finite"),
        (save({f"1.prefix.{kind}": torch.ones(2, 3, 8) for kind in ("key", "value")}), "some of the blocks"),
        (b"\x07" * 5000, "header has more than"),
        (b"\x07" + bytes(7) + b"[1,2,3]", "not a safetensors file"),
    ],
)
def test_a_part_that_does_not_fit_is_refused_with_a_reason(
    reference: Reference, data: bytes, why: str
) -> None:
    async def talk(stranger: Uploader) -> None:
        await assert_refused(stranger.bring(data), refusal_pb2.REASON_PROTOCOL, why)
        assert stranger.store.nbytes == 0

    with_stranger(reference, talk)


def test_an_upload_that_is_too_large_is_refused_before_its_first_byte(reference: Reference) -> None:
    data = part_of(rank=64)

    async def talk(stranger: Uploader) -> None:
        stream = await stranger.announce_upload(data)
        await assert_refused(next_reply(stream, pb.AdapterReply), refusal_pb2.REASON_OUT_OF_RESOURCES)
        assert (await stranger.bring(part_of(rank=1))).HasField("stored")

    with_stranger(reference, talk, adapter_bytes_per_client=len(data) - 1)


def test_a_hash_of_the_wrong_length_is_refused_before_the_first_byte(reference: Reference) -> None:
    async def talk(stranger: Uploader) -> None:
        await assert_refused(
            next_reply(await stranger.announce_upload(part_of(), adapter=bytes(31)), pb.AdapterReply),
            refusal_pb2.REASON_PROTOCOL,
        )

    with_stranger(reference, talk)


@pytest.mark.parametrize("sizes", [(100,), (CHUNK - 1,), (CHUNK, 10), (0,)], ids=str)
def test_chunks_have_the_largest_size_that_is_allowed(reference: Reference, sizes: tuple[int, ...]) -> None:
    """Otherwise an upload of single bytes would hold its memory for days."""

    async def talk(stranger: Uploader) -> None:
        stream = await stranger.announce_upload(bytes(CHUNK + 100))
        assert (await next_reply(stream, pb.AdapterReply)).HasField("wanted")
        for size in sizes:
            await send_chunk(stream, bytes(size))
        await assert_refused(
            next_reply(stream, pb.AdapterReply), refusal_pb2.REASON_PROTOCOL, "expected a chunk"
        )
        assert stranger.store.nbytes == 0

    with_stranger(reference, talk)


def test_a_stalled_upload_is_ended_and_its_memory_released(reference: Reference) -> None:
    async def talk(stranger: Uploader) -> None:
        await stranger.announce_upload(bytes(CHUNK))
        gone = await stranger.announce_upload(bytes([1]) * CHUNK)
        used = stranger.store._system.used
        await asyncio.sleep(1.0)
        assert used[Resource.ADAPTERS] == 2
        gone.close()
        await asyncio.sleep(1.0)
        assert used[Resource.ADAPTERS] == 1
        await asyncio.sleep(stranger.lab.timing.chunk_s)
        assert used[Resource.ADAPTERS] == 0

    with_stranger(reference, talk)


def test_an_adapter_that_the_host_has_is_not_sent_again(reference: Reference) -> None:
    data = part_of()

    async def talk(stranger: Uploader) -> None:
        assert (await stranger.bring(data)).HasField("stored")
        assert (await next_reply(await stranger.announce_upload(data), pb.AdapterReply)).HasField("stored")
        assert len(stranger.store) == 1

    with_stranger(reference, talk)


def test_only_its_owner_may_name_an_adapter(reference: Reference) -> None:
    """A client that knows only the hash of an adapter cannot use it."""
    data = part_of()
    digest = hashlib.sha256(data).digest()

    async def talk(stranger: Uploader) -> None:
        await assert_refused(stranger.open_session(digest), refusal_pb2.REASON_UNKNOWN_ADAPTER)
        async with stranger.lab.network.transport(stranger.lab.peer_id("owner")) as transport:
            owner = Uploader(stranger.lab, transport)
            assert (await owner.bring(data)).HasField("stored")
            assert (await owner.open_session(digest)).HasField("opened")
        await assert_refused(stranger.open_session(digest), refusal_pb2.REASON_UNKNOWN_ADAPTER)
        assert (await next_reply(await stranger.announce_upload(data), pb.AdapterReply)).HasField("wanted")

    with_stranger(reference, talk)


def test_an_adapter_for_more_blocks_than_the_session_is_refused(reference: Reference) -> None:
    data = part_of((0, 3))

    async def talk(stranger: Uploader) -> None:
        await stranger.bring(data)
        opening = stranger.open_session(hashlib.sha256(data).digest(), end=3)
        await assert_refused(opening, refusal_pb2.REASON_PROTOCOL, "more than the blocks 0:3")

    with_stranger(reference, talk)


def test_a_host_that_leaves_accepts_no_adapters(reference: Reference) -> None:
    async def talk(stranger: Uploader) -> None:
        host = stranger.lab.nodes["a"].host
        assert host is not None
        await host.leave()
        await assert_refused(stranger.bring(part_of()), refusal_pb2.REASON_LEAVING)

    with_stranger(reference, talk)


def test_a_hundred_adapters_of_one_client_affect_no_other_client(reference: Reference) -> None:
    """Memory stays within the quota of their owner; who generates meanwhile gets the same tokens,
    with its adapter."""
    limit = 8 * len(part_of(rank=8))
    ours = Adapter(random_tensors(range(6), seed=99))
    sizes: list[int] = []

    async def scenario(lab: Lab) -> list[list[int]]:
        await lab.start(
            "a",
            lab.hosting((0, 6), limits=ClientLimits(adapter_bytes_per_client=limit, adapters_per_client=5)),
        )
        host = lab.nodes["a"].host
        assert host is not None

        async def flood() -> None:
            async with lab.client("greedy") as swarm:
                hop = Hop(lab.peer_id("a"), 0, 6)
                for seed in range(100):
                    with_rank = random_tensors(range(6), rank=1 + seed % 16, seed=seed)
                    await upload_adapter(swarm, hop, Adapter(with_rank))
                    sizes.append(host.adapters.nbytes)

        async def talk(name: str, adapter: Adapter | None) -> list[int]:
            spec = ChainSpec(6, 32, 512, ElementType.FLOAT32, adapter=adapter)
            async with lab.client(name) as swarm, Chain(swarm, spec, reference.layers.embed).open() as chain:
                tokens = await lab.generate(chain, PROMPT, TOKENS)
                assert chain.report.failovers == 0
                return tokens

        alone = [await talk("one", ours), await talk("two", None)]
        flooding = asyncio.create_task(flood())
        beside = [list(each) for each in await asyncio.gather(talk("one", ours), talk("two", None))]
        await flooding
        after = await asyncio.gather(talk("one", ours), talk("two", None))
        assert len(host.adapters) <= 6
        return [*alone, *beside, *after]

    answers = simulate(reference, scenario)
    assert answers[:2] == answers[2:4] == answers[4:]
    assert answers[1] == reference.greedy(PROMPT, TOKENS) != answers[0]
    own = Adapter(random_tensors(range(6), seed=99)).part(0, 6)
    assert own is not None
    assert len(sizes) == 100
    assert max(sizes) <= limit + len(own.data)
