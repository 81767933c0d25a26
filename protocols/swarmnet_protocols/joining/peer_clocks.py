"""Compare the clock of this machine with the clocks of peers, for a client that finds no host."""

import asyncio
from collections.abc import Sequence
from statistics import median

from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.clock import clock_advice, wall_clock
from swarmnet_protocols.net import Transport
from swarmnet_protocols.net.p2pd.transport import peer_of
from swarmnet_protocols.net.protocol_ids import PROBE
from swarmnet_protocols.reachability.dial_back import probe

MAX_CLOCKS = 3
"""Most peers that are asked for the time. Their median counts."""
CLOCK_S = 3.0
"""Timeout in seconds for a peer to tell its time."""


async def advise_on_clock(transport: Transport, addresses: Sequence[str]) -> str:
    """Return advice to set the clock if it differs from the clocks of the peers at ``addresses``.

    Empty if the clock agrees, or nobody answers. Records of hosts expire within a minute, so a
    wrong clock makes every host look gone.
    """
    answers = await asyncio.gather(*(_clock_error_s(transport, each) for each in addresses[:MAX_CLOCKS]))
    errors_s = [each for each in answers if each is not None]
    return clock_advice(median(errors_s)) if errors_s else ""


async def _clock_error_s(transport: Transport, address: str) -> float | None:
    """Return how many seconds this machine's clock is behind a peer's; None without an answer."""
    try:
        async with asyncio.timeout(CLOCK_S):
            peer = peer_of(address)
            stream = await PROBE.open(transport, peer, addresses=[address], deadline_s=CLOCK_S)
            return (await probe(stream, (), wall_clock)).behind_s
    except (SwarmnetError, TimeoutError):
        return None
