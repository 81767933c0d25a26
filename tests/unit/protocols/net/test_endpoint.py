"""An endpoint that closes leaves no socket open."""

import socket

from swarmnet_protocols.net.endpoint import Endpoint
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.net.pipe import Pipe
from swarmnet_protocols.timing import Timing
from tests.defences import Patch, defence
from tests.support.network.socket_streams import connect
from tests.support.network.virtual_time import run


def close_nothing(patch: Patch) -> None:
    def accept(endpoint: Endpoint, serve, _):  # type: ignore[no-untyped-def]
        endpoint.start(serve())

    patch.setattr(Endpoint, "accept", accept)


@defence("a connection whose task never runs is closed", off=close_nothing)
def test_connections_accepted_as_an_endpoint_closes_are_closed() -> None:
    async def serve(pipe: Pipe) -> None:
        await pipe.closed()

    async def main() -> None:
        endpoint = Endpoint(LinkLimiter(), Timing())
        (first, _), (second, _) = sockets = socket.socketpair(), socket.socketpair()
        before, after = await connect(first), await connect(second)
        endpoint.accept(lambda: serve(before), before.writer.close)
        await endpoint.close()
        endpoint.accept(lambda: serve(after), after.writer.close)
        try:
            assert [each.writer.is_closing() for each in (before, after)] == [True, True]
        finally:
            for pipe, (_, theirs) in zip((before, after), sockets, strict=True):
                pipe.writer.transport.abort()
                theirs.close()

    run(main())
