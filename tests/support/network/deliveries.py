"""Messages of the simulated network at their arrival: what they are, and faults injected there."""

from collections.abc import Callable

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.protocol_ids import LINK, SESSION
from swarmnet_protocols.wire import session_pb2 as pb
from tests.support.network.memory_network import Delivery, MemoryNetwork


def once(
    network: MemoryNetwork, matches: Callable[[Delivery], bool], action: Callable[[Delivery], None]
) -> list[Delivery]:
    """Do ``action`` at the first delivery that ``matches``, before its receiver sees it.

    Returns a list that holds that delivery afterwards.
    """
    seen: list[Delivery] = []

    def observe(delivery: Delivery) -> None:
        if not seen and matches(delivery):
            seen.append(delivery)
            action(delivery)

    network.observers.append(observe)
    return seen


def request(delivery: Delivery) -> str:
    """The kind of a message: "open", "link", "step 7", or "" for any other."""
    if delivery.protocol.id == SESSION.id:
        opening = pb.SessionRequest.FromString(delivery.message.header)
        return "open" if opening.HasField("open") else ""
    if delivery.protocol.id == LINK.id:
        message = pb.LinkRequest.FromString(delivery.message.header)
        if message.HasField("link"):
            return "link"
        if message.HasField("step"):
            return f"replay {message.step.seq}" if message.step.replay else f"step {message.step.seq}"
    return ""


def arrives_at(peers: set[PeerId], what: str) -> Callable[[Delivery], bool]:
    return lambda delivery: delivery.target in peers and request(delivery) == what
