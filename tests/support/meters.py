"""The account of a stream, for tests of what lies below it."""

from swarmnet_protocols.resources import ResourceManager
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.transport import PeerId
from swarmnet_protocols.transport.meter import Meter


def a_meter(resources: ResourceManager | None = None) -> Meter:
    """Of a stream that somebody opened. Needs a running loop."""
    return Meter.of_theirs(resources or ResourceManager(), PeerId("somebody"), Timing())
