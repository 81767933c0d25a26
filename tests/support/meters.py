"""The account of a stream, for tests of what lies below it."""

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.meter import Meter
from swarmnet_protocols.net.resources import ResourceManager
from swarmnet_protocols.timing import Timing


def a_meter(resources: ResourceManager | None = None) -> Meter:
    """Of a stream that somebody opened. Needs a running loop."""
    return Meter.of_theirs(resources or ResourceManager(), PeerId("somebody"), Timing())
