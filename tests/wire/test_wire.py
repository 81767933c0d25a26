"""The bytes on the wire are what proto/ and its golden vectors say."""

import asyncio
import importlib
import json
import math
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message as Protobuf
from grpc_tools import protoc  # type: ignore[import-untyped]

from swarmnet.swarm_file import content
from swarmnet_protocols.directory import host_announcements
from swarmnet_protocols.directory.records import open_record
from swarmnet_protocols.errors import StreamEnded
from swarmnet_protocols.machine.lean_imports import prepare_package
from swarmnet_protocols.membership.certificates import open_certificate
from swarmnet_protocols.membership.revocations import open_list
from swarmnet_protocols.membership.rules import Admission, Rules
from swarmnet_protocols.net import Message, protocol_ids
from swarmnet_protocols.net.framing import SIZES, FrameReader, encode
from swarmnet_protocols.net.identity import Identity
from swarmnet_protocols.net.limits.flow_control import LimitedReader, ReceiveWindow, SendWindow
from swarmnet_protocols.net.limits.rate_limit import RateLimiter
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.net.typed_stream import TypedProtocol
from swarmnet_protocols.training import job_records, jobs
from swarmnet_protocols.wire import (
    membership_pb2,
    records_pb2,
)
from swarmnet_protocols.wire.roles import Role
from tests.support.network.stream_scopes import new_scope
from tests.wire.examples import SCHEMAS

ROOT = Path(__file__).parents[2]
PROTO = ROOT / "proto"
WIRE = ROOT / "protocols" / "swarmnet_protocols" / "wire"


def vectors(name: str) -> Any:
    return json.loads((PROTO / "vectors" / f"{name}.json").read_text())


MESSAGES: list[dict[str, Any]] = [
    vector
    for name in (
        "session",
        "records",
        "workers",
        "training",
        "pipeline",
        "handshake",
        "membership",
        "pairing",
        "refusal",
        "report",
        "probe",
        "relay",
        "weights",
    )
    for vector in vectors(name)
]


def empty(full_name: str) -> Protobuf:
    descriptor = descriptor_pool.Default().FindMessageTypeByName(full_name)
    message: Protobuf = message_factory.GetMessageClass(descriptor)()
    return message


def title(vector: dict[str, Any]) -> str:
    return f"{vector['message']}/{'-'.join(vector['fields'])}"[:80]


@pytest.mark.parametrize("vector", MESSAGES, ids=title)
def test_decoding_gives_the_fields(vector: dict[str, Any]) -> None:
    message = empty(vector["message"])
    message.ParseFromString(bytes.fromhex(vector["hex"]))
    assert MessageToDict(message, preserving_proto_field_name=True) == vector["fields"]


@pytest.mark.parametrize("vector", MESSAGES, ids=title)
def test_encoding_gives_the_bytes(vector: dict[str, Any]) -> None:
    message = ParseDict(vector["fields"], empty(vector["message"]))
    assert message.SerializeToString(deterministic=True).hex() == vector["hex"]


def test_every_message_and_every_field_has_a_vector() -> None:
    wanted = {
        field.full_name
        for schema in SCHEMAS
        for message in schema.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
    }
    seen: set[str] = set()

    def visit(message: Protobuf) -> None:
        for field, value in message.ListFields():
            seen.add(field.full_name)
            if field.message_type:
                for each in value if field.is_repeated else [value]:
                    visit(each)

    for vector in MESSAGES:
        message = empty(vector["message"])
        message.ParseFromString(bytes.fromhex(vector["hex"]))
        visit(message)
    assert wanted - seen == set(), "add an example to tests/wire/examples.py"


def test_the_signed_records_verify() -> None:
    found = [vector for vector in MESSAGES if vector["message"].endswith(".SignedRecord")]
    for vector, certificate in zip(found, (b"", b"a certificate"), strict=True):
        sealed = bytes.fromhex(vector["hex"])
        swarm = records_pb2.SignedRecord.FromString(sealed).swarm
        record = open_record(sealed, swarm=swarm, now=1_800_000_000.0)
        assert records_pb2.HostRecord.FromString(record.body).public_name == "a volunteer"
        assert record.certificate == certificate


def test_the_signed_certificate_verifies() -> None:
    sealed = [
        bytes.fromhex(each["hex"]) for each in vectors("membership") if each["message"].endswith(".Signed")
    ]
    authority = membership_pb2.Signed.FromString(sealed[0]).signer
    swarm = membership_pb2.Certificate.FromString(membership_pb2.Signed.FromString(sealed[0]).body).swarm
    inviter = Identity.from_seed(b"another authority").public_key
    rules = Rules(swarm, Admission.CERTIFICATE, {authority: math.inf, inviter: math.inf})
    certificate = open_certificate(sealed[0], rules=rules, now=1_800_000_000.0)
    assert certificate.roles == {Role.CLIENT, Role.HOST}
    assert open_list(sealed[2], rules=rules, now=1_800_000_000.0).revoked.peers == {certificate.peer}


def test_a_frame_is_that_of_the_golden_vector() -> None:
    vector = {name: bytes.fromhex(digits) for name, digits in vectors("frame").items()}
    message = Message(vector["header"], vector["payload"])
    head, payload = encode(message, protocol_ids.LINK)
    assert head + bytes(payload) == vector["frame"]

    async def read(frame: bytes) -> Message:
        reader = asyncio.StreamReader()
        reader.feed_data(frame)
        return await FrameReader(LimitedReader(reader, RateLimiter()), protocol_ids.LINK, new_scope()).read()

    assert asyncio.run(read(vector["frame"])) == message
    with pytest.raises(Refused, match="it is out of resources at the moment") as refused:
        asyncio.run(read(vector["refusal"]))
    assert refused.value.retry_after_s == 2.5
    with pytest.raises(StreamEnded, match="the stream ended"):
        asyncio.run(read(vector["end"]))


def test_frames_of_flow_control_are_those_of_the_golden_vectors() -> None:
    vector = {name: bytes.fromhex(digits) for name, digits in vectors("frame").items()}
    message = Message(vector["header"], vector["payload"])

    async def grant() -> None:
        """The receiver: a payload that needs credit is read once credit is granted."""
        reader, limiter, sent = asyncio.StreamReader(), RateLimiter(), asyncio.Queue[bytes]()
        receiving = ReceiveWindow(limiter, lambda *sizes: sent.put_nowait(SIZES.pack(*sizes)))
        frames = FrameReader(
            LimitedReader(reader, limiter, receiving),
            protocol_ids.LINK,
            new_scope(),
            receive_window=receiving,
        )
        reader.feed_data(vector["waiting"])
        reading = asyncio.create_task(frames.read())
        assert await sent.get() == vector["grant"]
        reader.feed_data(vector["payload"])
        assert await reading == message

    async def wait() -> None:
        """The sender."""
        reader, window = asyncio.StreamReader(), SendWindow()
        frames = FrameReader(
            LimitedReader(reader, RateLimiter()), protocol_ids.LINK, new_scope(), send_window=window
        )
        reader.feed_data(vector["wait"] + vector["frame"])
        assert await frames.read() == message
        assert window.max_uncredited_bytes == 1 << 14
        window.start(len(message.payload))
        reader.feed_data(vector["grant"] + vector["frame"])
        assert await frames.read() == message
        assert await window.acquire(1 << 20) == len(message.payload)

    asyncio.run(grant())
    asyncio.run(wait())


def test_generated_code_is_fresh(tmp_path: Path) -> None:
    schemas = sorted(str(path) for path in PROTO.glob("*.proto"))
    paths = f"--proto_path=swarmnet_protocols/wire={PROTO}"
    assert protoc.main(["protoc", paths, f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", *schemas]) == 0
    made = tmp_path / "swarmnet_protocols" / "wire"
    stale = [path.name for path in made.iterdir() if path.read_text() != (WIRE / path.name).read_text()]
    assert not stale, "run: make proto"


def test_the_registry_names_the_ids_that_are_used() -> None:
    registry = tomllib.loads((PROTO / "PROTOCOLS.toml").read_text())
    assert {entry["id"] for entry in registry.values()} == {protocol.id for protocol in protocol_ids.ALL}
    assert len({protocol.id for protocol in protocol_ids.ALL}) == len(protocol_ids.ALL)


def test_the_registry_says_who_may_open_what() -> None:
    registry = {
        entry["id"]: entry for entry in tomllib.loads((PROTO / "PROTOCOLS.toml").read_text()).values()
    }
    for protocol in protocol_ids.ALL:
        assert set(registry[protocol.id]["roles"]) == protocol.roles
        assert set(registry[protocol.id]["served_by"]) == protocol.served_by
        assert registry[protocol.id].get("flow_control", False) == protocol.has_flow_control
        needs_a_role = protocol not in protocol_ids.ENTRANCE
        assert bool(protocol.roles) == bool(protocol.served_by) == needs_a_role, protocol.id


def test_the_registry_names_the_messages_of_each_side() -> None:
    registry = tomllib.loads((PROTO / "PROTOCOLS.toml").read_text()).values()
    messages = {entry["id"]: entry["messages"] for entry in registry}
    for protocol in set(protocol_ids.ALL) - set(protocol_ids.DIRECTORY):
        assert isinstance(protocol, TypedProtocol)
        sides = (protocol.request, protocol.reply)
        assert messages[protocol.id] == list(dict.fromkeys(side.DESCRIPTOR.name for side in sides))


def test_the_registry_names_messages_that_exist() -> None:
    registry = tomllib.loads((PROTO / "PROTOCOLS.toml").read_text())
    prepare_package("hivemind")
    for entry in registry.values():
        if entry["schema"].startswith("hivemind/"):
            # The messages that hivemind has, in the code that it generates.
            dht_pb2 = importlib.import_module("hivemind.proto.dht_pb2")
            assert set(entry["messages"]) <= set(dht_pb2.DESCRIPTOR.message_types_by_name)
            continue
        assert (PROTO / entry["schema"]).is_file()
        for message in entry["messages"]:
            assert f"message {message} {{" in (PROTO / entry["schema"]).read_text()


def test_the_changelog_says_what_the_newest_version_speaks() -> None:
    """Versions with the same lists work together."""
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    said = dict(re.findall(r"([a-z]+(?: [a-z]+)?) (\d+)[,;.]", newest.partition("**Wire:**")[2]))
    registry = tomllib.loads((PROTO / "PROTOCOLS.toml").read_text())
    ids = [re.match(r"/?[Ss]warm(?:net/)?(\w+?)[/V](\d+)", entry["id"]) for entry in registry.values()]
    formats = {
        "announcements": host_announcements.PROTOCOL,
        "job records": job_records.PROTOCOL,
        "swarm files": content.FORMAT,
        "training jobs": jobs.FORMAT,
    }
    expected = {each[1].lower(): each[2] for each in ids if each}
    assert said == expected | {name: str(number) for name, number in formats.items()}
