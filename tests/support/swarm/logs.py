"""An activation log with its own memory account."""

from swarmnet_protocols.net.limits.resource_limits import Resource
from swarmnet_protocols.net.limits.resources import Scope
from swarmnet_protocols.session.activation_log import ActivationLog


def a_log(max_bytes: int = 1 << 30) -> ActivationLog:
    return ActivationLog(Scope("a test", {Resource.LOG: max_bytes}, {}).reserve(Resource.LOG, 0))
