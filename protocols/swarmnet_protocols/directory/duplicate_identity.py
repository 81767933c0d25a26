"""Finds out that another process is on the network under our identity: two machines have copies of one key.

Each process keeps saying in the directory that it is there, with a number of its own. Both records have the same signer and topic,
so whoever looks finds the newer one, which should be its own. Who finds another's word looks and speaks more often for a while: the
other sees it at its next look, and both are sure a few seconds later. So does who has just started, in case both have. None of the
two ends of itself: nobody can say which one is meant, and a thief of the key could end the rightful one. The owner is told.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import NoReturn

from google.protobuf.message import DecodeError

from swarmnet_protocols.directory import Directory
from swarmnet_protocols.directory.host_announcements import MAX_ADDRESSES, listed
from swarmnet_protocols.errors import SwarmnetError
from swarmnet_protocols.machine.aio import cancel
from swarmnet_protocols.net import PeerId, Transport
from swarmnet_protocols.net.identity import peer_id_of
from swarmnet_protocols.net.refusal import printable
from swarmnet_protocols.timing import Timing
from swarmnet_protocols.wire import records_pb2 as pb

_log = logging.getLogger(__name__)

PROCESS_BYTES = 16
REMEMBERED_S = 600.0
"""A double that has not been heard of for so long is gone."""
MORE_OFTEN = 12
"""By how much whoever may have a double looks and speaks more often."""
DOUBTS_AT_START, DOUBTS = 0.25, 1.5
"""How long it does, in ``Timing.identity_announce_s``: until another who starts now, or after a double's word one who is there, has looked too."""


@dataclass(frozen=True)
class Presence:
    """What a process says of itself: its number, where it is, and, in ``sequence``, when."""

    process: bytes
    addresses: tuple[str, ...]
    sequence: int


class Duplicate:
    """What is known of another process with our identity. Pure: takes the time as an argument.

    One record that is not ours may be left of a process that ended. Only who goes on saying that it is there is there.
    """

    def __init__(self, process: bytes, seldom_s: float, now: float) -> None:
        """Of ``process``, which starts ``now`` and looks every ``seldom_s`` where there is nothing to doubt."""
        self._process = process
        self._seldom_s = seldom_s
        self._doubts_until = now + DOUBTS_AT_START * seldom_s
        self._last: Presence | None = None
        self._heard_at = -math.inf

    def look(self, found: Presence, now: float) -> None:
        """Take note of the newest presence in our name, which is mostly our own."""
        if found.process == self._process:
            return
        is_later = self._last is not None and found.sequence > self._last.sequence
        if self.at(now) is None and (self._last is None or is_later):
            self._doubts_until = now + DOUBTS * self._seldom_s
        if is_later:
            self._heard_at = now
        self._last = found

    def at(self, now: float) -> Presence | None:
        """The last sign of a double that is there; None if none is."""
        return self._last if now < self._heard_at + REMEMBERED_S else None

    def pause_s(self, now: float, rng: Random) -> float:
        """Until the next look and word."""
        if now < self._doubts_until:
            # Unevenly: of two who look and speak in step one hears only itself.
            return rng.uniform(0.4, 1.0) * self._seldom_s / MORE_OFTEN
        return rng.uniform(0.8, 1.0) * self._seldom_s


def topic_of(peer: PeerId) -> str:
    """Where a peer says that it is there."""
    return f"presence/{peer}"


class DuplicateWatch:
    """Made by :meth:`keep`."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        rng: Random,
        timing: Timing,
        changed: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._changed = changed
        self._transport = transport
        self._directory = directory
        self._rng = rng
        self._timing = timing
        self._process = rng.randbytes(PROCESS_BYTES)
        self._double = Duplicate(self._process, timing.identity_announce_s, self._now())

    @classmethod
    @asynccontextmanager
    async def keep(
        cls,
        transport: Transport,
        directory: Directory,
        rng: Random,
        timing: Timing,
        changed: Callable[[str], None] = lambda _: None,
    ) -> AsyncIterator["DuplicateWatch"]:
        """Say that we are here, and look for a double, while the context is open.

        Whenever one has come it is logged once; ``changed`` is told then, with the warning, and with nothing when it has gone.
        """
        watch = cls(transport, directory, rng, timing, changed)
        watching = asyncio.create_task(watch._keep(), name="presence")
        try:
            yield watch
        finally:
            await cancel(watching)

    def warning(self) -> str:
        """What the owner should know and do; empty if there is no double."""
        double = self._double.at(self._now())
        if double is None:
            return ""
        ours = self._transport.addresses()
        where = printable(", ".join(address for address in double.addresses if address not in ours))
        return (
            f"another process is on the network as {self._transport.peer_id}{f', at {where}' if where else ''}: two machines "
            "have copies of one identity key, and clients reach either. Stop one of them and start it with another --data-dir; "
            "if you know of none, the key was stolen: stop this node too"
        )

    async def _keep(self) -> NoReturn:
        was_there = False
        while True:
            with contextlib.suppress(SwarmnetError):  # the directory may answer the next time
                await self._look()
            warning = self.warning()
            if warning and not was_there:
                _log.warning("%s", warning)
            if was_there != bool(warning):
                self._changed(warning)
            was_there = bool(warning)
            with contextlib.suppress(SwarmnetError):
                await self._say()
            await asyncio.sleep(self._double.pause_s(self._now(), self._rng))

    async def _look(self) -> None:
        peer = self._transport.peer_id
        for record in await self._directory.lookup(topic_of(peer)):
            if peer_id_of(record.signer) == peer:  # others may write there too
                with contextlib.suppress(DecodeError):
                    said = pb.PresenceRecord.FromString(record.body)
                    found = Presence(said.process, tuple(said.addresses[:MAX_ADDRESSES]), record.sequence)
                    self._double.look(found, self._now())

    async def _say(self) -> None:
        said = pb.PresenceRecord(process=self._process, addresses=listed(self._transport.addresses()))
        await self._directory.publish(
            topic_of(self._transport.peer_id),
            said.SerializeToString(),
            lifetime_s=3 * self._timing.identity_announce_s,
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
