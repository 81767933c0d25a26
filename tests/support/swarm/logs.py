"""An activation log with its own memory account."""

from swarmnet_protocols.net.limits.resources import Resource, Scope
from swarmnet_protocols.session.activation_log import ActivationLog


def a_log(max_bytes: int = 1 << 30) -> ActivationLog:
    return ActivationLog(Scope("a test", {Resource.LOG: max_bytes}, {}).reserve(Resource.LOG, 0))
