"""What is said at the door, and how it is understood."""

from swarmnet_protocols.errors import NotAuthorised, ProtocolViolation
from swarmnet_protocols.machine.clock import clock_advice
from swarmnet_protocols.membership.membership import Membership, Revoked
from swarmnet_protocols.net import Message, PeerId, Stream
from swarmnet_protocols.net.messages import parse, receive_within
from swarmnet_protocols.net.refusal import MAX_REASON_CHARS, printable
from swarmnet_protocols.wire import door_pb2 as pb


async def hear(stream: Stream, silence_s: float | None) -> tuple[pb.DoorMessage, bytes]:
    """What the other side says, with what it shows for it. Raises ``ProtocolViolation`` for nonsense."""
    message = await (stream.receive() if silence_s is None else receive_within(stream, silence_s))
    said = parse(pb.DoorMessage, message.header)
    if said.WhichOneof("kind") is None:
        raise ProtocolViolation("nothing was said at the door")
    return said, bytes(message.payload)


def hello(membership: Membership) -> Message:
    """Who we are."""
    said = pb.Hello(
        swarm=membership.rules.swarm, certificate=membership.certificate, serials=serials(membership)
    )
    return Message(pb.DoorMessage(hello=said).SerializeToString())


def serials(membership: Membership) -> list[pb.Serial]:
    """Which revocations we have."""
    return [
        pb.Serial(signer=signer, serial=serial) for signer, serial in membership.revocations.serials.items()
    ]


def refusal(error: NotAuthorised, now: float) -> Message:
    """Why somebody has to stay out: to a revoked one with the signed list that names it."""
    refused = pb.Refused(reason=str(error)[:MAX_REASON_CHARS], time_ms=max(0, round(now * 1000)))
    shown = error.evidence if isinstance(error, Revoked) else b""
    return Message(pb.DoorMessage(refused=refused).SerializeToString(), shown)


def explain(peer: PeerId, refused: pb.Refused, now: float) -> NotAuthorised:
    """What ``peer`` refuses us for, and what to do."""
    advice = clock_advice(refused.time_ms / 1000 - now) if refused.time_ms else ""
    hint = advice or "ask whoever runs the swarm for an invite"
    return NotAuthorised(f"{peer} does not let us in: {printable(refused.reason)}", hint=hint)
