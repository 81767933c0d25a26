"""Ways to switch a defence off that tests of several modules share."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf

from swarmnet_client.hosts.exclusions import Exclusions
from swarmnet_protocols.directory.records import Record
from swarmnet_protocols.errors import ProtocolViolation
from swarmnet_protocols.membership import handshake
from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import Scope
from swarmnet_protocols.net.limits.stream_scope import StreamScope
from swarmnet_protocols.net.protocol_ids import HANDSHAKE
from swarmnet_protocols.net.typed_stream import Patience
from swarmnet_protocols.wire import records_pb2
from tests.defences import Patch, SwitchOff, replacing


def wait_for_ever(patch: Patch) -> None:
    """No timeout for the first message of a stream, nor for handshake messages."""
    inbound, untimed_handshakes = StreamScope.inbound, replace(HANDSHAKE, server=lambda _: Patience(math.inf))

    def untimed(*arguments: Any) -> StreamScope:
        meter = inbound(*arguments)
        meter._first_message_by = None
        return meter

    patch.setattr(StreamScope, "inbound", untimed)

    patch.setattr(handshake, "HANDSHAKE", untimed_handshakes)


def count_only(patch: Patch) -> None:
    """Grant every request and count it."""

    def change(scope: Scope, resource: Resource, amount: int) -> None:
        for each in scope._path:
            each.used[resource] += amount

    patch.setattr(Scope, "change", change)


def overlooking(where: type, name: str) -> SwitchOff:
    """Ignore the violations that a method finds."""
    strict = getattr(where, name)

    def lenient(*arguments: Any, **options: Any) -> None:
        with contextlib.suppress(ProtocolViolation):
            strict(*arguments, **options)

    return replacing(where, name, lenient)


M = TypeVar("M", bound=Protobuf)


def parse_leniently(kind: type[M], header: bytes) -> M:
    """Parse the part of a message before the first error."""
    message = kind()
    with contextlib.suppress(DecodeError):
        message.MergeFromString(header)
    return message


def skip_signatures(sealed: Iterable[bytes], **_: object) -> Iterator[Record]:
    """Accept records without checking their signatures."""
    for data in sealed:
        said = parse_leniently(records_pb2.SignedRecord, data)
        if said.signer:
            yield Record(
                said.swarm, said.topic, said.signer, said.sequence, said.expires_at_ms / 1000, said.body
            )


def replace_both(patch: Patch) -> None:
    """Replace both hosts whenever one reports that it does not reach the other."""
    separate = Exclusions.separate

    def separated(exclusions: Exclusions, one: PeerId, other: PeerId, now: float) -> bool:
        separate(exclusions, one, other, now)
        return True

    patch.setattr(Exclusions, "separate", separated)
