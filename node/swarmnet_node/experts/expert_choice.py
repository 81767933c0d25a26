"""Choose the routed experts that a peer hosts. Pure.

A peer that joins takes the rarest experts. Later, hosts ask the peer to load and drop experts. A
single peer sends such a request, so its effect is limited:

- A peer follows one host at a time: the host that sends most rows.
- Few experts move at once.
- A peer drops an expert only after it saw another peer compute it (``expert_witness.py``).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from swarmnet_protocols.directory.expert_announcements import BlockExperts, ExpertBits
from swarmnet_protocols.net import PeerId

MAX_ROUND_TRIP_S = 0.02
"""Longest round trip in seconds to peers with experts, unless the owner allows more. Each block of
a token waits for one round trip. A longer limit slows every token; a shorter one leaves fewer
peers."""

ARRANGER_S = 600.0
"""Seconds after its last request during which one host decides alone which experts a peer holds. A
host that sends more rows takes over sooner. With less, two hosts could undo each other's moves."""
PERIOD_S = 50.0
"""Seconds between two requests that a peer follows."""
SHARE = 0.25
"""Largest share of its experts that a peer drops for one request, and of its capacity that it
loads. With a larger share, one message could take a peer's experts from its other hosts. With a
smaller one, peers that begin with the same experts would take longer to share them out."""


@dataclass(frozen=True)
class Followed:
    """The last request that a peer followed: which host sent it, and when."""

    host: PeerId
    at: float


def choose_experts(counts: Mapping[int, int], hosted: Iterable[BlockExperts], capacity: int) -> BlockExperts:
    """Return the ``capacity`` experts with the fewest replicas.

    ``counts``: number of experts of each block that has any. ``hosted``: the experts of each other
    peer that answers. Ties go to the lowest number, so a peer takes the same experts in every
    block. Each block of a token then goes to equally many peers.
    """
    replicas = Counter((block, expert) for each in hosted for block in each for expert in each[block])
    every = [(block, expert) for block in counts for expert in range(counts[block])]
    return _by_block(sorted(every, key=lambda each: (replicas[each], each[1], each[0]))[:capacity])


def follows(last: Followed | None, host: PeerId, now: float, rows: Mapping[PeerId, int]) -> bool:
    """Return whether a peer follows a request of ``host``. ``rows``: rows computed for each
    host."""
    if last is None or now >= last.at + ARRANGER_S:
        return True
    is_next = host == last.host or rows.get(host, 0) > rows.get(last.host, 0)
    return is_next and now >= last.at + PERIOD_S


def accepted_drops(drops: BlockExperts, held: BlockExperts) -> BlockExperts:
    """Return the experts that a peer drops for one request: at most ``SHARE`` of its experts."""
    every = sum(map(len, held.values()))
    wanted = [
        (block, expert) for block in sorted(drops) for expert in sorted(drops[block] & held.get(block, set()))
    ]
    return _by_block(wanted[: max(1, int(SHARE * every))])


def accepted_loads(
    loads: BlockExperts, held: BlockExperts, counts: Mapping[int, int], capacity: int
) -> BlockExperts:
    """Return the experts that a peer loads for one request.

    The peer loads at most ``SHARE`` of its capacity, and no more than fit next to ``held``.
    ``counts``: number of experts of each block of the model that has any.
    """
    room = capacity - sum(map(len, held.values()))
    wanted = [
        (block, expert)
        for block in sorted(loads)
        for expert in sorted(loads[block] - held.get(block, set()))
        if expert < counts.get(block, 0)
    ]
    return _by_block(wanted[: max(0, min(room, max(1, int(SHARE * capacity))))])


def _by_block(experts: Collection[tuple[int, int]]) -> BlockExperts:
    found: dict[int, set[int]] = {}
    for block, expert in experts:
        found.setdefault(block, set()).add(expert)
    return {block: ExpertBits.of(found[block]) for block in sorted(found)}
