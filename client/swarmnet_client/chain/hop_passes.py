"""One pass at one host, as the client asks for it: for training and for audits."""

from collections.abc import Sequence

from swarmnet_client.hosts.model_hosts import ModelHosts
from swarmnet_protocols.arrays import Array
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.net.protocol_ids import PASS
from swarmnet_protocols.net.refusal import Refused
from swarmnet_protocols.routing.chain_view import Hop
from swarmnet_protocols.session.passes import request_pass
from swarmnet_protocols.wire import refusal_pb2
from swarmnet_protocols.wire import session_pb2 as pb


class GraphGone(SwarmnetError):
    """The host does not have the graph of a forward pass that the backward pass was to use."""


async def ask_pass(
    hosts: ModelHosts,
    hop: Hop,
    begin: pb.Begin,
    tensors: Sequence[Array],
    shapes: Sequence[tuple[int, int]],
) -> list[Array]:
    """Have ``hop`` compute the pass ``begin`` from ``tensors``; returns tensors of ``shapes``.

    Raises ``GraphGone``, what opening a stream raises, and what ``request_pass`` raises.
    """
    try:
        stream = await PASS.open(hosts.transport, hop.peer, hosts.timing, addresses=hop.addresses)
        return await request_pass(stream, begin, tensors, shapes, hosts.timing)
    except Refused as refusal:
        if refusal.reason == refusal_pb2.REASON_GRAPH_GONE and begin.backward and begin.graph:
            raise GraphGone(str(refusal)) from refusal
        raise
