"""Stream scopes for tests of the layers below a transport."""

from swarmnet_protocols.net import PeerId
from swarmnet_protocols.net.limits.resources import ResourceManager
from swarmnet_protocols.net.limits.stream_scope import StreamScope
from swarmnet_protocols.timing import Timing


def new_scope(resources: ResourceManager | None = None) -> StreamScope:
    """The scope of an inbound stream. Needs a running loop."""
    return StreamScope.inbound(resources or ResourceManager(), PeerId("opener"), Timing())
