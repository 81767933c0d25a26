"""An activation log with room of its own."""

from swarmnet_protocols.resources import Scope, Stock
from swarmnet_protocols.session.log import ActivationLog


def a_log(max_bytes: int = 1 << 30) -> ActivationLog:
    return ActivationLog(Scope("a test", {Stock.LOG: max_bytes}, {}).hold(Stock.LOG, 0))
