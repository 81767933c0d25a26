"""Totals of the work that a machine gives, kept over restarts and updates.

1. A node or a worker loads the totals of its data directory when it starts.
2. The engine and the trainer count their work into them, and ``GivenKeeper`` the bytes, the hours
   and the busy time of the processor.
3. The keeper writes the file every ``SAVE_EVERY_S`` and at the end, so a killed process loses at
   most that much.

The totals count clients without their names (``DistinctNames``).
"""

import asyncio
import json
import logging
import math
import secrets
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn

from swarmnet_protocols.directory.host_announcements import MAX_NUMBER
from swarmnet_protocols.errors import OutOfResources
from swarmnet_protocols.machine.clock import Clock, wall_clock
from swarmnet_protocols.machine.files import write_whole
from swarmnet_protocols.net.limits.rate_limit import LinkLimiter
from swarmnet_protocols.wire import report_pb2 as pb

_log = logging.getLogger(__name__)

GIVEN_NAME = "given.json"
SAVE_EVERY_S = 60.0
"""Seconds between two writes of the totals. With more, a killed process loses more. With less,
disks of laptops never sleep."""
COUNT_EVERY_S = 5.0
"""Seconds between two counts of hours, bytes and busy time. With more, the hours are less exact
when a node pauses. With less, an idle machine wakes more often."""
MAX_FILE_BYTES = 1 << 16
CORE_WATTS = 10.0
"""Assumed power of one busy core, above that of the idle machine. Processors of laptops take about
5 W a core, those of desktops about 15 W."""
GPU_WATTS = 250.0
"""Assumed power of a busy GPU, above that of an idle one."""

KEPT = 1024
"""Most hashes of ``DistinctNames``. With 1024, an estimate errs by about 3 %. Half the error costs
four times the bytes."""
SALT_BYTES = 16
_HASHES = 1 << 64
_COUNTS = ("block_positions", "samples", "sent_bytes", "received_bytes")
_TIMES = ("active_s", "cpu_s", "gpu_s", "since")
_MILESTONES = (
    ("clients", 1, "served its first client"),
    *(("clients", number, f"served {number:,} clients") for number in (10, 100, 1000, 10_000)),
    ("block_positions", 1e6, "computed a million positions × blocks"),
    ("block_positions", 1e9, "computed a billion positions × blocks"),
    ("block_positions", 1e12, "computed a trillion positions × blocks"),
    *(("samples", number, f"computed {number:,} training samples") for number in (1000, 100_000, 10_000_000)),
    ("hours", 24, "given a day of its time"),
    ("hours", 168, "given a week of its time"),
    ("hours", 1000, "given 1,000 hours"),
    ("hours", 10_000, "given 10,000 hours"),
)
"""Names of counts, their bounds in rising order, and the words of thanks."""


@dataclass
class DistinctNames:
    """A count of distinct names that keeps no name, only the ``KEPT`` smallest hashes.

    This is Bar-Yossef et al., 2002, section 2.1.

    Up to ``KEPT`` names, the count is exact. Beyond, the largest kept hash says how densely names
    fill the range of hashes. The hashes are salted, so nobody can choose peer ids that inflate the
    estimate. They hide no names: whoever has the file can check whether a peer is one of the
    clients.
    """

    hashes: list[int] = field(default_factory=list)
    """In rising order."""
    salt: bytes = field(default_factory=lambda: secrets.token_bytes(SALT_BYTES))

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for hashes or a salt that no count has."""
        if not all(type(each) is int and 0 <= each < _HASHES for each in self.hashes):
            raise ValueError("not the hashes of a count")
        if len(self.hashes) > KEPT or self.hashes != sorted({*self.hashes}):
            raise ValueError("not the order of a count")
        if len(self.salt) != SALT_BYTES:
            raise ValueError("not the salt of a count")

    def add(self, name: str) -> None:
        digest = int.from_bytes(blake2b(name.encode(), key=self.salt, digest_size=8).digest())
        place = bisect_left(self.hashes, digest)
        if self.hashes[place : place + 1] != [digest]:
            self.hashes.insert(place, digest)
            del self.hashes[KEPT:]

    def count(self) -> int:
        """Return the number of names, or an estimate if there are more than ``KEPT``."""
        if len(self.hashes) < KEPT:
            return len(self.hashes)
        return round((KEPT - 1) * _HASHES / self.hashes[-1])


@dataclass
class Given:
    """Totals of the work of a machine since its data directory exists."""

    block_positions: int = 0
    """Positions computed, each once for a block that it passed. Training counts forward and
    backward."""
    samples: int = 0
    """Sequences on which a worker trained."""
    sent_bytes: int = 0
    received_bytes: int = 0
    active_s: float = 0.0
    """Seconds of serving or training."""
    cpu_s: float = 0.0
    """Processor seconds of the node or worker, without p2pd."""
    gpu_s: float = 0.0
    """Seconds that a GPU computed."""
    since: float = field(default_factory=wall_clock)
    """Unix time of the first count."""
    clients: DistinctNames = field(default_factory=DistinctNames)
    """The peer ids whose sessions and passes were admitted. In an open swarm a client has a new
    peer id at each start, so starts rather than people are counted there."""
    thanked: set[str] = field(default_factory=set)
    """The milestones for which the owner was thanked."""

    @property
    def kwh(self) -> float:
        """The energy in kWh, estimated from busy time."""
        return (self.cpu_s * CORE_WATTS + self.gpu_s * GPU_WATTS) / 3.6e6

    def computed(self, positions: int, blocks: int, gpu_s: float = 0.0) -> None:
        """Count ``positions`` that passed ``blocks`` blocks. ``gpu_s``: seconds of a GPU for it."""
        self.block_positions += positions * blocks
        self.gpu_s += gpu_s

    def trained(self, tokens: int, sample_tokens: int, blocks: int, gpu_s: float) -> None:
        """Count training on ``tokens`` of samples of ``sample_tokens`` each.

        Each position passes the model twice: forward and backward, or forward at two points of a
        zeroth-order method.
        """
        self.samples += tokens // sample_tokens
        self.computed(2 * tokens, blocks, gpu_s)

    def new_thanks(self) -> list[str]:
        """Return one sentence for each count that passed a milestone since the last call.

        A count that passed several milestones at once is thanked for the highest.
        """
        reached = {
            "clients": self.clients.count(),
            "block_positions": self.block_positions,
            "samples": self.samples,
            "hours": self.active_s / 3600,
        }
        highest = {
            name: (f"{name} {bound:g}", words) for name, bound, words in _MILESTONES if reached[name] >= bound
        }
        thanks = [words for key, words in highest.values() if key not in self.thanked]
        self.thanked |= {key for key, _ in highest.values()}
        return [f"thank you! this machine has {words}" for words in thanks]

    def message(self) -> pb.Given:
        """Return the totals as others see them."""
        counts = {name: min(getattr(self, name), MAX_NUMBER) for name in _COUNTS}
        return pb.Given(
            **counts,
            clients=self.clients.count(),
            active_s=self.active_s,
            kwh=self.kwh,
            since=self.since,
        )

    def to_json(self) -> str:
        numbers = {name: getattr(self, name) for name in (*_COUNTS, *_TIMES)}
        clients = {"client_hashes": self.clients.hashes, "client_salt": self.clients.salt.hex()}
        return json.dumps(numbers | clients | {"thanked": sorted(self.thanked)})

    @classmethod
    def from_json(cls, text: str) -> "Given":
        """Raises ``ValueError`` for text that ``to_json`` cannot have returned.

        A name that an older version did not write counts from 0. Names of newer versions are
        ignored.
        """
        try:
            found = json.loads(text)
            given = cls(since=found["since"], thanked=set(found["thanked"]))
            if "client_hashes" in found:
                salt = bytes.fromhex(found["client_salt"])
                given.clients = DistinctNames(found["client_hashes"], salt)
            for name in (*_COUNTS, *_TIMES):
                setattr(given, name, found.get(name, 0))
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError("not the totals of a node") from error
        numbers = [getattr(given, name) for name in (*_COUNTS, *_TIMES)]
        if not all(type(each) in {int, float} and 0 <= each <= sys.float_info.max for each in numbers):
            raise ValueError("a number of the totals is out of range")
        if not all(type(getattr(given, name)) is int for name in _COUNTS):
            raise ValueError("a count of the totals is not whole")
        if not all(isinstance(each, str) for each in given.thanked):
            raise ValueError("a milestone of the totals is not text")
        return given


def load_given(folder: Path, notice: Callable[[str], None] = _log.warning) -> Given | None:
    """Return the totals in ``folder``, or None without any.

    A damaged file is set aside, and ``notice`` hears its new name.
    """
    path = folder / GIVEN_NAME
    try:
        with path.open("rb") as file:
            return Given.from_json(file.read(MAX_FILE_BYTES).decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        aside = path.with_suffix(f".damaged-{datetime.now(UTC):%Y%m%d-%H%M%S}")
        try:
            path.rename(aside)
        except OSError:
            aside = path
        notice(f"the totals of this machine cannot be read ({error}): they begin at 0; see {aside}")
        return None


class GivenKeeper:
    """Counts bytes, hours and busy time into the totals of ``folder``, and writes them.

    Its caller holds the lock of ``folder``.
    """

    def __init__(
        self,
        folder: Path,
        link: LinkLimiter,
        *,
        is_active: Callable[[], bool] = lambda: True,
        clock: Clock = time.monotonic,
    ) -> None:
        """``is_active`` says whether the time counts as given."""
        self.given = load_given(folder) or Given()
        self._folder = folder
        self._link = link
        self._clock = clock
        self.is_active = is_active
        self._saving = threading.Lock()
        self._counted_at = clock()
        self._counted = self._used()

    async def run(self, notice: Callable[[str], None]) -> NoReturn:
        """Count every ``COUNT_EVERY_S``, and save every ``SAVE_EVERY_S``.

        ``notice`` hears thanks for milestones.
        """
        loop, saved_at = asyncio.get_running_loop(), -math.inf
        while True:
            self.count()
            thanks = self.given.new_thanks()
            if thanks or self._clock() - saved_at >= SAVE_EVERY_S:
                saved_at = self._clock()
                try:
                    # A disk that sleeps takes seconds to answer.
                    await loop.run_in_executor(None, self.save)
                except OSError as error:  # the next attempt writes them
                    _log.warning("the totals cannot be written: %s", error)
            for text in thanks:
                notice(text)
            await asyncio.sleep(COUNT_EVERY_S)

    def count(self) -> None:
        """Count what was used since the last call."""
        now, before, self._counted = self._clock(), self._counted, self._used()
        given = self.given
        given.sent_bytes += int(self._counted[0] - before[0])
        given.received_bytes += int(self._counted[1] - before[1])
        given.cpu_s += self._counted[2] - before[2]
        given.active_s += (now - self._counted_at) * self.is_active()
        self._counted_at = now

    def save(self) -> None:
        """Write the totals, on any thread. Raises ``OSError``."""
        with self._saving:
            write_whole(self._folder / GIVEN_NAME, self.given.to_json().encode())

    def close(self) -> None:
        """Count and save for the last time. Raises ``OutOfResources`` if the disk is full."""
        try:
            self.count()
            self.save()
        except OSError as error:
            raise OutOfResources(
                f"cannot write into {self._folder}: {error.strerror}", hint="make room on its disk"
            ) from error

    def _used(self) -> tuple[float, float, float]:
        """Return the bytes sent and received, and the processor seconds of this process."""
        return self._link.up.total_bytes, self._link.down.total_bytes, time.process_time()
