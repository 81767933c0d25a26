"""What every transport does with an incoming stream."""

import asyncio
import logging

from swarmnet_protocols.errors import (
    DeadlineExceeded,
    NotAuthorised,
    ProtocolViolation,
    StreamEnded,
    SwarmnetError,
)
from swarmnet_protocols.net import Handler, ProtocolSpec, Stream
from swarmnet_protocols.net.meter import VIOLATION_FRAMES
from swarmnet_protocols.net.refusal import no_room
from swarmnet_protocols.net.resources import Rate, ResourceLimitReached

_log = logging.getLogger(__name__)


async def supervise(handler: Handler, stream: Stream, protocol: ProtocolSpec) -> None:
    """Run ``handler`` on ``stream`` and close it. A failure is logged: it harms no other stream."""
    try:
        await handler(stream)
    except ResourceLimitReached as error:
        _log.debug("%s with %s: %s", protocol.id, stream.peer, error)
        stream.refuse(no_room(error))
    except (
        DeadlineExceeded,
        NotAuthorised,
        StreamEnded,  # this one, or another that the handler had opened
    ) as error:  # anybody can make this happen as often as they like
        _log.debug("%s with %s: %s", protocol.id, stream.peer, error)
    except ProtocolViolation as error:
        stream.scope.charge(Rate.FRAMES, VIOLATION_FRAMES, asyncio.get_running_loop().time())
        _log.warning("%s with %s: %s", protocol.id, stream.peer, error)
    except SwarmnetError as error:
        _log.warning("%s with %s: %s", protocol.id, stream.peer, error)
    except Exception:  # noqa: BLE001 - the supervisor of handlers
        _log.exception("%s with %s failed", protocol.id, stream.peer)
    finally:
        stream.close()
