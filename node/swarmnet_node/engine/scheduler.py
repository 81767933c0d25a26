"""Chooses the waiting work of the next forward, and how long a forward waits for more.

Pure: no torch, no clock, no I/O.
"""

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from swarmnet_protocols.averages import averaged

PREFILL_SHARE = 4
"""Prefill gets at least one part in this many of a batch, even if decoding could fill all of it.
So neither starves the other."""
AHEAD_SHARE = 4
"""Clients that are ahead of their share may fill the batch up to one part in this many of its
limit. A forward of so few positions takes hardly longer than that of one."""
MIN_CHARGE = 2
"""Smallest number of positions to charge a client for one forward. Single positions cost more time
than the positions of a prompt."""
MAX_AHEAD = 2
"""A client is ahead of its share by at most this many batches, whatever it has computed. With more,
it would wait longer for its next turn."""
SHORT_TOKENS = 32
"""Work of at most this many positions counts as short in every batch. Also the smallest limit of a
batch that several sessions share."""
SHARED_FORWARD_S = 0.1
"""Longest forward, in seconds, while several sessions have work. A step that arrives waits for
it."""
OPENING_TOKENS = 256
"""Positions that a new session is assumed to begin with: one step of a prompt."""
MAX_WAIT_SHARE = 0.4
"""Longest wait for one more sequence, as a share of the forward's duration."""
MAX_WAIT_S = 0.004
"""Longest wait for one more sequence, in seconds. Messages that were sent together arrive within a
shorter time."""
MAX_WAIT_BEHIND_S = 0.02
"""Longest wait, in seconds, while all waiting clients are ahead of another one. That client's next
step comes only after it got an answer."""


BATCH_RIDE_SHARE = 0.1
"""Largest share by which the steps of batches may prolong a forward of others."""
BATCH_WAIT_S = 10.0
"""Seconds after which steps of a batch wait no longer for others. More would come near to
``Timing.stall_s``, when clients give up a host that computes nothing for them. Less would delay
others more often."""
RHYTHM_S = 1.0
"""Seconds without other steps until batches compute as if they were alone. More would waste time
after the last answer. Less would delay steps that come over slow links."""
RHYTHM_SMOOTHING = 0.1
"""Weight of the newest pause or forward in its running mean."""

C = TypeVar("C", bound=Hashable)

NOTHING_SERVED: Mapping[Hashable, float] = {}


@dataclass(frozen=True)
class Waiting:
    """One sequence of ``client`` with ``tokens`` positions to compute.

    ``part`` identifies the part of the stage that computes them: only work for the same part can
    share a forward.
    """

    tokens: int
    part: int
    client: Hashable = None


@dataclass
class Rhythm:
    """The pauses between the steps of all sessions other than batches. Batches compute in them.

    Shorter pauses count at once and longer ones slowly, so that a batch rarely delays a step.
    """

    ended_s: float = -math.inf
    """End of the last forward with such steps."""
    pause_s: float = 0.0
    """Seconds from such an end to the arrival of the next step; 0 until measured."""
    forward_s: float = 0.0
    """Seconds of a forward with such steps, averaged."""
    _is_pause: bool = False

    def came(self, now_s: float) -> None:
        """Note that a step has come."""
        pause_s = now_s - self.ended_s
        if self._is_pause and pause_s < RHYTHM_S:
            shorter = pause_s < self.pause_s
            self.pause_s = pause_s if shorter else averaged(self.pause_s, pause_s, RHYTHM_SMOOTHING)
        self._is_pause = False

    def computed(self, now_s: float, elapsed_s: float) -> None:
        """Note the end of a forward with such steps."""
        self.ended_s, self._is_pause = now_s, True
        self.forward_s = averaged(self.forward_s, elapsed_s, RHYTHM_SMOOTHING)

    def spare_s(self, now_s: float, *, waits: bool) -> float:
        """Return the seconds that steps of batches may add to the next forward. ``waits``: whether
        the forward has other steps."""
        if waits:
            return BATCH_RIDE_SHARE * self.forward_s
        if now_s - self.ended_s >= RHYTHM_S:
            return math.inf
        # even a forward of few positions takes as long as a forward of the others
        return self.ended_s + self.pause_s - now_s - self.forward_s


class ClientShares:
    """The positions served to each active client.

    A client is active if it has work, or is expected to have some soon. The active client with the
    lowest counter is the furthest behind. A client that returns from a pause starts at the lowest
    counter of the active clients. Otherwise it would collect credit while idle. Counters as in VTC
    (Sheng et al., 2024).
    """

    def __init__(self) -> None:
        self.served: dict[Hashable, float] = {}

    def set_active(self, active: Collection[Hashable]) -> None:
        """Add the active clients, and forget all others."""
        stay = {client: served for client, served in self.served.items() if client in active}
        least = min(stay.values(), default=0.0)
        self.served = dict.fromkeys(active, least) | stay

    def lead(self, clients: Collection[Hashable]) -> float:
        """Return by how many positions all of these clients are ahead of an active client."""
        least = min(self.served.values(), default=0.0)
        return min((self.served.get(client, least) for client in clients), default=least) - least

    def charge(self, parts: Iterable[tuple[Hashable, int]], max_tokens: int) -> None:
        """Count the parts (client, positions) of a batch of at most ``max_tokens``.

        All clients must be active.
        """
        used: Counter[Hashable] = Counter()
        for client, positions in parts:
            used[client] += positions
        for client, positions in used.items():
            self.served[client] += max(positions, MIN_CHARGE)
        most = min(self.served.values()) + MAX_AHEAD * max_tokens
        self.served = {client: min(served, most) for client, served in self.served.items()}


def shared_tokens(position_s: float, max_tokens: int) -> int:
    """Return the most positions of a forward while several sessions have work.

    At most ``max_tokens``. A step that arrives waits for one forward. ``position_s``: seconds for
    one position in a forward of many, or 0 if not measured yet.
    """
    lasting = SHARED_FORWARD_S / position_s if position_s else 0.0
    return int(min(max_tokens, max(SHORT_TOKENS, lasting)))


def expected_wait_s(queued: Mapping[C, int], client: C, position_s: float) -> float:
    """Return the seconds that a new session's first ``OPENING_TOKENS`` positions would wait.

    Their own computation does not count. ``queued``: the positions that wait now, by client.
    ``position_s``: as for ``shared_tokens``.

    ``schedule`` gives clients equal shares. So this client's waiting positions come first, and
    about as many positions of every other client. No client waits for all that another has sent.
    """
    own = queued.get(client, 0)
    others = sum(min(positions, own + OPENING_TOKENS) for each, positions in queued.items() if each != client)
    return position_s * (own + others)


def schedule(
    waiting: Sequence[Waiting], max_tokens: int, served: Mapping[Hashable, float] = NOTHING_SERVED
) -> list[tuple[int, int]]:
    """Return the next batch from work in order of arrival: (index into ``waiting``, its tokens).

    The batch has at most ``max_tokens``. ``served``: positions served to each active client.

    - The client that is the furthest behind comes first. Its oldest work decides the part of the
      stage, and is in the batch.
    - Short work (decoding, short prompts) has priority, because a client waits for each of its
      tokens.
    - Long work is split to fill the batch, or its share of a batch with short work.
    - A client that would be more than ``max_tokens`` ahead of the first client waits, except for
      what ``AHEAD_SHARE`` leaves.
    """
    if not waiting:
        return []
    # A client that is not in ``served`` has just come. It counts as the furthest behind.
    least = min(served.values(), default=0.0)
    ahead = [served.get(work.client, least) - least for work in waiting]
    # Sorting is stable: clients that are equally far keep the order of arrival.
    order = sorted(range(len(waiting)), key=ahead.__getitem__)
    part = waiting[order[0]].part
    share = max(1, max_tokens // PREFILL_SHARE)
    short_tokens = max(share, min(SHORT_TOKENS, max_tokens))
    short: list[int] = []
    long: list[int] = []
    for index in order:
        if waiting[index].part == part:
            (short if waiting[index].tokens <= short_tokens else long).append(index)
    allowed = {work.client: int(max_tokens - lead) for work, lead in zip(waiting, ahead, strict=True)}
    batch: list[tuple[int, int]] = []
    total = 0
    # Short work first, up to what is reserved for long work. Long work may then fill the batch if
    # it is alone, and otherwise adds its share: a longer forward would delay every short answer.
    for indices, limit in (short, max_tokens - (share if long else 0)), (long, max_tokens):
        until = min(limit, total + share) if indices is long and total else limit
        for index in indices:
            work = waiting[index]
            # The oldest work of the first client gets at least one part in AHEAD_SHARE, whatever
            # the batch holds already.
            taken = 0 if index == order[0] else total
            allowance = max(allowed[work.client], max_tokens // AHEAD_SHARE - taken)
            tokens = min(work.tokens, until - total, allowance)
            if tokens > 0:
                batch.append((index, tokens))
                allowed[work.client] -= tokens
                total += tokens
    return batch


def batching_delay_s(waiting: int, expected: int, forward_s: float, lead: float = 0.0) -> float:
    """Return the seconds that a forward of ``waiting`` sequences should wait for one more.

    ``forward_s``: duration of the forward. ``lead``: positions that the waiting clients are ahead
    of an expected client.

    The result is 0 unless more sequences are ``expected``, so a single sequence never waits.
    Sequences that one host computes together reach the next host one message after another. A
    forward with the first sequence alone would keep them apart in all later forwards. If it
    leaves out a client that is behind its share, that client waits in each of its steps until a
    forward of the others ends.
    """
    if not 0 < waiting < expected:
        return 0.0
    return min(MAX_WAIT_BEHIND_S if lead >= SHORT_TOKENS else MAX_WAIT_S, MAX_WAIT_SHARE * forward_s)
